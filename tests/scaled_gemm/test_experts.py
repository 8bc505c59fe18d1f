"""Weights of all experts of a layer for 8-bit products: quantisers, stacks of loaded weights, what their methods compute. On a CPU."""

import minfer
import pytest
import torch
from minfer import quantize
from minfer.formats.gate_up import join_gate_up

from tests.moe.grouped_scaled_cases import LAYOUTS, off_by_norm
from tests.scaled_gemm.cases import FP8, blocks_of
from tests.scaled_gemm.test_weights import EVERY_MODE, quantizer

EXPERTS = 4


def quantizer_of_experts(dtype):
    return quantize.quantize_fp8_experts if dtype == FP8 else quantize.quantize_int8_experts


def routed(tokens, hidden, dtype=torch.bfloat16):
    """x, routing weights and ids."""
    ids = torch.rand(tokens, EXPERTS).argsort(dim=-1)[:, :2].int()
    return torch.randn(tokens, hidden).to(dtype), torch.rand(tokens, 2), ids


def layer_of(x, w13, w2, weights, ids, activation=torch.nn.functional.silu):
    """Of dense weights in float64, gate rows first."""
    out = torch.zeros(x.shape[0], w2.shape[1], dtype=torch.float64)
    for t, experts in enumerate(ids.tolist()):
        for weight, e in zip(weights[t].double(), experts, strict=True):
            gate, up = (w13[e].double() @ x[t].double()).chunk(2)
            out[t] += weight * (w2[e].double() @ (activation(gate) * up))
    return out


def halves(weight, layout):
    """Gated rows [experts, n, k] with all of the gate first."""
    order = join_gate_up(*torch.arange(weight.shape[1]).chunk(2), layout)
    return weight[:, order.argsort()]


# ---- quantisers ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", (None, *LAYOUTS))
@pytest.mark.parametrize("dtype, mode", EVERY_MODE, ids=str)
def test_quantize(dtype, mode, layout):
    """Experts are quantised as weights of their own are, and of gated ones gate and up."""
    torch.manual_seed(1)
    n, k = 272, 300
    w, bias = torch.randn(EXPERTS, n, k) * torch.logspace(-2, 2, EXPERTS)[:, None, None], torch.randn(EXPERTS, n).bfloat16()
    options = {} if layout is None else dict(gated=True, gate_layout=layout)
    weight = quantizer_of_experts(dtype)(w, mode, bias=bias, **options)
    assert (weight.experts, weight.n, weight.k, weight.mode) == (EXPERTS, n, k, mode) and weight.bias is not None
    assert weight.weight.dtype == dtype and weight.weight.stride(1) % 16 == 0 and weight.weight.data_ptr() % 16 == 0
    dense = weight.dequantize(torch.float64)
    for expert in range(EXPERTS):
        if layout is not None and mode == "block128":
            parts = halves(w[expert : expert + 1], layout)[0].chunk(2)
            want = join_gate_up(*(quantizer(dtype)(part, mode).dequantize(torch.float64) for part in parts), layout)
        else:
            want = quantizer(dtype)(w[expert], mode).dequantize(torch.float64)
        assert torch.equal(dense[expert], want), (expert, layout)
    moved = weight.to("cpu")
    assert torch.equal(moved.dequantize(torch.float64), dense) and moved.weight.stride() == weight.weight.stride()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype, mode", EVERY_MODE, ids=str)
