"""Attention with a function of scores and a mask: what ``minfer.fuse.attention`` makes of two Python functions."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import math
import struct
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._core.namespace import ops
from .._core.torch_private import constant_in_compiled_graphs
from . import dtypes, operators
from .attention_config import (
    BLOCK,
    CAP_NUMBERS,
    HEAD_DIMS,
    MOST_BOXES,
    MOST_POSITIONS,
    AttentionConfig,
    cap_numbers,
    looked_up_by_key,
    parameters,
    soft_cap,
)
from .block_mask import block_size_of, lists_of, states_of
from .compiler import Kernel, compile_all
from .errors import FuseError
from .evaluate import node_values
from .graph import BOOL, COLUMN, F32, FULL, ROW, Graph, Output
from .launch import ADDRESS, INT32, INT64, TENSOR_MAP, Loaded, architecture, capability_of, loaded
from .tracing import Proxy, Tracer

HOPPER = "sm_90a"  # which the template with WGMMA is for; others have the portable one
_SMS = 132  # of an H100 or H200, which choices are made for ahead of calls
_MOST_PARTS = 16  # of the keys: as many as are merged by one launch
_MOST_PARAMETERS = 64
_MOST_PLANS = 4096
_MOST_TRACED = 256
_REFERENCE_ELEMENTS = 1 << 24
_FEW_KEYS = 2048
_SECTION_BYTES = 16 << 20  # of keys and values: of an H100's L2 cache of 50 MB, each half has its own copies
_SHARED_BYTES = 227 * 1024 - 2048  # of a CTA, less barriers and what the system takes


# ---- functions ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Traced:
    """Functions as a graph, with outputs ``scores`` and ``masks`` in this order, and the names of the tensors that they look up in. ``key``
    tells it from all others, in every process."""

    key: str
    graph: Graph
    scores: bool
    masks: bool

    @property
    def names(self) -> list[str]:
        return [x.name for x in self.graph.inputs]

    def varying(self) -> int:
        """Nodes that every score needs anew."""
        depends: list[bool] = []
        for node in self.graph.nodes:
            depends.append(node.op == "value" and node.attrs[0] in ("kv", "score") or any(depends[i] for i in node.inputs))
        return sum(depends)


_functions: dict[str, Traced] = {}


def registered(graph: Graph, scores: bool, masks: bool) -> Traced:
    key = hashlib.sha256(f"{int(scores)}{int(masks)}{graph.text()}".encode()).hexdigest()[:32]
    return _functions.setdefault(key, Traced(key, graph, scores, masks))


class Call:
    """Functions with the tensors that they look up in."""

    def __init__(self, traced: Traced, captured: list[Tensor], held: Any):
        self.traced, self.key, self.captured, self.held = traced, traced.key, captured, held


_calls: dict[Any, Call] = {}


@constant_in_compiled_graphs
def traced(score_mod: Callable[..., Any] | None, mask_mod: Callable[..., Any] | None) -> Call:
    """Traced where it was not yet, or where what it reads from outside may be another object now."""
    watched = [_watched(f, set()) for f in (score_mod, mask_mod) if f is not None]
    if any(x is None for x in watched):
        return _trace(score_mod, mask_mod)
    key = (id(score_mod), id(mask_mod), *(tuple(token for token, _ in x) for x in watched))
    call = _calls.get(key)
    if call is None:
        call = _trace(score_mod, mask_mod)
        call.held = (score_mod, mask_mod, watched)  # no other object gets their ids
        if len(_calls) >= _MOST_TRACED:
            _calls.pop(next(iter(_calls)))
        _calls[key] = call
    return call


def _watched(value: Any, seen: set[int]) -> list[tuple[Any, Any]] | None:
    """What a function reads from outside: tokens that differ where it is something else, with the objects; None where that is not known."""
    if isinstance(value, Tensor):
        number = value.item() if value.ndim == 0 and value.device.type == "cpu" and not value.is_meta else None
        return [((id(value), repr(number)), value)]
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return [((type(value).__name__, repr(value)), None)]
    if isinstance(value, types.ModuleType | types.BuiltinFunctionType | types.MethodDescriptorType | type):
        return [(id(value), value)]
    if isinstance(value, tuple | list):
        return _all_watched(value, seen)
    if isinstance(value, functools.partial):
        return _all_watched([value.func, *value.args, *value.keywords.values()], seen)
    if not isinstance(value, types.FunctionType):
        return None
    if id(value) in seen:
        return []
    seen.add(id(value))
    read: list[Any] = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    for cell in value.__closure__ or ():
        try:
            read.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            return None
    names = _names_of(value.__code__)
    read += [value.__globals__[name] for name in names if name in value.__globals__]
    rest = _all_watched(read, seen)
    return None if rest is None else [(id(value.__code__), value), *rest]


def _all_watched(values: Iterable[Any], seen: set[int]) -> list[tuple[Any, Any]] | None:
    found: list[tuple[Any, Any]] = []
    for value in values:
        part = _watched(value, seen)
        if part is None:
            return None
        found += part
    return found


def _names_of(code: types.CodeType) -> list[str]:
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _names_of(constant)
    return names


def _trace(score_mod: Callable[..., Any] | None, mask_mod: Callable[..., Any] | None) -> Call:
    tracer = Tracer(torch.device("cuda"))
    tracer.takes_outside = True
    tracer.table_names = _table_names(score_mod, mask_mod)
    score = tracer.value("score", torch.float32, FULL)
    b, h = tracer.value("b", torch.int32), tracer.value("h", torch.int32)
    q, kv = tracer.value("q", torch.int32, COLUMN), tracer.value("kv", torch.int32, ROW)
    for function, arguments, register, storage in ((score_mod, (score, b, h, q, kv), F32, "f32"), (mask_mod, (b, h, q, kv), BOOL, "bool")):
        if function is None:
            continue
        with tracer:
            result = function(*arguments)
        if not isinstance(result, Proxy | Tensor | bool | int | float) and not hasattr(result, "element"):
            raise FuseError(f"attention: {_name_of(function)} returns a {type(result).__name__}, it must return one number or truth value")
        node = tracer.node_of(result, register)
        tracer.builder.outputs.append(Output(node, storage, tracer.extent_of(node)))
    for name, x in zip(tracer.builder.inputs, tracer.captured, strict=True):
        if x.numel() == 0:
            raise FuseError(f"attention: {name.name}, which is looked up in, has no elements: {list(x.shape)}")
    return Call(registered(tracer.builder.build(), score_mod is not None, mask_mod is not None), list(tracer.captured), None)


def _name_of(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


_ARGUMENTS = ("q", "k", "v", "block_mask", "scale", "enable_gqa", "return_lse", "block_table", "seq_lens")


def _table_names(*functions: Any) -> dict[int, str]:
    """How functions call the tensors in their closures and modules."""
    names: dict[int, str] = {}
    for function in functions:
        if not isinstance(function, types.FunctionType):
            continue
        found = inspect.getclosurevars(function)
        for name, value in {**found.globals, **found.nonlocals}.items():
            if isinstance(value, Tensor) and id(value) not in names:
                taken = {*_ARGUMENTS, *names.values()}
                names[id(value)] = next(x for x in (name, *(f"{name}_{n}" for n in range(2, 1000))) if x not in taken)
    return names


# ---- the operator -------------------------------------------------------------------------------------------------------------------

SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor[] captured, Tensor[] blocks, int[] block_size, Tensor? block_table, Tensor? seq_lens, "
    "str function, float scale"
)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    batch: int
    heads: int
    heads_kv: int
    sq: int
    sk: int
    head_dim: int
    head_dim_v: int
    paged: bool


def _check(q: Tensor, k: Tensor, v: Tensor, captured: list[Tensor], blocks: list[Tensor], block_size: list[int], block_table: Tensor | None,
           seq_lens: Tensor | None, function: str, scale: float) -> Traced:  # fmt: skip
    """Of what shapes and types alone say."""

    def fail(message: str) -> Any:
        raise FuseError(f"attention: {message}")

    known = _functions.get(function) or fail(f"the functions {function} were not traced in this process")
    if q.ndim != 4:
        fail(f"q must be [batch, heads_q, seqlen_q, head_dim], got {list(q.shape)}")
    if q.dtype not in (torch.float16, torch.bfloat16):
        fail(f"q must be float16 or bfloat16, got {str(q.dtype).removeprefix('torch.')}")
    layout = "[pages, page_size, heads_kv, head_dim]" if block_table is not None else "[batch, heads_kv, seqlen_k, head_dim]"
    for name, x in (("k", k), ("v", v)):
        if x.ndim != 4 or x.dtype != q.dtype or x.device != q.device:
            fail(f"{name} must be {layout} of {q.dtype} on {q.device}, got {list(x.shape)} of {x.dtype} on {x.device}")
    if k.shape[:3] != v.shape[:3]:
        fail(f"v must be {layout} as k is, but for head_dim, got {list(v.shape)} beside {list(k.shape)}")
    if k.shape[3] != q.shape[3]:
        fail(f"k must have q's head_dim, {q.shape[3]}, got {k.shape[3]}")
    heads_kv = k.shape[2 if block_table is not None else 1]
    if heads_kv == 0 or q.shape[1] % heads_kv:
        fail(f"q's heads must be a multiple of k's, got {q.shape[1]} and {heads_kv}")
    if block_table is None and k.shape[0] != q.shape[0]:
        fail(f"k must have q's batch, {q.shape[0]}, got {k.shape[0]}")
    if (block_table is None) != (seq_lens is None):
        fail("block_table and seq_lens are given together")
    if block_table is not None:
        for name, x, shape in (("block_table", block_table, f"[{q.shape[0]}, n]"), ("seq_lens", seq_lens, f"[{q.shape[0]}]")):
            if x.dtype != torch.int32 or x.device != q.device or x.shape[0] != q.shape[0] or x.ndim != (2 if name == "block_table" else 1):
                fail(f"{name} must be int32 {shape} on {q.device}, got {x.dtype} {list(x.shape)} on {x.device}")
        if blocks:
            fail(
                "block_mask is of positions that a call fixes, it is not taken with a block_table: mask_mod alone skips tiles by its bounds"
            )
        if k.shape[1] % 8 or k.shape[1] == 0:
            fail(f"the page_size must be a positive multiple of 8, got {k.shape[1]}")
    if len(captured) != len(known.graph.inputs):
        fail(f"the functions look up in {len(known.graph.inputs)} tensors ({', '.join(known.names)}), got {len(captured)}")
    for x, tensor in zip(known.graph.inputs, captured, strict=True):
        if dtypes.storage_of(tensor.dtype) != x.storage or tensor.ndim != x.rank or tensor.device != q.device:
            kind = f"{dtypes.dtype_of(x.storage)} of {x.rank} modes on {q.device}"
            fail(f"{x.name}, which the functions look up in, must be {kind}, got {tensor.dtype} {list(tensor.shape)} on {tensor.device}")
    if blocks:
        counts, indices, full_counts, full_indices = blocks
        q_blocks = -(-q.shape[2] // block_size[0])
        for name, x in (("kv_indices", indices), ("full_kv_indices", full_indices)):
            if x.ndim != 4 or x.shape[0] not in (1, q.shape[0]) or x.shape[1] not in (1, q.shape[1]) or x.shape[2] < q_blocks:
                expected = f"[1 or {q.shape[0]}, 1 or {q.shape[1]}, at least {q_blocks}, n]"
                fail(f"block_mask's {name} must be {expected} for {q.shape[2]} queries in blocks of {block_size[0]}, got {list(x.shape)}")
        if indices.shape != full_indices.shape or counts.shape != indices.shape[:3] or full_counts.shape != indices.shape[:3]:
            shapes = [list(x.shape) for x in blocks]
            fail(f"block_mask's lists must be counts [b, h, q] and indices [b, h, q, n], twice of one shape, got {shapes}")
        if any(x.dtype != torch.int32 or x.device != q.device for x in blocks):
            fail(f"block_mask's lists must be int32 on {q.device}, got {[(x.dtype, x.device) for x in blocks]}")
    if not scale > 0 or math.isinf(scale):
        fail(f"scale must be positive, got {scale}")
    return known


def _sizes(q: Tensor, k: Tensor, v: Tensor, block_table: Tensor | None) -> _Sizes:
    paged = block_table is not None
    sk = block_table.shape[1] * k.shape[1] if block_table is not None else k.shape[2]
    return _Sizes(q.shape[0], q.shape[1], k.shape[2 if paged else 1], q.shape[2], sk, q.shape[3], v.shape[3], paged)


def _results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The output has the order of q's modes where their head dimensions are equal, and is contiguous otherwise."""
    shape = (*q.shape[:3], v.shape[3])
    if v.shape[3] == q.shape[3] and q.stride(3) == 1 and q.stride(1) < q.stride(2):  # [batch, seqlen, heads, head_dim], transposed
        out = q.new_empty((shape[0], shape[2], shape[1], shape[3])).transpose(1, 2)
    else:
        out = q.new_empty(shape)
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


