"""Cosines and sines of rotary position embeddings, as :func:`minfer.rope` reads them, with the scalings of long contexts.

The frequencies of a head's pairs are theta^(-2 i / dim). The scalings, by their names in Hugging Face configs:

    linear    all frequencies are divided by ``factor``: positions are interpolated
    dynamic   theta grows with the length of the sequence beyond what the model was trained for (NTK-aware)
    llama3    low frequencies are divided by ``factor``, high ones stay, those between are interpolated smoothly
    yarn      the same by a linear ramp over the pairs, and all cosines and sines are multiplied by a factor (Peng et al., 2023)
    longrope  each frequency is divided by a factor of its own, of one list for short and another for long sequences (Ding et al., 2024)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..checks.common import ValueChecker, is_integer

Scaling = Mapping[str, Any]
Scaled = tuple[Tensor, float]  # frequencies [dim / 2], and what cosines and sines are multiplied with

_check = ValueChecker("rope_cache")


def rope_cache(theta: float, dim: int, length: int, scaling: Scaling | None = None, device: torch.device | str | None = None) -> Tensor:
    """The table of cosines and sines for positions 0 to length - 1.

    Args:
      theta: the base, 10000.0 for instance; positive and not 1.
      dim: elements of a head that are rotated, even.
      length: positions. "dynamic" and "longrope" take the frequencies of a sequence that is as long as this.
      scaling: None, or a dictionary as in Hugging Face configs (``rope_scaling``, ``rope_parameters``), whose ``rope_type`` (or ``type``)
        is "default", "linear", "dynamic", "llama3", "yarn" or "longrope", with that one's parameters: ``factor``,
        ``original_max_position_embeddings``, ``low_freq_factor``, ``high_freq_factor``, ``beta_fast``, ``beta_slow``,
        ``attention_factor``, ``mscale``, ``mscale_all_dim``, ``truncate``, ``short_factor``, ``long_factor``. Where a config has a value
        outside of the dictionary, put it in: ``max_position_embeddings`` for "dynamic", and for "yarn" and "longrope" without a
        ``factor``. Other keys are not read.
      device: of the result.

    Returns:
      float32 [length, dim], contiguous: dim / 2 cosines, then as many sines, in both layouts of pairs.

    Raises:
      ValueError: an argument cannot be right, or a parameter is missing; the message names it.

    Numerics: computed in float64 on the CPU and rounded once, so that it is the same on every device.
    """
    _check(is_integer(length) and length >= 0, "length must be an integer of 0 or more, got {}", length)
    frequencies, factor = rope_frequencies(theta, dim, scaling, length)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    table = torch.empty(length, dim, dtype=torch.float32)
    table[:, : dim // 2].copy_(angles.cos() * factor)
    table[:, dim // 2 :].copy_(angles.sin() * factor)
    return table if device is None else table.to(device)


def rope_frequencies(theta: float, dim: int, scaling: Scaling | None = None, length: int = 0) -> Scaled:
    """Frequencies, float64 [dim / 2] in radians a position, and the factor of cosines and sines; arguments as of :func:`rope_cache`."""
    _check(is_integer(dim) and dim >= 2 and dim % 2 == 0, "dim must be an even integer of 2 or more, got {}", dim)
    good = isinstance(theta, (int, float)) and math.isfinite(theta) and theta > 0 and theta != 1
    _check(good, "theta must be positive and not 1, got {}", theta)
    if scaling is None:
        return _frequencies(theta, dim), 1.0
    kind = scaling.get("rope_type", scaling.get("type"))
    _check(kind in _SCALINGS, "scaling must have a rope_type of {}, got {}", ", ".join(_SCALINGS), repr(kind))
    return _SCALINGS[kind](theta, dim, scaling, length)


def _frequencies(theta: float, dim: int) -> Tensor:
    return float(theta) ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def _number(scaling: Scaling, *names: str) -> float:
    """The parameter of the first name that is there."""
    for name in names:
        value = scaling.get(name)
        if value is not None:
            good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
            _check(good, "scaling's {} must be a positive number, got {}", name, repr(value))
            return float(value)
    _check(False, "scaling must have {}", " or ".join(names))
    raise AssertionError


def _factor(scaling: Scaling) -> float:
    """Of how many times the length that the model was trained for; where it is not there, by the two lengths."""
    if scaling.get("factor") is not None:
        return _number(scaling, "factor")
    _check(scaling.get("max_position_embeddings") is not None, "scaling must have factor or max_position_embeddings")
    return _number(scaling, "max_position_embeddings") / _number(scaling, "original_max_position_embeddings")


def _default(theta: float, dim: int, scaling: Scaling, length: int) -> Scaled:
    return _frequencies(theta, dim), 1.0


def _linear(theta: float, dim: int, scaling: Scaling, length: int) -> Scaled:
    return _frequencies(theta, dim) / _number(scaling, "factor"), 1.0


def _dynamic(theta: float, dim: int, scaling: Scaling, length: int) -> Scaled:
    factor, trained = _number(scaling, "factor"), _number(scaling, "max_position_embeddings", "original_max_position_embeddings")
    _check(dim > 2, "dim must be more than 2 for dynamic scaling, got {}", dim)
    stretch = factor * max(length, trained) / trained - (factor - 1.0)
    return _frequencies(theta * stretch ** (dim / (dim - 2)), dim), 1.0


def _llama3(theta: float, dim: int, scaling: Scaling, length: int) -> Scaled:
    frequencies, factor = _frequencies(theta, dim), _number(scaling, "factor")
    trained, low, high = (_number(scaling, name) for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
    _check(low < high, "scaling's low_freq_factor must be less than high_freq_factor, got {} and {}", low, high)
    turns = trained * frequencies / (2.0 * math.pi)  # over the length that the model was trained for
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / factor), 1.0


def _yarn(theta: float, dim: int, scaling: Scaling, length: int) -> Scaled:
    frequencies, factor = _frequencies(theta, dim), _factor(scaling)
    trained = _number(scaling, "original_max_position_embeddings")

    def pair_of(turns: float) -> float:
        """The pair, a fraction, that turns so often over the length that the model was trained for."""
        return dim * math.log(trained / (turns * 2.0 * math.pi)) / (2.0 * math.log(theta))

    # Zeros stand for the usual values, as a missing key does.
    first = pair_of(_number(scaling, "beta_fast") if scaling.get("beta_fast") else 32.0)
    last = pair_of(_number(scaling, "beta_slow") if scaling.get("beta_slow") else 1.0)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float64) - first) / (last - first if last != first else 0.001)
    divided = ramp.clamp(0.0, 1.0)

    def size(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    if scaling.get("attention_factor") is not None:
        scale = _number(scaling, "attention_factor")
    elif scaling.get("mscale") and scaling.get("mscale_all_dim"):
        scale = size(_number(scaling, "mscale")) / size(_number(scaling, "mscale_all_dim"))
    else:
        scale = size(1.0)
    return frequencies * (1.0 - divided + divided / factor), scale


def _longrope(theta: float, dim: int, scaling: Scaling, length: int) -> Scaled:
    trained = _number(scaling, "original_max_position_embeddings")
    name = "long_factor" if length > trained else "short_factor"
    factors = scaling.get(name)
    good = isinstance(factors, (list, tuple)) and len(factors) == dim // 2
    _check(good, "scaling's {} must be a list of dim / 2 = {} numbers, got {}", name, dim // 2, factors)
    if scaling.get("attention_factor") is not None:
        scale = _number(scaling, "attention_factor")
    else:
        factor = _factor(scaling)
        scale = math.sqrt(1.0 + math.log(factor) / math.log(trained)) if factor > 1.0 else 1.0
    return _frequencies(theta, dim) / torch.tensor(factors, dtype=torch.float64), scale


_SCALINGS: dict[str, Callable[[float, int, Scaling, int], Scaled]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
