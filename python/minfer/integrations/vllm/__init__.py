"""minfer's operators in vLLM: a plug-in of the group ``vllm.general_plugins``.

vLLM finds it by itself where both are installed (``pip install minfer[vllm]``) and asks it in every process. What it adds:

linear       W4A16, W8A16, FP8 and INT8 linear layers, in front of vLLM's own kernels. vLLM takes them where they say they apply.
experts      16-bit and FP8 experts, in front of vLLM's Triton kernels; W4A16 experts, in front of all.
attention    the backend ``MINFER``, for ``--attention-backend MINFER``: 16-bit, ``fp8`` and ``int8_per_token_head`` caches.
layers       RMSNorm, GemmaRMSNorm, SiluAndMul and RotaryEmbedding as vLLM's custom ops, which vLLM uses where it is told to:
             ``--compilation-config '{"custom_ops": ["all"]}'``.

With ``VLLM_BATCH_INVARIANT=1`` they compute in the batch-invariant mode.

``MINFER_VLLM`` says which of these: names separated by commas, or ``none``; default: all. ``python -m minfer doctor`` says what is active
in the installed vLLM, and why the rest is not. What does not apply to a layer stays vLLM's.

One module for each version of vLLM that is known, :mod:`.v0_32` and :mod:`.v0_33`, says how it is hooked into; with another version
nothing is registered.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
from types import ModuleType
from typing import NamedTuple

_log = logging.getLogger("vllm.minfer")  # below vLLM's logger: its handlers and level

PARTS = ("linear", "experts", "attention", "layers")
ADAPTERS = {(0, 32): "v0_32", (0, 33): "v0_33"}

_found: dict[str, Part] | None = None


class Part(NamedTuple):
    """Of the plug-in: whether it is registered, and what there is to know about it."""

    active: bool
    note: str


def wanted_parts() -> tuple[str, ...]:
    """What ``MINFER_VLLM`` asks for.

    Raises:
      ValueError: it names something else than parts.
    """
    text = os.environ.get("MINFER_VLLM", ",".join(PARTS))
    names = tuple(name for name in text.replace(" ", "").split(",") if name and name != "none")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise ValueError(f"MINFER_VLLM must be of {', '.join(PARTS)}, or none, got {text!r}")
    return names


def installed_version() -> str | None:
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return None


def adapter_of(version: str) -> ModuleType | None:
    """The module that knows how a version of vLLM is hooked into. It imports nothing of vLLM before one of its functions is called."""
    numbers = version.split(".")
    known = len(numbers) >= 2 and numbers[0].isdigit() and numbers[1].isdigit()
    name = ADAPTERS.get((int(numbers[0]), int(numbers[1]))) if known else None
    return None if name is None else importlib.import_module(f".{name}", __name__)


def register() -> dict[str, Part]:
    """The entry point: registers what is wanted, once in a process, and returns what came of it. It raises for a wrong ``MINFER_VLLM``
    alone: a part that cannot be registered leaves a line in vLLM's log."""
    global _found
    if _found is not None:
        return _found
    wanted, version = wanted_parts(), installed_version()
    adapter = None if version is None else adapter_of(version)
    if adapter is None:
        known = ", ".join(f"{major}.{minor}" for major, minor in ADAPTERS)
        why = "vLLM is not installed" if version is None else f"vLLM is {version}, and there is an adapter for {known}"
        _found = {part: Part(False, why) for part in PARTS}
        if version is not None and wanted:
            _log.warning("minfer is not used: %s", why)
        return _found
    found = {}
    for part in PARTS:
        if part not in wanted:
            found[part] = Part(False, "MINFER_VLLM leaves it out")
            continue
        try:
            found[part] = Part(True, getattr(adapter, f"register_{part}")())
        except Exception as error:  # vLLM's own then
            found[part] = Part(False, f"{type(error).__name__}: {error}")
            _log.warning("minfer's %s is not used: %s", part, found[part].note)
    if any(part.active for part in found.values()):
        adapter.follow_mode()
    _found = found
    return found
