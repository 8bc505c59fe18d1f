"""Calls of a decoder layer in one launch: one token's attention over a paged cache, and the decoder block behind it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import minfer
import torch
from torch import Tensor

from tests.contracts import numerics_cases as numerics
from tests.decoder_block.cases import Case
from tests.decoder_block.dense_cases import DenseCase
from tests.decoder_block.fp8_cases import Fp8Case

HEAD_DIM = 128
QK_EPS = 1e-6


@dataclass(frozen=True)
class LayerCase:
    """``length`` counts the token. ``normed``: q and k have norms. ``block``: of the block behind; its m is 1 and its k follows."""

    length: int
    heads: int = 32
    heads_kv: int = 8
    page_size: int = 16
    spare: int = 3  # pages of the table behind the sequence
    window: int = -1
    normed: bool = False
    block: Case = field(default_factory=lambda: Case(1))

    def change(self, **fields: Any) -> LayerCase:
        return replace(self, **fields)

    def make(self) -> Layer:
        return Layer(self)


class Layer:
    """A call's tensors, on the GPU. Rows of the cache that the token must not see, and its own, hold NaN."""

    def __init__(self, case: LayerCase):
        self.case, self.block = case, case.block.change(k=case.heads * HEAD_DIM).make("cuda")
        dtype = case.block.dtype
        columns = -(-case.length // case.page_size) + case.spare
        pages = columns + 2

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, device="cuda").to(dtype)

        self.qkv = randn(1, case.heads + 2 * case.heads_kv, HEAD_DIM)
        self.table = torch.randperm(pages, device="cuda", dtype=torch.int32)[None, :columns].contiguous()
        shape = (pages, case.page_size, case.heads_kv, HEAD_DIM)
        self.k_cache, self.v_cache = (torch.full(shape, float("nan"), dtype=dtype, device="cuda") for _ in range(2))
        self.first = 0 if case.window < 0 else max(0, case.length - 1 - case.window)
        for cache in (self.k_cache, self.v_cache):
            self._rows(cache, torch.arange(self.first, case.length - 1, device="cuda"), randn)
        self.before = self.k_cache.clone(), self.v_cache.clone()
        self.seq_lens = torch.tensor([case.length], dtype=torch.int32, device="cuda")
        last = case.length - 1
        slot = int(self.table[0, last // case.page_size]) * case.page_size + last % case.page_size
        self.slots = torch.tensor([slot], device="cuda")
        self.positions = torch.tensor([last], device="cuda")
        angles = torch.arange(case.length + 4, device="cuda")[:, None] * torch.logspace(0, -3, HEAD_DIM // 2, device="cuda")
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], -1).float()
        self.weights = [(1 + 0.3 * torch.randn(HEAD_DIM, device="cuda")).to(dtype) if case.normed else None for _ in range(2)]
        self.scale = HEAD_DIM**-0.5 * 1.5

    def _places(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        return self.table[0, keys // self.case.page_size].long(), keys % self.case.page_size

    def _rows(self, cache: Tensor, keys: Tensor, make: Any) -> None:
        cache[self._places(keys)] = make(len(keys), self.case.heads_kv, HEAD_DIM)

    def launch(self, constant: bool = False, residual: Tensor | None = None, **changes: Any) -> Tensor:
        """In one launch; the residual and the caches as they were, or a residual as it is."""
        t = self.block
        if residual is None:
            residual = t.residual.copy_(t.before)
            self.k_cache.copy_(self.before[0])
            self.v_cache.copy_(self.before[1])
        return launch([self], residual, constant, **changes)

    def prepared(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as minfer.qk_norm_rope_append makes them; in caches of their own."""
        k_cache, v_cache = self.before[0].clone(), self.before[1].clone()
        weights, rows = self.weights, (self.cos_sin, self.positions, k_cache, v_cache, self.slots)
        q = minfer.qk_norm_rope_append(self.qkv, weights[0], weights[1], *rows, eps=QK_EPS)
        return q, k_cache, v_cache

    def attended(self) -> Tensor:
        """Attention's output [1, heads * head_dim] in float64, of q and k as they are rounded."""
        case = self.case
        q, k_cache, v_cache = self.prepared()
        places = self._places(torch.arange(self.first, case.length, device="cuda"))
        k, v = (x[places].double().repeat_interleave(case.heads // case.heads_kv, 1) for x in (k_cache, v_cache))
        scores = torch.einsum("hd,nhd->hn", q[0].double(), k) * self.scale
        return torch.einsum("hn,nhd->hd", scores.softmax(-1), v).reshape(1, -1)

    def check(self, have: Tensor, residual: Tensor) -> None:
        """D and the residual within the block's bounds of the exact attention, the caches equal to those of the operators."""
        t = self.block
        t.a = self.attended()
        t.a_deviation = 0.58 * numerics.UNIT[t.case.dtype] * t.a.abs() + 1e-5 * t.a.abs().amax()
        t.check(have, "one_launch", residual=residual)
        _, k_cache, v_cache = self.prepared()
        bits = [x.view(torch.int16) for x in (self.k_cache, k_cache, self.v_cache, v_cache)]
        assert torch.equal(bits[2], bits[3]), "v_cache"
        differ = (bits[0] != bits[1]).nonzero()
        page, row = divmod(int(self.slots), self.case.page_size)
        assert all(place[:2] == [page, row] for place in differ.tolist()), "rows of k_cache that are not the token's"
        mine, theirs = (x[page, row].double() for x in (self.k_cache, k_cache))
        assert ((mine - theirs).abs() <= 2 * numerics.UNIT[t.case.dtype] * theirs.abs() + 1e-6).all(), "the token's key"


OPTIONS = ("eps", "weight_offset", "group_size", "activation")


def launch(layers: list[Layer], residual: Tensor, constant: bool = False, **changes: Any) -> Tensor:
    """Layers one behind the other, over the first one's sequence, in one launch."""
    first = layers[0]
    found: dict[str, Any] = {}
    for layer in layers:
        for name, x in layer.block.arguments().items():
            if name in OPTIONS:
                found[name] = x
            elif name != "a":
                found.setdefault(name, [])
                if x is not None:
                    found[name].append(x)
    found |= dict(k_caches=[x.k_cache for x in layers], v_caches=[x.v_cache for x in layers])
    found |= dict(qkv=first.qkv, residual=residual, constant=constant, block_table=first.table, seq_lens=first.seq_lens)
    found |= dict(slot_mapping=first.slots, positions=first.positions, cos_sin=first.cos_sin)
    for i, name in enumerate(("q_weight", "k_weight")):
        found[name] = [x.weights[i] for x in layers if x.weights[i] is not None]
    found |= dict(scale=first.scale, windows=[x.case.window for x in layers], qk_eps=QK_EPS, qk_weight_offset=0.0)
    ops = torch.ops.minfer
    operators = {Case: ops._w4a16_decoder_layers, Fp8Case: ops._fp8_decoder_layers, DenseCase: ops._decoder_layers}
    return operators[type(first.case.block)](**(found | changes))


def layer_case(length: int, form: str, size: tuple[int, int, int], dtype: torch.dtype, **options: Any) -> LayerCase:
    """size: hidden, inter, and columns of D."""
    more = options.pop("block", {})
    kind = {"int4": Case, "dense": DenseCase}.get(form, Fp8Case)
    block = kind(1, HEAD_DIM, *size, dtype, **({"mode": form} if kind is Fp8Case else {}), **more)
    return LayerCase(length, block=block, **options)
