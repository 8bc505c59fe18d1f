"""Functions of scores and masks as they are published for FlexAttention, calls that the tests make, and how results are judged."""

from __future__ import annotations

import importlib
import math
import random
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from minfer import fuse
from minfer.fuse import attention_function
from torch import Tensor

BF16, F16 = torch.bfloat16, torch.float16
WINDOW, TILE, PREFIX, CAP = 100, 48, 77, 15.0


class Functions:
    """With the tensors that they look up in, on one device."""

    def __init__(self, batch: int, heads: int, length: int, device: str):
        generator = torch.Generator().manual_seed(heads * length + batch)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        slopes = torch.exp2(-8.0 * (torch.arange(heads, device=device) + 1) / heads)
        table = drawn(heads, 2 * length + 1)
        document = torch.randint(0, 3, (batch, length), generator=generator).sort(-1).values.to(device)
        prefix = torch.randint(0, length, (batch,), generator=generator).to(torch.int32).to(device)
        number = torch.tensor(0.5, device=device)

        def alibi(score, b, h, q_idx, kv_idx):
            return score + slopes[h] * (kv_idx - q_idx)

        def relative(score, b, h, q_idx, kv_idx):
            return score + table[h, q_idx - kv_idx + length]

        def soft_cap(score, b, h, q_idx, kv_idx):
            return CAP * torch.tanh(score / CAP)

        def checkered(score, b, h, q_idx, kv_idx):
            return torch.where((q_idx // 3 + kv_idx) % 2 == 0, score, -score.abs() * number + h * 0.01)

        def masked_score(score, b, h, q_idx, kv_idx):
            return torch.where(q_idx >= kv_idx, score, -float("inf"))

        def causal(b, h, q_idx, kv_idx):
            return q_idx >= kv_idx

        def window(b, h, q_idx, kv_idx):
            return (q_idx >= kv_idx) & (q_idx - kv_idx <= WINDOW)

        def prefix_lm(b, h, q_idx, kv_idx):
            return (kv_idx < prefix[b]) | (q_idx >= kv_idx)

        def documents(b, h, q_idx, kv_idx):
            return (document[b, q_idx] == document[b, kv_idx]) & (q_idx >= kv_idx)

        def sliding_tiles(b, h, q_idx, kv_idx):
            return torch.abs(q_idx // TILE - kv_idx // TILE) <= 1

        def odd_heads(b, h, q_idx, kv_idx):
            return torch.where(h % 2 == 1, kv_idx % 4 != 3, q_idx >= kv_idx + 5)  # the first rows of even heads see nothing

        self.scores = {f.__name__: f for f in (alibi, relative, soft_cap, checkered, masked_score)}
        self.masks = {f.__name__: f for f in (causal, window, prefix_lm, documents, sliding_tiles, odd_heads)}

    def pairs(self) -> list[tuple[Any, Any]]:
        s, m = self.scores, self.masks
        return [
            (None, None), (s["alibi"], m["causal"]), (s["relative"], None), (s["soft_cap"], m["window"]), (None, m["prefix_lm"]),
            (None, m["documents"]), (s["alibi"], m["sliding_tiles"]), (s["checkered"], m["odd_heads"]), (s["masked_score"], None),
        ]  # fmt: skip


_STEPS = [
    lambda x, y, number, q: x + number * y,
    lambda x, y, number, q: torch.tanh(x) * number,
    lambda x, y, number, q: torch.where(x > y, x, number),
    lambda x, y, number, q: torch.maximum(x, y),
    lambda x, y, number, q: x.abs() - y,
    lambda x, y, number, q: torch.exp(-x.abs()) + y,
    lambda x, y, number, q: x.clamp(-2, 2),
    lambda x, y, number, q: torch.where(q % 5 == 2, x, y),
    lambda x, y, number, q: torch.sigmoid(x) * y,
]
_TERMS = [
    lambda number, h, q, kv: q >= kv,
    lambda number, h, q, kv: (q - kv).abs() < number,
    lambda number, h, q, kv: kv % number != q % 3,
    lambda number, h, q, kv: q // number == kv // number,
    lambda number, h, q, kv: kv < number,
    lambda number, h, q, kv: (h + kv) % 3 != 0,
]


def drawn(seed: int, heads: int, length: int, device: str) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """A random function of scores, and a random mask or none, of the operations that such functions have."""
    draw = random.Random(seed)
    steps = [(draw.randrange(9), draw.randrange(1 << 20), draw.randrange(1 << 20), draw.uniform(-1, 1)) for _ in range(draw.randint(1, 5))]
    terms = [(draw.randrange(6), draw.randrange(1, 97), draw.random() < 0.5) for _ in range(draw.randint(0, 3))]
    per_head = torch.linspace(-1, 1, heads, device=device)
    per_position = torch.sin(torch.arange(length, device=device).float())

    def score_mod(score, b, h, q_idx, kv_idx):
        values = [score, (q_idx - kv_idx) * (1 / length), per_head[h] * score, per_position[kv_idx] + per_position[q_idx]]
        for kind, first, second, number in steps:
            x, y = values[first % len(values)], values[second % len(values)]
            values.append(_STEPS[kind](x, y, number, q_idx))
        return values[-1].clamp(-8, 8)

    def mask_mod(b, h, q_idx, kv_idx):
        seen = kv_idx >= 0
        for kind, number, both in terms:
            term = _TERMS[kind](number, h, q_idx, kv_idx)
            seen = seen & term if both else seen | ~term
        return seen

    return score_mod, mask_mod if terms else None


def operands(batch: int, heads: int, heads_kv: int, sq: int, sk: int, dim: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    shapes = ((batch, heads, sq, dim), (batch, heads_kv, sk, dim), (batch, heads_kv, sk, dim))
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def exact(q: Tensor, k: Tensor, v: Tensor, score_mod: Any, mask_mod: Any, block_mask: Any = None, block_table: Any = None,
          seq_lens: Any = None, scale: float | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """In float64."""
    call = attention_function.traced(score_mod, mask_mod)
    blocks = [] if block_mask is None else attention_function.lists_of(block_mask)
    size = [] if block_mask is None else attention_function.block_size_of(block_mask)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return attention_function.evaluated(
        call.traced, q, k, v, call.captured, blocks, list(size), block_table, seq_lens, scale, torch.float64
    )


def check(out: Tensor, lse: Tensor, want: Tensor, want_lse: Tensor, what: str, approximate: bool = False) -> None:
    """Errors of three roundings: of the output, of probabilities, and of what else is narrow. ``approximate``: a function with tanh."""
    assert out.shape == want.shape and lse.shape == want_lse.shape, what
    rounding = 2.0**-9 if out.dtype == BF16 else 2.0**-12
    error = (out.double() - want).norm() / want.norm().clamp(min=1e-30)
    assert error <= (3 + 6 * approximate) * rounding, (what, f"{error.item():.2e} of {rounding:.2e}")
    assert torch.equal(lse == -math.inf, want_lse == -math.inf), (what, "rows without keys")
    assert (out[want_lse == -math.inf] == 0).all(), (what, "rows without keys must be zeros")
    seen = want_lse != -math.inf
    far = (lse.double() - want_lse)[seen].abs().max().item() if seen.any() else 0.0
    assert far <= (2e-2 if approximate else 2e-4), (what, f"lse {far:.2e} away")


def judged(q: Tensor, k: Tensor, v: Tensor, score_mod: Any, mask_mod: Any, block_mask: Any = None, **options: Any) -> None:
    """One call against float64; a second one gives the same bits."""
    group = q.shape[1] != k.shape[2 if "block_table" in options else 1]
    runs = [fuse.attention(q, k, v, score_mod, mask_mod, block_mask, enable_gqa=group, return_lse=True, **options) for _ in range(2)]
    want = exact(q, k, v, score_mod, mask_mod, block_mask, **options)
    names = [getattr(f, "__name__", "none") for f in (score_mod, mask_mod)]
    approximate = q.is_cuda and names[0] in ("soft_cap", "score_mod")
    check(*runs[0], *want, f"{names} {list(q.shape)} {list(k.shape)} {q.dtype}", approximate)
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True)), (names, "two runs differ")


def paged(k: Tensor, v: Tensor, lengths: list[int], page_size: int, seed: int = 0) -> dict[str, Any]:
    """k and v [batch, heads, length, dim] in pages in a random order, with NaN where no key is."""
    batch, heads, length, _ = k.shape
    most = -(-length // page_size)
    order = torch.randperm(batch * most, generator=torch.Generator().manual_seed(seed))
    table = torch.full((batch, most), -1, dtype=torch.int32)
    caches = [torch.full((batch * most + 1, page_size, heads, x.shape[3]), math.nan, dtype=k.dtype, device=k.device) for x in (k, v)]
    for b, used in enumerate(lengths):
        for page in range(-(-used // page_size)):
            place = int(order[b * most + page])
            table[b, page] = place
            begin, end = page * page_size, min(page * page_size + page_size, used)
            for cache, x in zip(caches, (k, v), strict=True):
                cache[place, : end - begin] = x[b, :, begin:end].transpose(0, 1)
    lens = torch.tensor(lengths, dtype=torch.int32)
    return {"k": caches[0], "v": caches[1], "block_table": table.to(k.device), "seq_lens": lens.to(k.device)}


PARTS = ("grid", "functions", "tiles", "key_tiles", "shared", "scores", "softmax", "kernel", "producer", "consumer")


class Template:
    """The modules of sm_90a's kernel by their names, whose own arithmetic has Python's numbers in the place of a kernel's."""

    def __init__(self, monkeypatch: Any, modules: dict[str, Any]):
        self.monkeypatch, self.modules = monkeypatch, modules
        choices = types.SimpleNamespace(select_=lambda condition, x, y: x if condition else y, min=min, max=max)
        choices.const_expr, choices.range_constexpr = bool, range
        self.set("cutlass", choices)
        for name, kind in (("Int32", int), ("Int64", int), ("Float32", float), ("Boolean", bool)):
            self.set(name, kind)
        self.set("cast", lambda x, source, target: {"f32": float, "bool": bool}.get(target, int)(x))
        self.set("constant", lambda value, dtype: value)

    def __getattr__(self, name: str) -> Any:
        return self.modules[name]

    def set(self, name: str, value: Any) -> None:
        """In all modules that have it."""
        for module in self.modules.values():
            if hasattr(module, name):
                self.monkeypatch.setattr(module, name, value)


def template_with_python_numbers(monkeypatch: Any, anew: bool = False) -> Template:
    """``anew``: modules that nobody else has, since the DSL changes functions that it has compiled."""
    package = "minfer.fuse.kernels"
    names = {part: f"attention_{part}" for part in PARTS}
    if anew:
        parent = importlib.import_module(package)
        for name in [x for x in sys.modules if x.startswith(f"{package}.attention")]:
            short = name.rpartition(".")[2]
            monkeypatch.setattr(parent, short, getattr(parent, short))
            monkeypatch.delitem(sys.modules, name)
        for name in names.values():  # those that are not loaded yet are forgotten as well
            monkeypatch.setitem(sys.modules, f"{package}.{name}", None)
            del sys.modules[f"{package}.{name}"]
    return Template(monkeypatch, {part: importlib.import_module(f"{package}.{name}") for part, name in names.items()})
