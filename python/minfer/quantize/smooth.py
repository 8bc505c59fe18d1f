"""SmoothQuant: outliers of activations, which int8 cannot hold beside the rest, are moved into the weights that follow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .loader import FLOATS


def _require(condition: bool, function: str, message: str) -> None:
    if not condition:
        raise ValueError(f"{function}: {message}")


def _check_weights(function: str, weights: Sequence[Tensor], k: int) -> None:
    _require(len(weights) > 0, function, "weights must have at least one [n, k]")
    for x in weights:
        good = isinstance(x, Tensor) and x.dim() == 2 and x.shape[1] == k and x.dtype in FLOATS
        got = f"{list(x.shape)}, {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        _require(good, function, f"weights must be [n, {k}], floating-point, got {got}")


def smoothquant_scales(activation_max: Tensor, weights: Sequence[Tensor], strength: float = 0.5) -> Tensor:
    """The factors s of SmoothQuant: activations will be divided by them, column by column, and weights multiplied.

    Args:
      activation_max: [k], the largest magnitude of each column of the activations, over calibration data.
      weights: [n, k] each, of all layers that read these activations.
      strength: SmoothQuant's alpha: 0 leaves all of the difficulty to the activations, 1 moves all of it to the weights.

    Returns:
      float32 [k]: activation_max^strength / weight_max^(1 - strength), where both are positive; 1 elsewhere.

    Raises:
      ValueError: an argument cannot be right.

    Source: Xiao et al., SmoothQuant, 2023, equation 4.
    """
    function = "smoothquant_scales"
    good = activation_max.dim() == 1 and activation_max.dtype in FLOATS
    _require(good, function, f"activation_max must be [k], floating-point, got {list(activation_max.shape)}, {activation_max.dtype}")
    _check_weights(function, weights, activation_max.shape[0])
    _require(0.0 <= strength <= 1.0, function, f"strength must be 0 to 1, got {strength}")
    largest = activation_max.detach().float()
    _require(bool((largest.isfinite() & (largest >= 0)).all()), function, "activation_max must be finite and not negative")
    of_weights = torch.stack([x.detach().float().abs().amax(0) for x in weights]).amax(0)
    _require(bool(of_weights.isfinite().all()), function, "weights must be finite, got a NaN or infinity")
    scales = largest.pow(strength) / of_weights.pow(1.0 - strength)
    usable = (largest > 0) & (of_weights > 0) & scales.isfinite() & (scales > 0)
    return torch.where(usable, scales, 1.0)


def migrate_scales(
    scales: Tensor, previous: Sequence[Tensor], weights: Sequence[Tensor], *, weight_offset: float = 0.0
) -> tuple[list[Tensor], list[Tensor]]:
    """What writes the activations divided by ``scales``, what reads them multiplied: the layers' product stays what it was.

    Args:
      scales: float32 [k], from :func:`smoothquant_scales`.
      previous: what the activations are linear in, so that it can be divided: a norm's weight [k], and its bias; or a linear layer's weight
        [k, any] and bias [k].
      weights: [n, k] each.
      weight_offset: 1.0 for a norm whose weight is stored less 1 (Gemma); for norms without a bias.

    Returns:
      (previous, weights), new tensors of the same types.

    Raises:
      ValueError: an argument cannot be right.
    """
    function = "migrate_scales"
    good = scales.dim() == 1 and bool((scales.isfinite() & (scales > 0)).all())
    _require(good, function, f"scales must be [k], finite and positive, got {list(scales.shape)}")
    k = scales.shape[0]
    _check_weights(function, weights, k)
    _require(len(previous) > 0, function, "previous must have at least one tensor")
    divided = []
    for x in previous:
        good = isinstance(x, Tensor) and x.dim() in (1, 2) and x.shape[0] == k and x.dtype in FLOATS
        _require(good, function, f"previous must be [{k}] or [{k}, any], floating-point, got {getattr(x, 'shape', type(x).__name__)}")
        factor = scales.to(torch.float64).reshape(-1, *[1] * (x.dim() - 1))
        divided.append(((x.detach().double() + weight_offset) / factor - weight_offset).to(x.dtype))
    return divided, [(x.detach().double() * scales.double()).to(x.dtype) for x in weights]