def _fake(q: Tensor, k: Tensor, v: Tensor, captured: list[Tensor], blocks: list[Tensor], block_size: list[int],
          block_table: Tensor | None, seq_lens: Tensor | None, function: str, scale: float) -> list[Tensor]:  # fmt: skip
    _check(q, k, v, captured, blocks, block_size, block_table, seq_lens, function, scale)
    return list(_results(q, v))


def _cpu(q: Tensor, k: Tensor, v: Tensor, captured: list[Tensor], blocks: list[Tensor], block_size: list[int],
         block_table: Tensor | None, seq_lens: Tensor | None, function: str, scale: float) -> list[Tensor]:  # fmt: skip
    known = _check(q, k, v, captured, blocks, block_size, block_table, seq_lens, function, scale)
    exact = evaluated(known, q, k, v, captured, blocks, block_size, block_table, seq_lens, scale, torch.float32)
    out, lse = _results(q, v)
    return [out.copy_(exact[0]), lse.copy_(exact[1])]


# ---- by torch -----------------------------------------------------------------------------------------------------------------------


def _modified(known: Traced, captured: list[Tensor], values: dict[str, Tensor], columns: int, precision: torch.dtype) -> list[Tensor]:
    nodes = node_values(known.graph, captured, columns=columns, values=values, precision=precision)
    return [nodes[y.node] for y in known.graph.outputs]