def test_ffn(dtype, mode, layout):
    """A layer at once and step by step, from 16 bits and from codes of the preceding operator, next to that of the dense weights."""
    torch.manual_seed(2)
    hidden, inter = 256, 144
    w13, w2 = torch.randn(EXPERTS, 2 * inter, hidden) / hidden**0.5, torch.randn(EXPERTS, hidden, inter) / inter**0.5
    up = quantizer_of_experts(dtype)(w13, mode, gated=True, gate_layout=layout, bias=torch.randn(EXPERTS, 2 * inter))
    down = quantizer_of_experts(dtype)(w2, mode, bias=torch.randn(EXPERTS, hidden))
    x, weights, ids = routed(17, hidden)
    out = up.ffn(x, down, weights, ids)
    options = dict(activation="silu", gate_layout=layout, b13=up.bias.double(), b2=down.bias.double())
    truth = minfer.reference.grouped_gemm.moe_ffn(
        x.double(), up.dequantize(torch.float64), down.dequantize(torch.float64), weights.double(), ids, **options
    )
    assert out.dtype == x.dtype and off_by_norm(out, truth) <= (0.06 if dtype == FP8 else 0.03)
    codes = up.quantize_input(x)
    assert torch.equal(up.ffn(codes[0], down, weights, ids, x_scale=codes[1]), out)
    assert up.ffn(x, down, weights, ids, out_dtype=torch.float16).dtype == torch.float16

    token_index, offsets, inverse, scale = minfer.moe_sort(ids, EXPERTS, weights=weights)
    h = up.gemm(x, None, offsets, gather=token_index, activation="silu")
    assert h.dtype == x.dtype and torch.equal(h, up.gemm(*codes, offsets, gather=token_index, activation="silu", out_dtype=x.dtype))
    steps = minfer.moe_combine(down.gemm(h, None, offsets, row_scale=scale), inverse)
    assert off_by_norm(steps, truth) <= (0.06 if dtype == FP8 else 0.03)
    norm = minfer.rms_norm(x, quant=up.input_quant)
    assert up.gemm(*norm, offsets, gather=token_index).dtype == torch.bfloat16
    slabs, counts = torch.randn(EXPERTS, 5, hidden).half(), torch.tensor([5, 0, 3, 1], dtype=torch.int32)
    have = up.gemm_masked(slabs, None, counts)
    inside = torch.arange(5)[None, :] < counts[:, None]
    want = up.gemm(slabs[inside], None, counts.cumsum(0).int())
    assert have.dtype == torch.float16 and torch.equal(have[inside], want) and not have[~inside].any()


# ---- stacks --------------------------------------------------------------------------------------------------------------------------


def checkpoints(kind, n, k, experts=EXPERTS):
    """Tensors of a linear layer of each expert, as files have them."""
    found = []
    for expert in range(experts):
        w = torch.randn(n, k) * 1.5**expert / k**0.5
        int8 = kind.startswith("int8")
        mode = {"deepseek": "block128", "exponents": "block128", "modelopt": "tensor", "int8_tensor": "tensor"}.get(kind, "channel")
        weight = quantizer(torch.int8 if int8 else FP8)(w, mode)
        tensors = {"weight": weight.weight}
        if kind == "exponents":
            tensors["weight_scale_inv"] = torch.exp2(weight.scale.log2().ceil()).to(torch.float8_e8m0fnu)
        elif kind == "deepseek":
            tensors["weight_scale_inv"] = weight.scale
        elif kind == "modelopt":
            tensors |= {"weight_scale": weight.scale[0], "input_scale": torch.tensor(0.01 + 0.01 * expert)}
        else:
            tensors["weight_scale"] = weight.scale if weight.scale.numel() == 1 else weight.scale[:, None].bfloat16()
        found.append(tensors)
    return found


def load(kind, n, k):
    loader = quantize.from_int8 if kind.startswith("int8") else quantize.from_fp8
    return [loader(tensors) for tensors in checkpoints(kind, n, k)]


KINDS = ("deepseek", "exponents", "compressed-tensors", "modelopt", "int8_channel", "int8_tensor")


@pytest.mark.parametrize("kind", KINDS)
def test_stack(kind):
    """Gate, up and down projections of every kind of checkpoint: codes and scales are what they were, and a layer of them is that of the
    dense weights."""
    torch.manual_seed(3)
    hidden, inter = 320, 200
    gates, ups, downs = load(kind, inter, hidden), load(kind, inter, hidden), load(kind, hidden, inter)
    w13, w2 = quantize.stack_scaled_experts(gates, ups), quantize.stack_scaled_experts(downs)
    assert w13.gated and w13.gate_layout == "halves" and (w13.experts, w13.n, w13.k) == (EXPERTS, 2 * inter, hidden)
    assert not w2.gated and w2.weight.stride(1) % 16 == 0
    assert w13.mode == {"modelopt": "channel", "int8_tensor": "channel"}.get(kind, gates[0].mode) and w2.mode == downs[0].mode
    both = [torch.cat([gate.dequantize(torch.float64), up.dequantize(torch.float64)]) for gate, up in zip(gates, ups, strict=True)]
    assert torch.equal(w13.dequantize(torch.float64), torch.stack(both))
    assert torch.equal(w2.dequantize(torch.float64), torch.stack([down.dequantize(torch.float64) for down in downs]))
    if kind in ("deepseek", "exponents"):
        assert w13.scale.shape == (EXPERTS, 2 * blocks_of(inter), blocks_of(hidden)) and w13.scale.dtype == gates[0].scale.dtype
    x, weights, ids = routed(9, hidden)
    truth = layer_of(x, w13.dequantize(torch.float64), w2.dequantize(torch.float64), weights, ids)
    assert off_by_norm(w13.ffn(x, w2, weights, ids), truth) <= (0.06 if w13.weight.dtype == FP8 else 0.03)
    if kind == "modelopt":  # static activations: the largest scale for all experts
        assert w13.input_quant == "fp8_tensor" and float(w13.input_scale) == pytest.approx(0.04)
        q, scale = w13.quantize_input(x)
        assert scale is w13.input_scale and torch.equal(w13.ffn(q, w2, weights, ids, x_scale=scale), w13.ffn(x, w2, weights, ids))
    else:
        assert w13.input_scale is None


