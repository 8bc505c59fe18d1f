"""minfer.qk_norm_rope_append against its parts in float64: what the CPU and GPU tests share."""

import minfer
import torch

from tests.attention.kv_cache_cases import KV_FORMATS
from tests.fuzz.truth import rows as truth
from tests.fuzz.truth.epilogue import Bounded

# (heads, heads_kv, head_dim, rotary_dim, interleaved, weights, weight_offset)
HEADS = (
    (8, 2, 128, 128, False, True, 0.0),  # Qwen3
    (4, 1, 256, 256, False, True, 1.0),  # Gemma 3
    (6, 2, 64, 64, False, False, 0.0),  # Llama
    (3, 3, 96, 96, True, False, 0.0),
    (5, 1, 64, 20, False, True, 0.0),  # pairs that are in two vectors
    (2, 2, 128, 54, True, True, 0.0),
    (1, 1, 32, 32, False, True, 0.0),
)
LENGTHS = ((1, 1, 1), (70, 3, 40), (64, 0, 1))
CASES = [(kv_format, heads, lengths) for kv_format in KV_FORMATS for heads in HEADS for lengths in LENGTHS]
PAGE, PAGES = 64, 3  # of each sequence
TABLE = 200


def make(kv_format, heads, lengths, dtype, device="cpu", first=30):
    """Arguments of a call whose sequences have ``first`` tokens already, the cache, and the options."""
    heads_q, heads_kv, d, rotary_dim, interleaved, weights, offset = heads
    batch, tokens = len(lengths), sum(lengths)
    cache = minfer.allocate_kv_cache(
        batch * PAGES, PAGE, heads_kv, d, kv_format=kv_format, dtype=dtype, device=device, batch=batch, group_tokens=32
    )
    if kv_format == "fp8_e4m3":
        cache.k_scale.uniform_(0.01, 0.03)
        cache.v_scale.uniform_(0.01, 0.03)
    qkv = torch.randn(tokens, heads_q + 2 * heads_kv, d, device=device).to(dtype)
    own = [torch.randn(d, device=device).to(dtype) if weights else None for _ in range(2)]
    places = [first + i for n in lengths for i in range(n)]
    slots = [b * PAGES * PAGE + first + i for b, n in enumerate(lengths) for i in range(n)]
    ends = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    if kv_format == "int4":  # what came before is in the residual
        cache.k_residual.normal_()
        cache.v_residual.normal_()
    arguments = (qkv, *own, minfer.rope_cache(10000.0, rotary_dim, TABLE, device=device), torch.tensor(places, device=device))
    options = {"weight_offset": offset, "interleaved": interleaved}
    if kv_format == "int4" and set(lengths) != {1}:
        options["cu_seqlens"] = ends
    return arguments, cache, torch.tensor(slots, device=device), options


def call(arguments, cache, slots, options):
    return minfer.qk_norm_rope_append(*arguments, cache.k, cache.v, slots, **cache.scales(), **options)


def copy_of(cache):
    return type(cache)(*(x.clone() if isinstance(x, torch.Tensor) else x for x in cache))


def prepared(x, weight, cos_sin, positions, options) -> Bounded:
    """Heads behind norm and rotation, float64, not rounded."""
    y = Bounded(x.double(), torch.zeros_like(x, dtype=torch.float64))
    if weight is not None:
        y = truth.rms_norm(x, weight, 1e-6, options["weight_offset"])
    turned = truth.rope(y.value, cos_sin, positions, options["interleaved"])
    return Bounded(turned.value, turned.error + 2 * y.error.amax(-1, keepdim=True))


def check(arguments, before, slots, options, q, after):
    """The queries have their bound; the cache is that of kv_cache_append of keys within theirs."""
    qkv, q_weight, k_weight, cos_sin, positions = arguments
    heads_kv = before.k.shape[2]
    queries, keys, values = qkv.split([qkv.shape[1] - 2 * heads_kv, heads_kv, heads_kv], 1)
    want = prepared(queries, q_weight, cos_sin, positions, options).rounded(qkv.dtype)
    assert q.is_contiguous() and ((q.double() - want.value).abs() <= want.error + 2.0**-126).all()
    keys = prepared(keys, k_weight, cos_sin, positions, options).value.to(qkv.dtype)
    more = {"cu_seqlens": options["cu_seqlens"]} if "cu_seqlens" in options else {}
    minfer.kv_cache_append(keys.contiguous(), values, before.k, before.v, slots, **before.scales(), **more)
    for name, x, y in zip(before._fields, after, before, strict=True):
        if not isinstance(y, torch.Tensor):
            continue
        if name.startswith("v"):
            assert torch.equal(bits(x), bits(y)), name
            continue
        # A key on the other side of a rounding: one step of its 16-bit type, or of its codes, and that seldom.
        different = (bits(x) != bits(y)).sum()
        assert different <= 2 + 0.02 * keys.numel() * 2, name
        if name == "k" and before.kv_format == "int4":
            x, y = (torch.stack([z & 15, z >> 4], -1) for z in (x, y))
        step = {"k": {"16bit": 2.0**-6, "fp8_e4m3": 2.0**-2, "int8": 1.01 / 127, "int4": 1.01 / 15}[before.kv_format]}.get(name, 2.0**-6)
        a, b = x.double(), y.double()
        scale = torch.maximum(a.abs(), b.abs()) if name != "k" or before.kv_format in ("16bit", "fp8_e4m3") else b.abs().max()
        slack = 2.0**-6 if name in ("k", "k_residual") else 0.0
        assert ((a - b).abs() <= step * scale + slack).all(), name


def bits(x):
    return x.contiguous().view(torch.uint8)
