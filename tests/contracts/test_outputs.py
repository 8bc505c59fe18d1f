"""``out`` of every operator that has one: it must not overlap itself or what is read, on every device and in the operator's own words.
Packed weights at any address."""

import math

import minfer
import pytest
import torch
from minfer.checks import common as checks

from tests.contracts import operator_cases
from tests.moe.grouped_quantized_cases import require_kernels

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EVERYWHERE = ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPE = torch.float16
M, N, K, EXPERTS = 4, 64, 64, 2


def randn(device, *shape):
    return torch.randn(shape).to(DTYPE).to(device)


def packed(device, bits, *lead):
    make = minfer.w4a16_pack if bits == 4 else minfer.w8a16_pack
    one = make(torch.randint(0, 1 << bits, (N, K), dtype=torch.uint8))
    return one.expand(*lead, *one.shape).contiguous().to(device)


def forms(device):
    """name in messages -> (call with a and out, a's shape, out's shape)"""
    offsets = torch.tensor([2, M], dtype=torch.int32, device=device)
    b, experts = randn(device, K, N), randn(device, EXPERTS, N, K).mT
    w4, w8, w4_experts = packed(device, 4), packed(device, 8), packed(device, 4, EXPERTS)
    scales = torch.rand(1, N).to(DTYPE).to(device)
    expert_scales = torch.rand(EXPERTS, 1, N).to(DTYPE).to(device)
    group = dict(group_size=-1)
    return (
        {
            "gemm": (lambda a, out, **o: minfer.gemm(a, o.pop("b", b), out=out, **o), (M, K), (M, N)),
            "w4a16_gemm": (lambda a, out, **o: minfer.w4a16_gemm(a, w4, scales, out=out, **group, **o), (M, K), (M, N)),
            "w8a16_gemm": (lambda a, out, **o: minfer.w8a16_gemm(a, w8, scales, out=out, **group, **o), (M, K), (M, N)),
            "grouped_gemm.out": (lambda a, out: minfer.grouped_gemm(a, experts, offsets, out=out), (M, K), (M, N)),
            "grouped_gemm_masked.out": (
                lambda a, out: minfer.grouped_gemm_masked(a, experts, offsets.clamp(max=M // 2), out=out),
                (EXPERTS, M // 2, K),
                (EXPERTS, M // 2, N),
            ),
            "grouped_w4a16_gemm.out": (
                lambda a, out: minfer.grouped_w4a16_gemm(a, w4_experts, expert_scales, None, offsets, out=out, **group),
                (M, K),
                (M, N),
            ),
        }
        | scaled_forms(device)
        | {f"{name}.out": (call, (M, 2 * N if name == "gated_activation" else N), (M, N)) for name, call in row_forms(device).items()}
    )


def scaled_forms(device):
    """Of 8-bit operands, which are what is in a's memory."""
    one = torch.ones(1, device=device)

    def form(name, dtype):
        b = randn(device, 2 * K, N).to(dtype)
        return lambda a, out, **o: getattr(minfer, name)(a.view(dtype), o.pop("b", b), one, one, out=out, **o)

    types = {"gemm_fp8": torch.float8_e4m3fn, "gemm_int8": torch.int8}
    dense = {name: (form(name, dtype), (M, K), (M, N)) for name, dtype in types.items()}
    w4, scales = minfer.w4a16_pack(torch.randint(0, 16, (N, 2 * K), dtype=torch.uint8)).to(device), torch.rand(1, N).to(DTYPE).to(device)
    w4a8 = lambda a, out, **o: minfer.w4a8_gemm(a.view(torch.int8), one, w4, scales, group_size=-1, out=out, **o)  # noqa: E731
    dense["w4a8_gemm"] = (w4a8, (M, K), (M, N))
    return dense | {name: x for operator, dtype in types.items() for name, x in grouped_scaled_forms(operator, dtype, device).items()}


def grouped_scaled_forms(operator, dtype, device):
    one, offsets = torch.ones(1, device=device), torch.tensor([2, M], dtype=torch.int32, device=device)
    b, sorted_rows, masked = randn(device, EXPERTS, N, 2 * K).to(dtype).mT, f"grouped_{operator}", f"grouped_{operator}_masked"
    call = lambda name, ends: lambda a, out: getattr(minfer, name)(a.view(dtype), b, one, one, ends, out=out)  # noqa: E731
    return {
        f"{sorted_rows}.out": (call(sorted_rows, offsets), (M, K), (M, N)),
        f"{masked}.out": (call(masked, offsets.clamp(max=M // 2)), (EXPERTS, M // 2, K), (EXPERTS, M // 2, N)),
    }


def row_forms(device):
    """Of operators on rows, whose operand is x."""
    weight, bias = randn(device, N), randn(device, N)

    def embedding(a, out):
        """Its operand of out's memory is the table; ids choose its first rows."""
        return minfer.embedding(torch.arange(M, device=device) % max(a.shape[0], 1), a, out=out)

    return {
        "rms_norm": lambda a, out, **o: minfer.rms_norm(a, o.get("weight", weight), out=out),
        "layer_norm": lambda a, out, **o: minfer.layer_norm(a, o.get("weight", weight), o.get("bias", bias), out=out),
        "softmax": lambda a, out: minfer.softmax(a, out=out),
        "log_softmax": lambda a, out: minfer.log_softmax(a, out=out),
        "activation": lambda a, out, **o: minfer.activation(a, "gelu", bias=o.get("bias", bias), out=out),
        "gated_activation": lambda a, out: minfer.gated_activation(a, out=out),
        "embedding": embedding,
        "hadamard": lambda a, out: minfer.hadamard(a, 4, out=out),
    }


NAMES = sorted(forms("cpu"))
OPERANDS = {f"{name}.out": "weight" if name == "embedding" else "x" for name in row_forms("cpu")}  # of others it is a
IN_PLACE = {name for name in OPERANDS if name not in ("gated_activation.out", "embedding.out")}  # out may be the operand itself


def form(name, device):
    """One of them, to be computed."""
    if name == "grouped_w4a16_gemm.out":
        require_kernels(device)
    return forms(device)[name]


def test_every_out_form_is_here():
    with_out = {name for name in operator_cases.names() if "out" in getattr(torch.ops.minfer, name).overloads()}
    assert with_out == {name.removesuffix(".out") for name in NAMES}


def bits_of(x):
    return x.contiguous().view(torch.int16)


def refused(message, call, *arguments, **options):
    with pytest.raises(RuntimeError) as raised:
        call(*arguments, **options)
    assert message in str(raised.value), raised.value


@pytest.mark.parametrize("device", EVERYWHERE)
@pytest.mark.parametrize("name", NAMES)
def test_out_that_overlaps_itself(name, device):
    call, a_shape, shape = forms(device)[name]
    a = torch.zeros(a_shape, dtype=DTYPE, device=device)
    memory = torch.zeros(4096, dtype=DTYPE, device=device)
    rows = shape[:-1]
    overlapping = {
        "a row again and again": memory[:N].expand(shape),
        "an element again and again": memory[:1].expand(shape),
        "rows that begin in the one before": memory.as_strided(shape, (*([(N - 1) * rows[-1]] * (len(shape) - 2)), N - 1, 1)),
    }
    for what, out in overlapping.items():
        with pytest.raises(RuntimeError) as raised:
            call(a, out)
        message = str(raised.value)
        assert message.startswith(f"minfer::{name.removesuffix('.out')}: out") and ("overlap" in message or "stride" in message), (
            what,
            message,
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_out_that_overlaps_what_is_read(name, device):
    call, a_shape, shape = form(name, device)
    read, size, written = OPERANDS.get(name, "a"), math.prod(a_shape), math.prod(shape)
    memory = randn(device, 8192)
    a, seen = memory[:size].view(a_shape), (*a_shape[:-1], 2 * K) if name in scaled_forms("cpu") else a_shape
    want = call(a.clone(), torch.empty(shape, dtype=DTYPE, device=device))
    message = f"minfer::{name.removesuffix('.out')}: out must not overlap {read}, got {list(shape)} and {read} {list(seen)} in one memory"
    if name not in IN_PLACE:
        refused(message, call, a, memory[:written].view(shape))
    refused(message, call, a, memory[64 : 64 + written].view(shape))  # the last rows of a
    before = memory.clone()
    refused(message, call, memory[128 : 128 + size].view(a_shape), memory[:written].view(shape))
    assert torch.equal(memory, before)
    # Apart, or taking turns in one memory: as documented, legal.
    assert torch.equal(bits_of(call(a, memory[size : size + written].view(shape))), bits_of(want))
    turns = memory[1024 : 1024 + size + written].view(*shape[:-1], -1)
    turns[..., : a_shape[-1]] = a
    assert torch.equal(bits_of(call(turns[..., : a_shape[-1]], turns[..., a_shape[-1] :])), bits_of(want))
    if name in IN_PLACE:
        assert torch.equal(call(a, a), want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_out_made_under_inference_mode(name, device):
    """Outside of it torch would refuse it, but only when it is written."""
    call, a_shape, shape = form(name, device)
    a = randn(device, *a_shape)
    with torch.inference_mode():
        out, like = torch.full(shape, 7.0, dtype=DTYPE, device=device), a.clone()
    head = f"minfer::{name.removesuffix('.out')}: "
    message = f"{head}out must not be an inference tensor outside of torch.inference_mode(), got one of {list(shape)}"
    refused(message, call, a, out)
    refused(message, call, like, out)
    with torch.no_grad():
        refused(message, call, a, out)
    assert (out == 7).all(), "nothing was launched"
    want = call(like, torch.empty(shape, dtype=DTYPE, device=device))
    with torch.inference_mode():  # what is read as e4m3 may be NaN
        assert torch.equal(bits_of(call(a, out)), bits_of(want))


@pytest.mark.parametrize("device", DEVICES)
def test_out_and_addends(device):
    """It may be c, and nothing else that is read."""
    memory = randn(device, K * N)
    out = memory[: M * N].view(M, N)
    table = forms(device)
    for name, extra in (("gemm", {"beta": 1.0}), ("w4a16_gemm", {}), ("w8a16_gemm", {})):
        call, a_shape, _ = table[name]
        a, before = randn(device, *a_shape), out.clone()
        want = call(a, torch.empty_like(out), c=before, **extra)
        assert torch.equal(call(a, out, c=out, **extra), want)
        refused(f"minfer::{name}: out must not overlap c, got", call, a, out, c=out[0], **extra)
        refused(f"minfer::{name}: out must not overlap bias, got", call, a, out, bias=memory[:N])
    call = table["gemm"][0]
    refused("minfer::gemm: out must not overlap b, got", call, a, out, b=memory.view(K, N))
    assert torch.isfinite(call(a, out, c=out[0], beta=0.0)).all(), "with a beta of 0, c is not read"


@pytest.mark.parametrize("device", DEVICES)
def test_out_and_factors(device):
    """Of operators on rows: weight and bias are read, too, and of an embedding the ids."""
    out = randn(device, M, N)
    for name, call in row_forms(device).items():
        for factor in {"rms_norm": ("weight",), "layer_norm": ("weight", "bias"), "activation": ("bias",)}.get(name, ()):
            refused(f"minfer::{name}: out must not overlap {factor}, got", call, randn(device, M, N), out, **{factor: out[0]})
    ids = out.view(-1)[: 4 * M].view(torch.int64)
    refused("minfer::embedding: out must not overlap ids, got", minfer.embedding, ids, randn(device, 8, N), out=out)


@pytest.mark.parametrize("device", DEVICES)
def test_out_and_what_experts_read(device):
    """Of grouped products: everything beside a and the weight, too."""
    offsets = torch.tensor([2, M], dtype=torch.int32, device=device)
    out = randn(device, M, N)
    b, w4 = randn(device, EXPERTS, N, K).mT, packed(device, 4, EXPERTS)
    scales = torch.rand(EXPERTS, 2, N, device=device).to(DTYPE)
    as_numbers = out.view(torch.int32).view(-1)
    call = lambda **o: minfer.grouped_gemm(randn(device, M, K), b, o.pop("offsets", offsets), out=out, **o)  # noqa: E731
    name = "minfer::grouped_gemm: out must not overlap"
    refused(f"{name} bias, got", call, bias=out[:EXPERTS])
    refused(f"{name} offsets, got", call, offsets=as_numbers[:EXPERTS])
    refused(f"{name} gather, got", call, gather=as_numbers[:M])
    refused(f"{name} row_scale, got", call, row_scale=as_numbers[:M].view(torch.float32))
    whole = randn(device, EXPERTS * 2, N)
    own = {"offsets": offsets, "zeros": None}

    def quantised(out, **o):
        o = own | o
        return minfer.grouped_w4a16_gemm(randn(device, M, K), w4, scales, o.pop("zeros"), o.pop("offsets"), group_size=32, out=out, **o)

    name = "minfer::grouped_w4a16_gemm: out must not overlap"
    refused(f"{name} zeros, got", quantised, whole[:M], zeros=whole.view(EXPERTS, 2, N))
    refused(f"{name} alpha, got", quantised, out, alpha=as_numbers[:EXPERTS].view(torch.float32))
    refused(f"{name} bias, got", quantised, out, bias=out[:EXPERTS])


@pytest.mark.parametrize(
    ("sizes", "strides", "overlaps"),
    [
        ((4, 5), (5, 1), False),
        ((4, 5), (4, 1), True),
        ((4, 5), (1, 4), False),
        ((3, 2), (2, 3), False),  # 0 2 4 and 3 5 7
        ((4, 2), (2, 4), True),
        ((1, 5), (0, 1), False),
        ((2, 1), (0, 1), True),
        ((0, 5), (0, 0), False),
        ((2, 3, 4), (12, 4, 1), False),
        ((2, 3, 4), (4, 8, 1), False),
        ((2, 3, 4), (2, 8, 1), True),
        ((), (), False),
        ((7,), (3,), False),
    ],
)
def test_overlaps_itself(sizes, strides, overlaps):
    x = torch.zeros(64).as_strided(sizes, strides)
    places = {sum(i * s for i, s in zip(index, strides, strict=True)) for index in torch.ones(sizes).nonzero().tolist()}
    assert (len(places) < x.numel()) == overlaps, "the case itself"
    assert checks.overlaps_itself(x) == overlaps


def mover(offset, device):
    """A copy of a tensor that begins a few elements behind a multiple of 16 bytes."""

    def moved(x):
        memory = torch.zeros(x.numel() + 8, dtype=x.dtype, device=device)
        view = memory[offset : offset + x.numel()].view(x.shape)
        assert device == "cpu" or view.data_ptr() % 16 != 0
        return view.copy_(x)

    return moved


def activations_and_scales(device):
    """a, scales and zero points of groups of 32."""
    return randn(device, M, K), torch.rand(2, N).to(DTYPE).to(device), torch.randint(0, 16, (2, N)).to(DTYPE).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_packed_weights_at_any_address(offset, device):
    """Views of codes, scales and zero points that begin at no multiple of 16 bytes give the same bits."""
    moved = mover(offset, device)
    a, scales, zeros = activations_and_scales(device)
    weight = (packed(device, 4), scales, zeros)
    for call in (minfer.w4a16_gemm, minfer.w4a16_gemm_gated):
        assert torch.equal(call(a, *map(moved, weight), group_size=32), call(a, *weight, group_size=32))
    shape = dict(n=N, k=K, group_size=32)
    assert torch.equal(minfer.w4a16_dequantize(*map(moved, weight), **shape), minfer.w4a16_dequantize(*weight, **shape))
    wide = (packed(device, 8), scales)
    assert torch.equal(minfer.w8a16_gemm(a, *map(moved, wide), group_size=32), minfer.w8a16_gemm(a, *wide, group_size=32))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_packed_experts_at_any_address(offset, device):
    require_kernels(device)
    moved = mover(offset, device)
    a, scales, zeros = activations_and_scales(device)
    experts = (packed(device, 4, EXPERTS), scales.expand(EXPERTS, -1, -1).contiguous(), zeros.expand(EXPERTS, -1, -1).contiguous())
    offsets = torch.tensor([1, M], dtype=torch.int32, device=device)
    want = minfer.grouped_w4a16_gemm(a, *experts, offsets, group_size=32)
    assert torch.equal(minfer.grouped_w4a16_gemm(a, *map(moved, experts), offsets, group_size=32), want)
    weights, ids = torch.rand(M, 2, device=device), torch.randint(0, EXPERTS, (M, 2), dtype=torch.int32, device=device)
    down = (packed(device, 4, EXPERTS), experts[1][:, :1].contiguous(), None, weights, ids)
    want = minfer.moe_ffn_w4a16(a, *experts, *down, group_size=32)
    assert torch.equal(minfer.moe_ffn_w4a16(a, *map(moved, experts), *down, group_size=32), want)
