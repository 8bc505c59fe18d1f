"""What attention's suites share: element types, the truth and the yardstick that values are held against, kernels by name, results."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable
from typing import Any

import minfer
import torch

from bench.suites.moe import CellResults, relative_error

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
PEER_ERROR = 0.02  # of a peer against ours: that it computes the same
# Modules without which peers cannot be measured.
MODULES = (({"fa3", "fa4", "flashinfer"}, "peer_ops"), ({"flashinfer"}, "flashinfer"), ({"fa4"}, "flash_attn.cute.interface"))


def key_range(query: torch.Tensor, seqlen_q: int, seqlen_k: int, causal: bool, window_left: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First key, and the one behind the last, that queries see."""
    aligned = query + seqlen_k - seqlen_q
    end = (aligned + 1).clamp(0, seqlen_k) if causal else torch.full_like(query, seqlen_k)
    begin = (aligned - window_left).clamp(0) if window_left >= 0 else torch.zeros_like(query)
    return begin, end


def truth_of(q, k, v, rows, options: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    """Attention of the queries ``rows`` [n] of a sequence, q [seqlen, heads, d]: [n, heads, d]. In ``dtype``, softmax in float32."""
    group, scale = q.shape[1] // k.shape[1], q.shape[2] ** -0.5
    begin, end = key_range(rows, q.shape[0], k.shape[0], options.get("causal", False), options.get("window_left", -1))
    keys = torch.arange(k.shape[0], device=q.device)
    hidden = (keys < begin[:, None]) | (keys >= end[:, None])
    out = []
    for head in range(q.shape[1]):
        scores = (q[rows, head].to(dtype) @ k[:, head // group].to(dtype).T).to(torch.promote_types(dtype, torch.float32)) * scale
        if cap := options.get("softcap", 0.0):
            scores = cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(hidden, float("-inf"))
        if (sinks := options.get("sinks")) is not None:
            scores = torch.cat([scores, sinks[head].to(scores).expand(len(rows), 1)], -1)
        weights = torch.softmax(scores, -1)[:, : k.shape[0]].to(dtype)
        out.append(weights @ v[:, head // group].to(dtype))
    return torch.stack(out, 1)


def limit_of(yardstick: float, dtype: torch.dtype) -> float:
    """The error that ours may have: twice that of the same computation by torch in 16 bits, plus one rounding."""
    return 2 * yardstick + torch.finfo(dtype).eps / 2


def checked_error(out, q, k, v, rows, options: dict[str, Any], what: str = "") -> float:
    """Of ``out`` against float64, see :func:`truth_of`.

    Raises:
      ArithmeticError: it is above its limit.
    """
    truth, yardstick = (truth_of(q, k, v, rows, options, dtype) for dtype in (torch.float64, q.dtype))
    error, limit = relative_error(out, truth), limit_of(relative_error(yardstick, truth), q.dtype)
    if not error <= limit:
        raise ArithmeticError(f"{what}relative error {error:.3g}, at most {limit:.3g}")
    return error


def seen_by(lengths: list[int], causal: bool, window_left: int) -> float:
    """Pairs of a query and a key that it sees."""
    pairs = 0.0
    for n in lengths:
        begin, end = key_range(torch.arange(n), n, n, causal, window_left)
        pairs += float((end - begin).sum())
    return pairs


def planned_kernel(sizes: list[int], dtype: str, options: dict[str, Any], varlen: bool) -> str:
    """``sizes``: batch, queries, keys, heads_q, heads_kv, head_dim, head_dim_v."""
    windows = options.get("window_left", -1), 0 if options.get("causal", False) else -1
    return json.loads(torch.ops.minfer._plan_attention(sizes, dtype, *windows, varlen, None, True, 0))["kernel"]


def decode_kernel(dtype: str, head_dim: int, kv_format: str) -> str:
    """The split-KV kernel of a format, of those for the newest architecture that the build has."""
    b_format = "dense" if kv_format == "16bit" else kv_format
    own = dict(ab_type=dtype, b_format=b_format, tile_k=head_dim, schedule="split_kv")
    found = [kernel for kernel in minfer.kernels("attention") if own.items() <= kernel.items()]
    return max(found, key=lambda kernel: (kernel["compiled"], kernel["arch"]))["name"]


def codes_kernel(dtype: str, head_dim: int, kv_format: str) -> str:
    """The prefill kernel over codes of a format, the smallest that has the head dimension."""
    own = dict(ab_type=dtype, b_format="int8" if (dtype, kv_format) == ("bf16", "int8") else "codes", operation="attention")
    found = [
        kernel
        for kernel in minfer.kernels("attention")
        if own.items() <= kernel.items() and kernel["tile_k"] >= head_dim and kernel["schedule"] != "split_kv"
    ]
    return min(found, key=lambda kernel: kernel["tile_k"])["name"]


class AttentionResults(CellResults):
    """Rows are kept cell by cell: the dtype and the heads tell cells apart, too; models name batch, format and layout where they differ."""

    @staticmethod
    def key(row: dict[str, Any]) -> tuple:
        shape = row["shape"]
        return row["suite"], row["peer"], row["dtype"], *(shape[n] for n in ("model", "m", "head_dim", "heads_q", "heads_kv"))


def with_modules(peers: list[str], wanted: Iterable[str]) -> list[str]:
    """Those whose modules are here, of the wanted ones; says which are not."""
    peers = [peer for peer in peers if peer in wanted]
    for needed, module in MODULES:
        if not (own := needed & set(peers)):
            continue
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001  a peer's own imports may raise anything
            print(f"{', '.join(sorted(own))}: left out, {type(error).__name__}: {error}")
            peers = [peer for peer in peers if peer not in own]
    return peers
