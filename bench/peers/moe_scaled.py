"""Operands of grouped products and layers of 8-bit operands, and every contestant as functions ``fn(set)`` over them: ours and the peers.

A peer is a list of variants; the fastest one whose values are right is the peer's time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from minfer.measure.benchmarking import relative_error
from minfer.reference import grouped_scaled_gemm as reference
from minfer.reference.codes import LARGEST_CODE

from bench import harness
from bench.peers.gemm import Unavailable, Variant
from bench.peers.scaled_gemm import _peer
from bench.suites.moe import MODELS
from bench.suites.moe_scaled_cells import FP8, Grouped, Layer

BLOCK = 128
CHECKED_ROWS = 64  # of an expert, whose values are compared
CHECKED_TOKENS = 32
ROUNDED = 2.0**-9  # what a result in bf16, of one rounding, is off at most
SIXTEEN_BITS = 1e-2  # what our operators of 16-bit weights may differ: they get the values of the codes, rounded to bf16
ERRORS_OF_SUMS = 2.0e-3  # relative, that a peer's sums may add
ERRORS_OF_CODES = 1.25  # a layer that quantises its activations has at most as many times the error of our reference that does


def device_of_runs() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


# ---- codes and scales --------------------------------------------------------------------------------------------------------------


def drawn_codes(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Codes as quantised normal numbers have them (int8: uniform), drawn part by part."""
    device = device_of_runs()
    if dtype == torch.int8:
        return torch.randint(-127, 128, shape, device=device, dtype=torch.int8)
    x = torch.empty(shape, device=device, dtype=FP8)
    for part in x.view(-1).split(1 << 27):
        part.copy_(torch.randn(part.shape, device=device) * 64)
    return x


def drawn_scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape, device=device_of_runs()) * 0.01 + 0.005