def test_stack_of_one_scale_each():
    """Gate and up of one scale keep it; of one weight for each expert, too."""
    weights = [quantize.quantize_fp8_weight(torch.randn(32, 64), "tensor") for _ in range(3)]
    assert quantize.stack_scaled_experts(weights, weights).scale.shape == (3,)
    alone = quantize.stack_scaled_experts(weights, gated=True, gate_layout="alternating")
    assert alone.scale.shape == (3,) and alone.gated and alone.gate_layout == "alternating" and alone.mode == "tensor"


@pytest.mark.parametrize("dtype, mode", EVERY_MODE, ids=str)
def test_stack_of_packed_weights(dtype, mode):
    """Weights of gate_up_weight, whose rows are in blocks of 8, and biases of different types."""
    torch.manual_seed(4)
    parts = [[quantizer(dtype)(torch.randn(136, 160), mode, bias=torch.randn(136)) for _ in range(2)] for _ in range(3)]
    packed = quantize.stack_scaled_experts([quantize.gate_up_weight(*pair) for pair in parts])
    plain = quantize.stack_scaled_experts(*map(list, zip(*parts, strict=True)))
    assert packed.gated and packed.gate_layout == "blocks" and plain.gate_layout == "halves"
    assert torch.equal(halves(packed.dequantize(torch.float64), "blocks"), plain.dequantize(torch.float64))
    assert torch.equal(halves(packed.bias[..., None], "blocks")[..., 0], plain.bias)
    x, offsets = torch.randn(7, 160).bfloat16(), torch.tensor([2, 2, 7], dtype=torch.int32)
    torch.testing.assert_close(packed.gemm(x, None, offsets), plain.gemm(x, None, offsets))


def test_blocks_across_gate_and_up():
    """A checkpoint's stacked w13 has blocks of its own for gate and up where these are multiples of 128 rows."""
    fused = [quantize.quantize_fp8_weight(torch.randn(256, 200)) for _ in range(2)]
    weight = quantize.stack_scaled_experts(fused, gated=True)
    assert weight.scale.shape == (2, 2, 2) and weight.mode == "block128"
    assert torch.equal(weight.dequantize(torch.float64), torch.stack([w.dequantize(torch.float64) for w in fused]))
    with pytest.raises(
        ValueError, match="scales of blocks need gate_layout halves, with a multiple of 128 rows in each, got halves of 100"
    ):
        quantize.stack_scaled_experts([quantize.quantize_fp8_weight(torch.randn(200, 200))], gated=True)
    with pytest.raises(ValueError, match="scales of blocks need gate_layout halves"):
        quantize.stack_scaled_experts(fused, gated=True, gate_layout="alternating")


# ---- what is refused -----------------------------------------------------------------------------------------------------------------


