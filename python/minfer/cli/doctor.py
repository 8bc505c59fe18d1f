"""What `minfer doctor` finds: which parts of minfer are active in the engines of this Python environment."""

from __future__ import annotations

import importlib.metadata

import torch

from .._core.registry import build_info
from ..integrations import vllm as vllm_plugin

Finding = tuple[str, list[tuple[str, str]]]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _build() -> Finding:
    build = build_info()
    rows = [("kernels", f"{build['kernels_compiled']} of {build['kernels_total']}, for {build['archs'] or 'no GPU'}")]
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        major, minor = torch.cuda.get_device_capability(i)
        rows.append((f"device {i}", f"{torch.cuda.get_device_name(i)}, compute capability {major}.{minor}"))
    if len(rows) == 1:
        rows.append(("device", "no GPU"))
    return f"minfer {build['version']}, torch {torch.__version__}", rows


def _vllm() -> Finding:
    version = vllm_plugin.installed_version()
    rows = [(name, f"{'active' if part.active else 'not active'}: {part.note}") for name, part in vllm_plugin.register().items()]
    return f"vLLM {version or ''}".strip(), rows


def _packages() -> Finding:
    uses = {
        "transformers": "whole models: minfer.integrations.transformers, `minfer generate`",
        "kernels": "layers of the hub: minfer.hub",
        "vl-convert-python": "pictures: `minfer report`",
    }
    return "other packages", [(name, f"{_version(name) or 'not installed'}; {use}") for name, use in uses.items()]


def findings() -> list[Finding]:
    """Titles, and rows of names and what was found."""
    return [_build(), _vllm(), _packages()]