def column_by_column(scale: torch.Tensor) -> torch.Tensor:
    """Scales [.., rows, blocks] of rows that lie column by column, each at a multiple of 16 bytes: what operators with ``quant`` write, and
    what DeepGEMM reads without a kernel in front that moves them."""
    rows = scale.shape[-2]
    padded = torch.zeros(*scale.shape[:-2], scale.shape[-1], -(-rows // 4) * 4, device=scale.device)
    padded[..., :rows] = scale.mT
    return padded.mT[..., :rows, :]


def of_blocks(w: torch.Tensor) -> torch.Tensor:
    """A view of [experts, n, k] as [experts, blocks, 128, blocks, 128]."""
    experts, n, k = w.shape
    return w.view(experts, n // BLOCK, BLOCK, k // BLOCK, BLOCK)


def quantised_weight(w: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of w [experts, n, k], their scales (e4m3: of blocks of 128 x 128, int8: of rows), and the values of the codes in bf16."""
    if dtype == FP8:
        blocks = of_blocks(w)
        scale = blocks.abs().amax((2, 4), keepdim=True) / LARGEST_CODE[dtype]
        codes = (blocks / scale).to(FP8)
        return codes.view(w.shape), scale[:, :, 0, :, 0].contiguous(), (codes.to(w.dtype) * scale).to(torch.bfloat16).view(w.shape)
    scale = w.abs().amax(2, keepdim=True) / LARGEST_CODE[dtype]
    codes = (w / scale).round().to(torch.int8)
    return codes, scale.squeeze(2), (codes.to(w.dtype) * scale).to(torch.bfloat16)


def in_bf16(codes: torch.Tensor, scale: torch.Tensor, part: int = 1 << 27) -> torch.Tensor:
    """The values of activations or weights whose scales are of rows, of 1 x 128 or of 128 x 128, an expert or some rows at a time."""
    values = torch.empty(codes.shape, device=codes.device, dtype=torch.bfloat16)
    k = codes.shape[-1]
    if scale.dim() == 3 and codes.shape[-2] != scale.shape[-2]:  # of blocks of weights
        for own, code, of_expert in zip(values, codes, scale, strict=True):
            rows = of_expert.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            own.copy_(code.float() * rows)
        return values
    flat = scale.reshape(-1, 1) if scale.shape == codes.shape[:-1] else scale.reshape(-1, scale.shape[-1]).repeat_interleave(BLOCK, 1)
    step = max(1, part // k)
    for own, code, of_rows in zip(values.view(-1, k).split(step), codes.reshape(-1, k).split(step), flat.split(step), strict=True):
        own.copy_(code.float() * of_rows)
    return values


def copies(first: torch.Tensor, sets: int) -> list[torch.Tensor]:
    return [first, *(first.clone() for _ in range(sets - 1))]


# ---- grouped products --------------------------------------------------------------------------------------------------------------


@dataclass
class GroupedOperands:
    """``sets`` sets of a cell's tensors. Scales are of all sets, and of A's rows or their blocks and of W's rows or its blocks."""

    cell: Grouped
    a: list[torch.Tensor]  # [experts * m, k] or [experts, max_rows, k]
    w: list[torch.Tensor]  # [experts, n, k]
    a_scale: torch.Tensor
    w_scale: torch.Tensor
    d: list[torch.Tensor]  # as a, with n columns, bfloat16

    @classmethod
    def draw(cls, cell: Grouped) -> GroupedOperands:
        e, m, n, k = cell.experts, cell.m, cell.n, cell.k
        sets = harness.sets_for(e * (m * k + n * k + 2 * m * n))
        rows = (e, cell.max_rows) if cell.masked else (e * m,)
        if cell.dtype == FP8:
            a_scale, w_scale = column_by_column(drawn_scales(*rows, k // BLOCK)), drawn_scales(e, n // BLOCK, k // BLOCK)
        else:
            a_scale, w_scale = drawn_scales(*rows), drawn_scales(e, n)
        d = torch.empty(*rows, n, device=a_scale.device, dtype=torch.bfloat16)
        a, w = drawn_codes(cell.dtype, *rows, k), drawn_codes(cell.dtype, e, n, k)
        return cls(cell, copies(a, sets), copies(w, sets), a_scale, w_scale, copies(d, sets))

    @property
    def sets(self) -> int:
        return len(self.a)

    @property
    def counts(self) -> torch.Tensor:
        return torch.full((self.cell.experts,), self.cell.m, device=self.d[0].device, dtype=torch.int32)

    @property
    def offsets(self) -> torch.Tensor:
        return self.counts.cumsum(0).to(torch.int32)

    def checked(self) -> torch.Tensor:
        """The rows whose values are compared, of all rows numbered through: as many of every expert."""
        cell, device = self.cell, self.d[0].device
        of_expert = torch.linspace(0, cell.m - 1, min(cell.m, CHECKED_ROWS), device=device).round().long()
        first = torch.arange(cell.experts, device=device) * (cell.max_rows or cell.m)
        return (first[:, None] + of_expert).flatten()

    def truth(self) -> torch.Tensor:
        """The checked rows of the result on set 0, in float64."""
        cell, rows = self.cell, self.checked()
        a = self.a[0].view(-1, cell.k)[rows].double()
        a_scale = self.a_scale.reshape(-1, *self.a_scale.shape[2 if cell.masked else 1 :])[rows]
        ends = torch.arange(1, cell.experts + 1, dtype=torch.int32) * min(cell.m, CHECKED_ROWS)
        scales = a_scale.double(), self.w_scale.double()
        return reference.grouped_gemm_fp8(a, self.w[0].mT, *scales, ends, out_dtype=torch.float64)

    def poison(self) -> None:
        self.d[0].fill_(float("nan"))

    def result(self, variant: Variant, out: Any) -> torch.Tensor:
        """The checked rows of what a variant returned, or wrote."""
        rows = (self.d[0] if variant.into_d else out).view(-1, self.cell.n)[self.checked()]
        if rows.dtype != torch.int32:
            return rows.double()
        of_columns = self.w_scale.repeat_interleave(len(rows) // self.cell.experts, 0).double()
        return rows.double() * self.a_scale.flatten()[self.checked()].double().view(-1, 1) * of_columns

    def limits(self, truth: torch.Tensor) -> Callable[[str], float]:
        """The most relative error of a contestant, by its name."""
        own = 2 * relative_error(truth.bfloat16(), truth) + 2.0**-12
        return lambda name: SIXTEEN_BITS if name == "ours:16bit" else own if name == "ours" else own + ERRORS_OF_SUMS


def _into(name: str, call: Callable[..., Any]) -> Variant:
    """A variant of an operator of ours, in the form that writes D."""
    form = getattr(torch.ops.minfer, name).out
    return Variant("default", lambda i: call(form, i))


def ours(o: GroupedOperands | LayerOperands, kernel: str | None = None) -> Variant:
    if isinstance(o, LayerOperands):
        return _layer_of(o, getattr(torch.ops.minfer, o.cell.op).default, o.codes, o.scales)
    b, rows = [w.mT for w in o.w], o.counts if o.cell.masked else o.offsets
    return _into(o.cell.op, lambda form, i: form(o.a[i], b[i], o.a_scale, o.w_scale, rows, kernel=kernel, out=o.d[i]))


def ours_16bit(o: GroupedOperands | LayerOperands) -> list[Variant]:
    """Our operator of 16-bit operands on the values of the codes."""
    if isinstance(o, LayerOperands):
        return [_layer_of(o, torch.ops.minfer.moe_ffn.default, o.values, ())]
    a = copies(in_bf16(o.a[0], o.a_scale), o.sets)
    b = [w.mT for w in copies(in_bf16(o.w[0], o.w_scale), o.sets)]
    rows, name = (o.counts, "grouped_gemm_masked") if o.cell.masked else (o.offsets, "grouped_gemm")
    return [_into(name, lambda form, i: form(a[i], b[i], rows, out=o.d[i]))]


def deepgemm(o: GroupedOperands) -> list[Variant]:
    """DeepGEMM's grouped kernels of blocks, with and without programmatic dependent launch. The scales lie as it wants them."""
    cell = o.cell
    if cell.dtype != FP8:
        raise Unavailable("DeepGEMM multiplies e4m3")
    deep_gemm = _peer("deep_gemm")
    if cell.masked:
        counts = o.counts

        def multiply(i: int) -> None:
            operands = (o.a[i], o.a_scale), (o.w[i], o.w_scale), o.d[i]
            deep_gemm.m_grouped_fp8_gemm_nt_masked(*operands, counts, cell.m, disable_ue8m0_cast=True)
    else:
        unit = deep_gemm.get_mk_alignment_for_contiguous_layout()
        if cell.m % unit:
            raise Unavailable(f"its layout wants multiples of {unit} rows, not {cell.m}")
        indices = torch.arange(cell.experts, device=o.d[0].device, dtype=torch.int32).repeat_interleave(cell.m)

        def multiply(i: int) -> None:
            operands = (o.a[i], o.a_scale), (o.w[i], o.w_scale), o.d[i]
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(*operands, indices, disable_ue8m0_cast=True)

    def dependent(i: int) -> None:
        deep_gemm.set_pdl(True)
        try:
            multiply(i)
        finally:
            deep_gemm.set_pdl(False)

    deep_gemm.set_pdl(False)  # vLLM's helpers leave it on
    return [Variant("nt", multiply), Variant("nt_pdl", dependent)]


def int_mm(o: GroupedOperands) -> list[Variant]:
    """torch._int_mm, expert by expert. It gives the int32 sums and leaves the scales to another kernel, whose time is not counted here."""
    cell = o.cell
    if cell.dtype != torch.int8:
        raise Unavailable("_int_mm multiplies int8")
    if cell.m <= 16:
        raise Unavailable(f"_int_mm takes more than 16 rows, not {cell.m}")
    rows = [slice(e * (cell.max_rows or cell.m), e * (cell.max_rows or cell.m) + cell.m) for e in range(cell.experts)]
    sums = [torch.empty(d.view(-1, cell.n).shape, device=d.device, dtype=torch.int32) for d in o.d]
    a = [x.view(-1, cell.k) for x in o.a]

    def multiply(i: int) -> torch.Tensor:
        for own, w in zip(rows, o.w[i], strict=True):
            torch._int_mm(a[i][own], w.t(), out=sums[i][own])
        return sums[i]

    return [Variant("sums", multiply, into_d=False)]


# ---- layers ------------------------------------------------------------------------------------------------------------------------


class LayerWeights:
    """The experts of a model in codes, their scales, and the values of the codes in bf16. ``experts``: how many; None: all."""

    def __init__(self, model: str, dtype: torch.dtype, experts: int | None = None):
        of_model, self.top_k, self.hidden, self.inter = MODELS[model]
        self.experts, self.dtype = experts or of_model, dtype
        self.w13, self.w13_scale, self.w13_values = self._drawn(2 * self.inter, self.hidden)
        self.w2, self.w2_scale, self.w2_values = self._drawn(self.hidden, self.inter)

    def _drawn(self, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        device, shape = device_of_runs(), (self.experts, n, k)
        scales = (self.experts, n // BLOCK, k // BLOCK) if self.dtype == FP8 else (self.experts, n)
        found = (
            torch.empty(shape, device=device, dtype=self.dtype),
            torch.empty(scales, device=device),
            torch.empty(shape, device=device, dtype=torch.bfloat16),
        )
        for parts in zip(*(x.split(8) for x in found), strict=True):
            made = quantised_weight(torch.randn(parts[0].shape, device=device) * k**-0.5, self.dtype)
            for part, own in zip(parts, made, strict=True):
                part.copy_(own)
        return found

    @property
    def expert_bytes(self) -> int:
        return 3 * self.inter * self.hidden


@dataclass
class LayerOperands:
    """``sets`` sets of a layer's tokens and routes over one set of weights: where few experts are read, every set reads others."""

    cell: Layer
    weights: LayerWeights
    x: list[torch.Tensor]  # [tokens, hidden]
    ids: list[torch.Tensor]  # int32 [tokens, top_k]
    routing: list[torch.Tensor]  # float32 [tokens, top_k]
    active: int  # experts that have tokens

    @classmethod
    def draw(cls, cell: Layer, weights: LayerWeights) -> LayerOperands:
        device, tokens, experts = device_of_runs(), cell.tokens, weights.experts
        ids = torch.rand(tokens, experts, device=device).topk(weights.top_k).indices.to(torch.int32)
        active = int(ids.unique().numel())
        sets = harness.sets_for(active * weights.expert_bytes)
        step = max(1, experts // sets)
        return cls(
            cell,
            weights,
            x=[torch.randn(tokens, weights.hidden, device=device).bfloat16() for _ in range(sets)],
            ids=[((ids + i * step) % experts).to(torch.int32) for i in range(sets)],
            routing=[torch.rand(tokens, weights.top_k, device=device) for _ in range(sets)],
            active=active,
        )

    @property
    def sets(self) -> int:
        return len(self.x)

    @property
    def codes(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.weights.w13, self.weights.w2

    @property
    def scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.weights.w13_scale, self.weights.w2_scale

    @property
    def values(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.weights.w13_values, self.weights.w2_values

    def checked(self) -> torch.Tensor:
        tokens = self.cell.tokens
        return torch.linspace(0, tokens - 1, min(tokens, CHECKED_TOKENS), device=self.x[0].device).round().long()

    def _reference(self, x: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        rows, name = self.checked(), self.cell.op
        routes = self.routing[0][rows], self.ids[0][rows]
        return getattr(reference, name)(x[rows], *self.codes, *self.scales, *routes, out_dtype=out_dtype)

    def truth(self) -> torch.Tensor:
        """The checked tokens of the result on set 0 in float64, of the weights' codes and of activations that no one quantises."""
        return self._reference(self.x[0].double(), torch.float64)

    def poison(self) -> None:
        """Every contestant returns a tensor of its own."""

    def result(self, variant: Variant, out: torch.Tensor) -> torch.Tensor:
        return out[self.checked()].double()

    def limits(self, truth: torch.Tensor) -> Callable[[str], float]:
        """The most relative error of a contestant, by its name: what codes of activations cost, our reference says."""
        of_codes = relative_error(self._reference(self.x[0], torch.bfloat16), truth)
        own = ERRORS_OF_CODES * of_codes + ROUNDED
        return lambda name: SIXTEEN_BITS if name == "ours:16bit" else own


def _layer_of(o: LayerOperands, operator: Callable[..., torch.Tensor], matrices: tuple, scales: tuple) -> Variant:
    return Variant("default", lambda i: operator(o.x[i], *matrices, *scales, o.routing[i], o.ids[i]), into_d=False)


def _fused_experts():
    """vLLM's package of layers, and its module of Triton kernels."""
    try:
        from vllm.model_executor.layers import fused_moe as package
        from vllm.model_executor.layers.fused_moe import fused_moe as kernels
    except (ImportError, OSError) as error:
        raise Unavailable(f"not installed ({error})") from error
    return package, kernels


def _table_of_h200(kernels, o: LayerOperands) -> dict[str, int] | None:
    """vLLM's choice of tiles on an H200, where it has a table of these experts and this is another GPU."""
    if o.weights.dtype != FP8 or "H200" in torch.cuda.get_device_name():
        return None
    name = f"E={o.weights.experts},N={o.weights.inter},device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
    path = Path(kernels.__file__).parent / "configs" / name
    if not path.exists():
        return None
    by_tokens = {int(tokens): tiles for tokens, tiles in json.loads(path.read_text()).items() if tokens.isdigit()}
    return by_tokens[min(by_tokens, key=lambda tokens: abs(tokens - o.cell.tokens))]


def vllm_triton(o: LayerOperands) -> list[Variant]:
    """vLLM's fused_experts, Triton kernels with its quantisers, sort and sum: with the tiles that it takes on this GPU, and, where it has
    tuned ones for an H200 alone, with those."""
    package, kernels = _fused_experts()
    if o.weights.dtype == FP8:
        form = {"use_fp8_w8a8": True, "block_shape": [BLOCK, BLOCK], "w1_scale": o.scales[0], "w2_scale": o.scales[1]}
    else:  # a scale of each token and of each row of a weight
        w1_scale, w2_scale = (scale.unsqueeze(-1) for scale in o.scales)
        form = {"use_int8_w8a8": True, "per_channel_quant": True, "w1_scale": w1_scale, "w2_scale": w2_scale}

    def layer(i: int) -> torch.Tensor:
        return kernels.fused_experts_impl(o.x[i], *o.codes, o.routing[i], o.ids[i], **form)

    found, tiles = [Variant("default", layer, into_d=False)], _table_of_h200(kernels, o)
    if tiles is not None:

        def tuned(i: int) -> torch.Tensor:
            try:
                with package.override_config(tiles):
                    return layer(i)
            finally:  # which vLLM's context leaves as it is where something fails
                package._config = None

        found.append(Variant("tiles_of_h200", tuned, into_d=False))
    return found


def vllm_deepgemm(o: LayerOperands) -> list[Variant]:
    """The steps of vLLM's DeepGemmExperts: rows to their experts, DeepGEMM, gate and codes, DeepGEMM, weighted sum."""
    if o.weights.dtype != FP8:
        raise Unavailable("DeepGEMM multiplies e4m3")
    _peer("deep_gemm")
    try:
        from vllm.model_executor.layers.fused_moe.deep_gemm_utils import deepgemm_moe_permute, deepgemm_unpermute_and_reduce
        from vllm.model_executor.layers.quantization.utils.fp8_utils import (
            per_token_group_quant_fp8,
            silu_mul_per_token_group_quant_fp8_colmajor,
        )
        from vllm.utils.deep_gemm import (
            get_mk_alignment_for_contiguous_layout,
            m_grouped_fp8_gemm_nt_contiguous,
            mk_alignment_scope,
        )
    except (ImportError, OSError) as error:
        raise Unavailable(f"not installed ({error})") from error
    least = get_mk_alignment_for_contiguous_layout()[0]
    if o.cell.tokens < least:
        raise Unavailable(f"vLLM takes DeepGEMM from {least} tokens on")
    w = o.weights

    def layer(i: int) -> torch.Tensor:
        codes, scale = per_token_group_quant_fp8(o.x[i], BLOCK, use_ue8m0=False)
        rows, row_scale, experts, inverse, unit = deepgemm_moe_permute(
            aq=codes, aq_scale=scale, topk_ids=o.ids[i], local_num_experts=w.experts, expert_map=None, expert_tokens_meta=None
        )
        device = rows.device
        with mk_alignment_scope(unit):
            h = torch.empty(len(rows), 2 * w.inter, device=device, dtype=torch.bfloat16)
            m_grouped_fp8_gemm_nt_contiguous((rows, row_scale), (w.w13, w.w13_scale), h, experts)
            h_codes, h_scale = silu_mul_per_token_group_quant_fp8_colmajor(input=h, use_ue8m0=False)
            y = torch.empty(len(rows), w.hidden, device=device, dtype=torch.bfloat16)
            m_grouped_fp8_gemm_nt_contiguous((h_codes, h_scale), (w.w2, w.w2_scale), y, experts)
        out = torch.empty_like(o.x[i])
        deepgemm_unpermute_and_reduce(a=y, topk_ids=o.ids[i], topk_weights=o.routing[i], inv_perm=inverse, expert_map=None, output=out)
        return out

    return [Variant("contiguous", layer, into_d=False)]


PEERS: dict[str, Callable[[Any], list[Variant]]] = {
    "ours:16bit": ours_16bit,
    "deepgemm": deepgemm,
    "int_mm": int_mm,
    "vllm_triton": vllm_triton,
    "vllm_deepgemm": vllm_deepgemm,
}
OF_GROUPED, OF_LAYERS = ("ours:16bit", "deepgemm", "int_mm"), ("ours:16bit", "vllm_triton", "vllm_deepgemm")


# ---- floors ------------------------------------------------------------------------------------------------------------------------


def _floor_us(rates: dict[str, float], weight_bytes: float, row_bytes: float, flops: float) -> float:
    """The matrix rate of 8-bit operands is twice that of 16-bit ones."""
    return max((weight_bytes + row_bytes) / rates["read_bandwidth"], flops / (2 * rates["matrix_rate"]))


def grouped_floor_us(cell: Grouped, rates: dict[str, float]) -> float:
    """Codes of all experts and of the rows that there are, and D in bf16; ``rates``: of the device."""
    rows = cell.experts * cell.m
    return _floor_us(rates, cell.experts * cell.n * cell.k, rows * (cell.k + 2 * cell.n), 2.0 * rows * cell.n * cell.k)


def layer_floor_us(o: LayerOperands, rates: dict[str, float]) -> float:
    """Of the two products one by one: tokens in bf16 in and rows of codes out; rows of codes in and tokens in bf16 out."""
    w, tokens = o.weights, o.cell.tokens
    rows = tokens * w.top_k
    flops = 2.0 * rows * w.inter * w.hidden
    first = _floor_us(rates, 2 * o.active * w.inter * w.hidden, 2 * tokens * w.hidden + rows * w.inter, 2 * flops)
    return first + _floor_us(rates, o.active * w.hidden * w.inter, rows * w.inter + 2 * tokens * w.hidden, flops)