def evaluate_mask(call: Call, b: int, h: int, queries: Tensor, keys: Tensor) -> Tensor:
    """bool [queries, keys], of a mask alone."""
    one = torch.ones(1, 1, dtype=torch.int32, device=queries.device)
    values = {"b": one * b, "h": one * h, "q": queries.view(-1, 1), "kv": keys.view(1, -1)}
    captured = [x.to(queries.device) for x in call.captured]
    return _modified(call.traced, captured, values, len(keys), torch.float32)[-1].expand(len(queries), len(keys))


def evaluated(known: Traced, q: Tensor, k: Tensor, v: Tensor, captured: list[Tensor], blocks: list[Tensor], block_size: list[int],
              block_table: Tensor | None, seq_lens: Tensor | None, scale: float,
              precision: torch.dtype) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The results in ``precision``, and what nobody sees does not reach them."""
    sizes = _sizes(q, k, v, block_table)
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=precision, device=q.device)
    lse = torch.full(q.shape[:3], -math.inf, dtype=precision, device=q.device)
    states = states_of(blocks) if blocks else None
    group = sizes.heads // sizes.heads_kv
    for b in range(sizes.batch):
        keys, values_, first = _keys_of(b, k, v, block_table, seq_lens, sizes)
        length = keys.shape[1]
        if length == 0:
            continue
        together = max(_REFERENCE_ELEMENTS // length, 1)
        for h in range(sizes.heads):
            for begin in range(0, sizes.sq, together):
                rows = torch.arange(begin, min(begin + together, sizes.sq), device=q.device)
                columns = torch.arange(length, device=q.device)
                scores = q[b, h, rows].to(precision) @ keys[h // group].to(precision).T * scale
                seen = torch.ones_like(scores, dtype=torch.bool)
                if known.graph.outputs:
                    one = torch.ones(1, 1, dtype=torch.int32, device=q.device)
                    positions = {"q": (rows + first).view(-1, 1), "kv": columns.view(1, -1), "b": one * b, "h": one * h, "score": scores}
                    results = _modified(known, captured, positions, length, precision)
                    scores = results[0].to(precision).expand_as(scores) if known.scores else scores
                    seen = results[-1].expand_as(scores) if known.masks else seen
                if states is not None:
                    of = states[b if states.shape[0] > 1 else 0, h if states.shape[1] > 1 else 0]
                    state = of[rows // block_size[0]][:, (columns // block_size[1]).clamp(max=of.shape[1] - 1)]
                    state = torch.where((columns // block_size[1] < of.shape[1]).view(1, -1), state, 0)
                    seen = (state == 2) | (state == 1) & seen
                scores = torch.where(seen, scores, -math.inf)
                most = scores.amax(-1, keepdim=True)
                weights = torch.exp(scores - torch.where(most == -math.inf, 0.0, most))
                total = weights.sum(-1, keepdim=True)
                weights = torch.where(total == 0, 0.0, weights / total)
                used = seen.any(0)
                out[b, h, rows] = weights[:, used] @ values_[h // group][used].to(precision)
                lse[b, h, rows] = (most + total.log()).squeeze(-1)
    return out, lse


def _keys_of(
    b: int, k: Tensor, v: Tensor, block_table: Tensor | None, seq_lens: Tensor | None, sizes: _Sizes
) -> tuple[Tensor, Tensor, int]:
    """[heads_kv, length, head_dim] each, and the position of the first query."""
    if block_table is None or seq_lens is None:
        return k[b], v[b], 0
    length = int(seq_lens[b])
    if not 0 <= length <= sizes.sk:
        raise FuseError(f"attention: seq_lens[{b}] must be 0 to {sizes.sk}, what block_table has room for, got {length}")
    pages = block_table[b, : -(-length // k.shape[1])].long()
    if len(pages) and not (0 <= int(pages.min()) and int(pages.max()) < k.shape[0]):
        raise FuseError(f"attention: block_table[{b}] must name pages 0 to {k.shape[0] - 1}, got {pages.tolist()}")
    rows = [x[pages].reshape(-1, *x.shape[2:])[:length].transpose(0, 1) for x in (k, v)]
    return rows[0], rows[1], length - sizes.sq


# ---- on a GPU -----------------------------------------------------------------------------------------------------------------------


def configure(
    known: Traced, sizes: _Sizes, element: str, page_size: int, block_size: Sequence[int], sms: int, arch: str = HOPPER
) -> tuple[AttentionConfig, int]:
    """The kernel, and in how many parts the keys are cut.

    With WGMMA, three warpgroups hide each other's softmax best (as the library's own kernels of attention); two have registers for larger
    functions and blocks of 128 for block masks; few queries take one, with the query heads of a KV head as its rows."""
    portable = arch != HOPPER
    head_dim = next(d for d in HEAD_DIMS if max(sizes.head_dim, sizes.head_dim_v) <= d)
    group = sizes.heads // sizes.heads_kv
    packed = not block_size and group > 1 and sizes.sq <= 64
    rows = sizes.sq * group if packed else sizes.sq
    walk = sizes.batch * (sizes.heads_kv if packed else sizes.heads)
    if block_size:
        consumers = 2
    elif rows <= 64:
        consumers = 1
    elif rows <= 128 or portable or known.varying() > 12:
        consumers = 2
    else:
        time = {n: -(-(-(-rows // (64 * n)) * walk) // sms) * 64 * n / rate for n, rate in ((2, 0.85), (3, 1.0))}
        consumers = min(time, key=time.__getitem__)
    keys = 64 if portable else 80 if consumers == 3 and head_dim == 128 else 128
    box = math.gcd(page_size, keys) if sizes.paged and not portable else keys
    if keys // box > MOST_BOXES:
        raise FuseError(f"attention: the page_size must be a multiple of 8, got {page_size}")
    query_stages = 1 if packed else 2
    most = (_SHARED_BYTES - 1024 - 128 * head_dim * consumers * query_stages) // (4 * head_dim * keys)
    stages = 1 if portable else min(most, 4)
    key_words = 0 if portable else sum(looked_up_by_key(known.graph, packed).values())
    if stages * (4 * head_dim * keys + 8 * keys * key_words) > _SHARED_BYTES - 1024 - 128 * head_dim * consumers * query_stages:
        key_words = 0  # a stage is worth more
    tiles = -(-rows // (64 * consumers)) * walk
    parts = 1
    if not block_size and tiles:
        parts = max(min(sms // tiles, _MOST_PARTS, sizes.sk // (4 * keys)), 1)
    listed_q, listed_k = (n // tile for n, tile in zip(block_size or (BLOCK, BLOCK), (BLOCK, min(keys, BLOCK)), strict=True))
    if not block_size:
        listed_q = listed_k = 1
    config = AttentionConfig(
        element, head_dim, consumers, keys, stages, box, packed, sizes.paged, bool(block_size), listed_q, listed_k, parts > 1, known.scores,
        known.masks, portable, key_words,
    )  # fmt: skip
    return config, parts


def walk(config: AttentionConfig, sizes: _Sizes, tiles: int, walk_heads: int, parts: int, sms: int) -> tuple[list[int], int]:
    """The grid, and how many heads are in a section (kernels/attention_tiles.py): so many that their keys and values stay in the L2 cache,
    or that all SMs have a tile.

    With a mask, tiles of queries differ in their keys: CTAs take the next one as they are done, longest first. Taken by turns, with 86
    tiles for each of 16 heads, one CTA would have 9 to 24 % more than the average."""
    heads = walk_heads * sizes.batch * parts
    differ = (config.masks or config.listed) and sizes.sk > _FEW_KEYS
    group = 1 if config.packed else sizes.heads // sizes.heads_kv
    section = max(_SECTION_BYTES // (2 * sizes.sk * (sizes.head_dim + sizes.head_dim_v)), 1) * group
    section = max(section, -(-(2 if differ else 1) * sms // tiles))
    return [heads * tiles if config.portable else min(heads * tiles, sms), 1, 1], min(section, heads)


def kernel_of(known: Traced, config: AttentionConfig, arch: str) -> Kernel:
    if capability_of(arch) < 80:
        raise FuseError(f"attention: kernels are made for sm_80 and later, not for {arch}")
    template = "attention_portable" if config.portable else "attention"
    return Kernel.of(template, known.graph, config, arch, "attention")


Loader = Callable[[Traced, AttentionConfig, str], Loaded]


def load_compiled(known: Traced, config: AttentionConfig, arch: str) -> Loaded:
    kernel = kernel_of(known, config, arch)
    return loaded(kernel.key(), compile_all([kernel])[0])


_plans: dict[Any, _Plan] = {}
loaders: dict[str, Loader] = {}  # of functions that minfer.fuse.load read


def _cuda(q: Tensor, k: Tensor, v: Tensor, captured: list[Tensor], blocks: list[Tensor], block_size: list[int],
          block_table: Tensor | None, seq_lens: Tensor | None, function: str, scale: float) -> list[Tensor]:  # fmt: skip
    q, k, v = (_addressable(x, name, name != "q" and block_table is not None) for name, x in (("q", q), ("k", k), ("v", v)))
    blocks = [x.contiguous() for x in blocks]
    optional = [x for x in (block_table, seq_lens) if x is not None]
    key = (
        *((x.dtype, x.shape, x.stride(), x.device) for x in (q, k, v, *captured, *blocks, *optional)),
        len(captured), tuple(block_size), function, scale,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        known = _check(q, k, v, captured, blocks, block_size, block_table, seq_lens, function, scale)
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = _Plan(known, q, k, v, captured, blocks, block_size, block_table, seq_lens, scale)
    return plan.run(q, k, v, captured, blocks, optional)


def _addressable(x: Tensor, name: str, paged: bool) -> Tensor:
    """As TMA and vectors of 16 bytes take it; copied where that needs it, but for caches."""
    aligned = x.shape[3] % 8 == 0 and x.data_ptr() % 16 == 0
    aligned = aligned and all(n == 1 or (stride % 8 == 0 and stride > 0) for n, stride in zip(x.shape[:3], x.stride()[:3], strict=True))
    if aligned and (x.stride(3) == 1 or x.shape[3] == 1):
        return x
    if x.shape[3] % 8:
        raise FuseError(f"attention: {name}'s head_dim must be a multiple of 8, got {x.shape[3]}")
    if paged:
        expected = "a contiguous last mode, and a base and strides that are multiples of 16 bytes"
        raise FuseError(f"attention: {name} must have {expected}, got {list(x.stride())}")
    return x.clone(memory_format=torch.contiguous_format)


def _map_words(number: int, x: Tensor, paged: bool, box: int) -> list[int]:
    """A TMA descriptor with modes head_dim, rows, heads, and pages or batches."""
    order = (3, 1, 2, 0) if paged else (3, 2, 1, 0)
    strides = [x.stride(mode) if x.shape[mode] > 1 else 8 for mode in order[1:]]
    return [TENSOR_MAP, number, 4, *(x.shape[mode] for mode in order), *strides, 64, box, 1, 1, 128]


def _bits(x: float) -> int:
    return struct.unpack("<i", struct.pack("<f", x))[0]


class _Plan:
    """A call with tensors of known shapes and strides."""

    def __init__(self, known: Traced, q: Tensor, k: Tensor, v: Tensor, captured: list[Tensor], blocks: list[Tensor], block_size: list[int],
                 block_table: Tensor | None, seq_lens: Tensor | None, scale: float):  # fmt: skip
        self.sizes = sizes = _sizes(q, k, v, block_table)
        if max(sizes.head_dim, sizes.head_dim_v) > HEAD_DIMS[-1]:
            raise FuseError(f"attention: head dimensions are at most {HEAD_DIMS[-1]}, got {sizes.head_dim} and {sizes.head_dim_v}")
        if max(sizes.sq, sizes.sk) >= MOST_POSITIONS:
            raise FuseError(f"attention: positions must be below 2^24, got {sizes.sq} queries and {sizes.sk} keys")
        device = q.device.index
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        page_size = k.shape[1] if sizes.paged else 0
        arch = architecture(device)
        config, self.parts = configure(known, sizes, dtypes.storage_of(q.dtype), page_size, block_size if blocks else (), sms, arch)
        self.counted = False
        self.nothing = not (sizes.batch and sizes.sq and sizes.heads and sizes.head_dim_v)
        self.unseen = sizes.sk == 0
        if self.nothing or self.unseen:
            return
        self.kernel = loaders.get(known.key, load_compiled)(known, config, arch)
        self.config = config
        group = sizes.heads // sizes.heads_kv
        rows = sizes.sq * group if config.packed else sizes.sq
        walk_heads = sizes.heads_kv if config.packed else sizes.heads
        tiles = -(-rows // config.rows)
        self.grid, section = walk(config, sizes, tiles, walk_heads, self.parts, sms)
        if tiles * walk_heads * sizes.batch * self.parts >= 1 << 30:
            raise FuseError(f"attention: {sizes.batch} sequences of {sizes.heads} heads and {sizes.sq} queries are too many for one launch")
        numbers = {
            "scale": _bits(scale), "tiles": tiles, "walk_heads": walk_heads, "batch": sizes.batch,
            "parts": self.parts, "group": group, "sq": sizes.sq, "sk": sizes.sk, "head_dim": sizes.head_dim, "head_dim_v": sizes.head_dim_v,
            "section": section, "claims": 0,
        }  # fmt: skip
        self.counted = config.counted and tiles * walk_heads * sizes.batch * self.parts > self.grid[0]
        if self.counted:
            numbers["claims"] = 1
        cap = soft_cap(known.graph, config)
        if cap is not None:
            numbers.update(zip(CAP_NUMBERS, map(_bits, cap_numbers(cap, scale)), strict=True))
        # Tensors of the launch: q, k, v, out, lse, captured ones, then lists or the table and lengths.
        places = {"q": 0, "q_map": 0, "k_map": 1, "v_map": 2, "k": 1, "v": 2, "out": 3, "lse": 4}
        rest = 5 + len(captured)
        if blocks:
            places.update({name: rest + i for i, name in enumerate(("some_count", "some_index", "all_count", "all_index"))})
            shape = blocks[1].shape
            numbers.update(
                list_rows=shape[2], list_length=shape[3], list_batch=shape[1] * shape[2] if shape[0] > 1 else 0,
                list_head=shape[2] if shape[1] > 1 else 0,
            )  # fmt: skip
        if block_table is not None:
            places.update(table=rest, lengths=rest + 1)
            if block_table.shape[1] > 1 and block_table.stride(1) != 1 or seq_lens.shape[0] > 1 and seq_lens.stride(0) != 1:
                raise FuseError("attention: the last modes of block_table and seq_lens must be contiguous")
            numbers.update(table_stride=block_table.stride(0), table_columns=block_table.shape[1], pages=k.shape[0], page_size=k.shape[1])
        if config.counted:
            places["counter"] = rest + len(blocks) + (2 if block_table is not None else 0) if self.counted else places["lse"]
        out = _results(q, v)[0] if not config.split else None
        words: list[int] = []
        count = 0
        for name, i, mode in parameters(known.graph, config):
            count += 1
            if name == "q_map":
                words += _map_words(places[name], q, False, config.rows)
            elif name in ("k_map", "v_map"):
                words += _map_words(places[name], k if name == "k_map" else v, sizes.paged, config.box)
            elif name == "captured":
                words += [ADDRESS, 5 + i]
            elif name == "captured_size":
                words += [INT32, captured[i].shape[mode]]
            elif name == "captured_stride":
                words += [INT64, captured[i].stride(mode)]
            elif name in ("k_stride", "v_stride"):
                words += [INT64, (k if name == "k_stride" else v).stride((0, 2, 1)[i] if sizes.paged else i)]
            elif name == "q_stride":
                words += [INT64, q.stride(i)]
            elif name == "out_stride":
                words += [INT64, 0 if out is None else out.stride(i)]
            elif name in places:
                words += [ADDRESS, places[name]]
            else:
                words += [INT64 if name == "table_stride" else INT32, numbers[name]]
        if count > _MOST_PARAMETERS:
            raise FuseError(
                f"attention: the functions look up in too many tensors: a kernel has {_MOST_PARAMETERS} parameters, got {count}"
            )
        self.words = words

    def run(self, q: Tensor, k: Tensor, v: Tensor, captured: list[Tensor], blocks: list[Tensor], optional: list[Tensor]) -> list[Tensor]:
        out, lse = _results(q, v)
        if self.nothing or self.unseen:
            return [out.zero_(), lse.fill_(-math.inf)]
        rest = [*captured, *blocks, *optional]
        if self.counted:
            rest.append(q.new_zeros(1, dtype=torch.int32))
        if self.parts == 1:
            self.kernel.launch([q, k, v, out, lse, *rest], self.words, self.grid)
            return [out, lse]
        parts = q.new_empty((self.parts, *out.shape), dtype=torch.float32)
        logs = q.new_empty((self.parts, *lse.shape), dtype=torch.float32)
        self.kernel.launch([q, k, v, parts, logs, *rest], self.words, self.grid)
        merged, lse = ops.merge_attention_states(list(parts.transpose(2, 3).unbind()), list(logs.unbind()))
        return [out.copy_(merged.transpose(1, 2)), lse]


OP = operators.define("attention", SCHEMA, 2, cuda=_cuda, cpu=_cpu, fake=_fake)


def call(
    traced: Any, captured: list[Tensor], mask: Any, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, enable_gqa: bool,
    return_lse: bool, block_table: Tensor | None, seq_lens: Tensor | None,
) -> Any:  # fmt: skip
    if not enable_gqa and q.ndim == 4 and k.ndim == 4:
        heads = k.shape[2 if block_table is not None else 1]
        if heads != q.shape[1]:
            raise FuseError(f"attention: q has {q.shape[1]} heads and k {heads}: pass enable_gqa=True")
    blocks: list[Tensor] = []
    block_size: list[int] = []
    if mask is not None:
        some, indices, full, full_indices = lists_of(mask)
        if full is None or full_indices is None:
            full, full_indices = torch.zeros_like(some), torch.zeros_like(indices)
        blocks, block_size = [some, indices, full, full_indices], list(block_size_of(mask))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = OP(q, k, v, captured, blocks, block_size, block_table, seq_lens, traced.key, scale)
    return (out, lse) if return_lse else out


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    *,
    block_table: Tensor | None = None,
    seq_lens: Tensor | None = None,
) -> Any:
    """out = softmax(score_mod(scale * q.k^T)).v over the keys that mask_mod lets each query see, in one kernel. Functions that are written
    for ``torch.nn.attention.flex_attention`` work unchanged.

    Args:
      q: [batch, heads_q, seqlen_q, head_dim], float16 or bfloat16; any strides whose last is 1.
      k: [batch, heads_kv, seqlen_k, head_dim], q's dtype; with a block_table a cache as :func:`minfer.attention_paged` has it,
        [pages, page_size, heads_kv, head_dim] with a page_size that is a multiple of 8.
      v: as k, of head_dim_v. Head dimensions are multiples of 8 up to 128.
      score_mod: (score, b, h, q_idx, kv_idx) -> score: the scaled score, float32, and int32 indices, all single numbers. Tensors that the
        function reads from outside are looked up in by these (``slopes[h]``, ``bias[q_idx - kv_idx + n]``), negative indices from the end,
        others clamped to what there is; they must be on q's device.
      mask_mod: (b, h, q_idx, kv_idx) -> bool: whether the query sees the key. block_mask's own by default.
      block_mask: of :func:`minfer.fuse.create_block_mask` or torch's function of this name: tiles that it does not list are not computed,
        and full ones are not masked. Without one, tiles are skipped, and not masked, that bounds of mask_mod's positions prove to be empty
        or full: causal masks, windows, prefixes and chunks need no block mask; what a tensor says by position, as documents, does.
      scale: positive; head_dim ** -0.5 if None.
      enable_gqa: heads_q may be a multiple of heads_kv.
      return_lse: also the logarithms of the softmax's denominators.
      block_table: int32 [batch, n]: row b names the pages of sequence b in order. Entries of pages that no query needs may be anything.
      seq_lens: int32 [batch]: keys of each sequence, those of its queries with them. Query i has the position seq_lens[b] - seqlen_q + i,
        and key j the position j; nothing is causal unless mask_mod says it.

    Returns:
      out: [batch, heads_q, seqlen_q, head_dim_v], q's dtype, in the order of q's modes; with return_lse (out, lse), lse float32
        [batch, heads_q, seqlen_q], the natural logarithm. A query that sees no key has an out of zeros and an lse of -inf.

    Raises:
      FuseError: an argument cannot be right, or a function cannot be fused; it names the line.

    Numerics: scores, score_mod and softmax are float32, tanh within 2^-11 of itself; what score_mod adds that is linear in kv_idx is exact
    within 2^-20 of what it changes by over a tile of 80 or 128 keys; exponentials are rounded to q's dtype for the product with v; integers
    have 32 bits, tensors of int64 are looked up in as such. With few queries the keys are cut into parts, which are added
    up in order: the same call gives the same bits in every run. v must be finite in keys of tiles that some query sees; keys behind
    seq_lens may hold anything. There is no backward. On CPU the functions are evaluated by torch in float32. On GPUs without
    WGMMA another kernel computes the same, in other tiles.

    Source: FlexAttention (Dong et al., 2024), FlashAttention-3 (Shah et al., 2024).
    """
    functions = traced(score_mod, block_mask.mask_mod if mask_mod is None and block_mask is not None else mask_mod)
    options = {"scale": scale, "enable_gqa": enable_gqa, "return_lse": return_lse, "block_table": block_table, "seq_lens": seq_lens}
    return call(functions, functions.captured, block_mask, q, k, v, **options)


# ---- functions for servers -----------------------------------------------------------------------------------------------------------

_QUERIES = (1, 8, 64, 128, 192, 1024, 8192, 1 << 16)  # for which kernels are made ahead of calls: all choices by lengths and batches
_KEYS = (128, 4096, 1 << 16)
_BATCHES = (1, 8, 256)


class AttentionFunction:
    """:func:`minfer.fuse.attention` with its functions: what servers compile ahead of calls and export."""

    def __init__(self, score_mod: Callable[..., Any] | None = None, mask_mod: Callable[..., Any] | None = None):
        self.score_mod, self.mask_mod = score_mod, mask_mod
        self.name = "_".join(_name_of(f) for f in (score_mod, mask_mod) if f is not None) or "attention"

    def _functions(self, captured: dict[str, Tensor]) -> tuple[Any, list[Tensor]]:
        if captured:
            raise FuseError(f"{self.name}: takes no tensors by name, its functions have them: got {sorted(captured)}")
        functions = traced(self.score_mod, self.mask_mod)
        return functions, functions.captured

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, block_mask: Any = None, scale: float | None = None, enable_gqa: bool = False,
        return_lse: bool = False, *, block_table: Tensor | None = None, seq_lens: Tensor | None = None, **captured: Tensor,
    ) -> Any:  # fmt: skip
        """As :func:`minfer.fuse.attention`. A function that was loaded takes the tensors that its functions look up in by their names."""
        functions, tensors = self._functions(captured)
        options = {"scale": scale, "enable_gqa": enable_gqa, "return_lse": return_lse, "block_table": block_table, "seq_lens": seq_lens}
        return call(functions, tensors, block_mask, q, k, v, **options)

    def __repr__(self) -> str:
        return f"<minfer.fuse attention {self.name}>"

    def traced(self) -> Traced:
        return traced(self.score_mod, self.mask_mod).traced

    def configurations(self, examples: Iterable[Any], arch: str = HOPPER) -> list[AttentionConfig]:
        """Of calls like the examples, with any lengths and batches."""
        known = self.traced()
        found: dict[AttentionConfig, None] = {}
        for example in examples:
            arguments = dict(example) if isinstance(example, dict) else dict(zip(("q", "k", "v"), example, strict=True))
            q, k, v, mask = (arguments.get(name) for name in ("q", "k", "v", "block_mask"))
            page_size = k.shape[1] if "block_table" in arguments else 0
            given = _sizes(q, k, v, arguments.get("block_table"))
            if max(given.head_dim, given.head_dim_v) > HEAD_DIMS[-1]:
                raise FuseError(f"attention: head dimensions are at most {HEAD_DIMS[-1]}, got {given.head_dim} and {given.head_dim_v}")
            block_size = [] if mask is None else block_size_of(mask)
            for sq in _QUERIES:
                for sk in _KEYS:
                    for batch in _BATCHES:
                        sizes = dataclasses.replace(given, batch=batch, sq=sq, sk=sk)
                        config, _ = configure(known, sizes, dtypes.storage_of(q.dtype), page_size, block_size, _SMS, arch)
                        found[config] = None
        return list(found)

    def precompile(self, *examples: Any, arch: str | None = None) -> None:
        """Compiles for calls with arguments like those of ``examples``, in parallel, for any lengths and batches.

        Args:
          examples: tuples of q, k and v, or dictionaries with "block_mask", "block_table" and "seq_lens" as well; tensors may be on the
            meta device.
          arch: sm_90a and so on; None: the current device's.
        """
        arch = arch or architecture(torch.cuda.current_device())
        compile_all([kernel_of(self.traced(), config, arch) for config in self.configurations(examples, arch)])