def test_stacks_that_cannot_be_right():
    fp8 = lambda n=32, k=64, mode="channel", **o: quantize.quantize_fp8_weight(torch.randn(n, k), mode, **o)  # noqa: E731
    int8 = quantize.quantize_int8_weight(torch.randn(32, 64))
    static = {"weight": int8.weight, "weight_scale": int8.scale, "input_scale": torch.ones(1)}
    zero = quantize.from_int8(static | {"input_zero_point": torch.tensor(3)})
    packed = quantize.gate_up_weight(fp8(), fp8())
    for call, message in (
        (lambda: quantize.stack_scaled_experts([]), "there must be 1 to 512 experts, got 0"),
        (
            lambda: quantize.stack_scaled_experts([fp8(), torch.ones(3)]),
            "weights must be Fp8Weights or Int8Weights, got Tensor as weight 1",
        ),
        (
            lambda: quantize.stack_scaled_experts([fp8(), int8]),
            "weights must have the same kind, got Fp8Weight and, of weight 1, Int8Weight",
        ),
        (lambda: quantize.stack_scaled_experts([fp8(), fp8(48)]), "weights must have the same n, got 32 and, of weight 1, 48"),
        (lambda: quantize.stack_scaled_experts([fp8(), fp8(mode="tensor")]), "weights must have the same mode, got channel"),
        (lambda: quantize.stack_scaled_experts([fp8(), fp8(bias=torch.ones(32))]), "weights must have the same bias"),
        (lambda: quantize.stack_scaled_experts([int8, quantize.from_int8(static)]), "weights must have the same input_scale"),
        (lambda: quantize.stack_scaled_experts([zero]), "weight 0 has a zero point of activations"),
        (lambda: quantize.stack_scaled_experts([fp8()], [fp8(), fp8()]), "up must have as many experts as weights, 1, got 2"),
        (lambda: quantize.stack_scaled_experts([fp8()], [fp8()], gated=True), "gated must be False where up is given"),
        (lambda: quantize.stack_scaled_experts([packed], [packed]), "weights must not be gated where up is given"),
        (lambda: quantize.stack_scaled_experts([packed], gated=True), "gated must be False where weights are gated themselves"),
        (lambda: quantize.stack_scaled_experts([fp8(24)], gated=True, gate_layout="blocks"), "must be a multiple of 16 together, got 24"),
        (lambda: quantize.stack_scaled_experts([fp8()], gate_layout="blocks"), "gate_layout blocks needs gated = True"),
    ):
        with pytest.raises(ValueError) as raised:
            call()
        assert str(raised.value).startswith("stack_scaled_experts: ") and message in str(raised.value), raised.value


def test_quantisers_refuse():
    w = torch.randn(3, 16, 32)
    for call, message in (
        (lambda: quantize.quantize_fp8_experts(w[0]), "quantize_fp8_experts: weight must be [experts, n, k] and not empty, got [16, 32]"),
        (lambda: quantize.quantize_fp8_experts(w[:, :0]), "weight must be [experts, n, k] and not empty, got [3, 0, 32]"),
        (lambda: quantize.quantize_fp8_experts(w, "token"), "mode must be block128, channel or tensor, got 'token'"),
        (lambda: quantize.quantize_int8_experts(w, "block128"), "quantize_int8_experts: mode must be channel or tensor, got 'block128'"),
        (lambda: quantize.quantize_fp8_experts(w * torch.inf), "weight must be finite"),
        (lambda: quantize.quantize_fp8_experts(w.long()), "weight must be float16"),
        (lambda: quantize.quantize_fp8_experts(w, bias=torch.ones(16)), "bias must be [3, 16]"),
        (lambda: quantize.quantize_fp8_experts(w, gate_layout="alternating"), "gate_layout alternating needs gated = True"),
        (lambda: quantize.quantize_fp8_experts(w, gated=True, gate_layout="rows"), "gate_layout must be one of halves"),
        (lambda: quantize.quantize_fp8_experts(w[:, :15], gated=True), "gate and up rows must be a multiple of 2 together, got 15"),
    ):
        with pytest.raises(ValueError) as raised:
            call()
        assert message in str(raised.value), raised.value


def test_layers_that_cannot_be_right():
    x, weights, ids = routed(3, 32)
    up, down = (quantize.quantize_fp8_experts(torch.randn(EXPERTS, 32, 32), gated=gated) for gated in (True, False))
    for call, message in (
        (lambda: down.ffn(x, down, weights, ids), "ffn: w13 must be gated and down must not be, got False and False"),
        (lambda: up.ffn(x, up, weights, ids), "ffn: w13 must be gated and down must not be, got True and True"),
        (
            lambda: up.ffn(x, quantize.quantize_int8_experts(torch.randn(EXPERTS, 32, 32)), weights, ids),
            "ffn: down must have codes of the type",
        ),
    ):
        with pytest.raises(ValueError) as raised:
            call()
        assert message in str(raised.value)
