"""Weights of 8-bit products: quantisers, loaders of checkpoints, modules, SmoothQuant. On a CPU."""

import copy

import minfer
import pytest
import torch
from minfer import nn, quantize

from tests.scaled_gemm.cases import FP8, blocks_of

FP8_MODES, INT8_MODES = ("block128", "channel", "tensor"), ("channel", "tensor")


def quantizer(dtype):
    return quantize.quantize_fp8_weight if dtype == FP8 else quantize.quantize_int8_weight


EVERY_MODE = [*((FP8, mode) for mode in FP8_MODES), *((torch.int8, mode) for mode in INT8_MODES)]


def product(x, weight):
    """In float64, of what was quantised."""
    y = x.double() @ weight.dequantize(torch.float64).t()
    return y if weight.bias is None else y + weight.bias.double()


@pytest.mark.parametrize("shape", [(192, 576), (64, 128), (300, 200), (1, 24), (129, 1)], ids=str)
@pytest.mark.parametrize("dtype, mode", EVERY_MODE, ids=str)
def test_quantize(dtype, mode, shape):
    """Every scale covers what it is of: no element is off by more than the codes' spacing. Rows are aligned; the product is theirs."""
    torch.manual_seed(sum(shape))
    w = torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]
    weight = quantizer(dtype)(w, mode, bias=torch.randn(shape[0]).bfloat16())
    n, k = shape
    if n > 1:
        assert weight.mode == mode and (weight.n, weight.k) == shape
    assert weight.weight.dtype == dtype and weight.weight.stride(0) % 16 == 0 and weight.weight.data_ptr() % 16 == 0
    lines, columns = {"block128": (128, 128), "channel": (1, k), "tensor": (n, k)}[mode]
    for i in range(0, n, lines):
        for j in range(0, k, columns):
            part = (slice(i, i + lines), slice(j, j + columns))
            off = (weight.dequantize(torch.float64)[part] - w[part].double()).abs()
            largest = w[part].double().abs().amax()
            if dtype == torch.int8:
                assert off.amax() <= 0.501 * largest / 127
            else:  # half a unit in the fourth place, or half the smallest number
                assert (off <= torch.maximum(0.0626 * w[part].double().abs(), 0.501 * 2.0**-9 * largest / 448)).all()
    x = torch.randn(2, 3, k).bfloat16()
    have = weight.gemm(x)
    want = product(x, weight)
    assert have.shape == (2, 3, n) and have.dtype == torch.bfloat16
    assert (have.double() - want).norm() <= 0.06 * want.norm()


@pytest.mark.parametrize("dtype, mode", EVERY_MODE, ids=str)
def test_nothing_but_zeros(dtype, mode):
    w = torch.zeros(130, 200)
    w[:, 150:] = 1.0
    weight = quantizer(dtype)(w, mode)
    assert torch.equal(weight.dequantize(torch.float32), w)
    assert not quantizer(dtype)(w * 0, mode).gemm(torch.randn(3, 200).half()).any()


def test_codes_of_the_preceding_operator():
    """A norm with ``input_quant`` gives what the product reads: nearly what it makes of the norm, which was rounded to 16 bits before."""
    torch.manual_seed(1)
    x = torch.randn(5, 384).bfloat16()
    for dtype, mode in EVERY_MODE:
        weight = quantizer(dtype)(torch.randn(96, 384), mode)
        norm = torch.empty_like(x)
        codes = minfer.rms_norm(x, quant=weight.input_quant, norm=norm)
        have, want = (weight.gemm(y, out_dtype=torch.float32) for y in (codes, norm))
        assert weight.gemm(codes).dtype == torch.bfloat16 and (have - want).norm() <= 0.02 * want.norm()
        smooth = weight.gemm(codes, activation="silu", out_dtype=torch.float32)
        torch.testing.assert_close(smooth, torch.nn.functional.silu(have))
    weight = quantize.quantize_fp8_weight(torch.randn(96, 384))
    assert weight.gemm(x, out_scale=torch.ones(1)).dtype == FP8
    out = torch.empty(5, 96)
    assert weight.gemm(x, out=out) is out and torch.equal(out, weight.gemm(x, out_dtype=torch.float32))
    with pytest.raises(RuntimeError, match="out_scale must be given"):
        weight.gemm(x, out_scale=torch.ones(1), out_dtype=torch.float16)


def test_static_activations():
    """One given scale; of int8 with a zero point, whose product with the weight is in the bias."""
    torch.manual_seed(2)
    x, w = torch.randn(7, 256).half() + 1.5, torch.randn(48, 256) / 16
    whole = (x.double() @ w.double().t()).norm()
    fp8 = quantize.quantize_fp8_weight(w, "tensor")
    stored = {"weight": fp8.weight, "weight_scale": fp8.scale, "input_scale": torch.tensor(0.02), "bias": torch.randn(48).half()}
    weight = quantize.from_fp8(stored)
    assert weight.input_quant == "fp8_tensor"
    q = (x.float() / 0.02).clamp(-448, 448).to(FP8)
    want = q.double() * 0.02 @ weight.dequantize(torch.float64).t() + stored["bias"].double()
    assert (weight.gemm(x).double() - want).norm() <= 1e-3 * whole
    int8 = quantize.quantize_int8_weight(w)
    for zero in (0, -57):
        for bias in (None, torch.randn(48).half()):
            stored = {
                "weight": int8.weight,
                "weight_scale": int8.scale[:, None].bfloat16(),
                "input_scale": torch.tensor([0.05]),
                "bias": bias,
            }
            stored["input_zero_point"] = torch.tensor([zero], dtype=torch.int8)
            weight = quantize.from_int8(stored)
            q = ((x.float() / 0.05).round() + zero).clamp(-128, 127)
            want = (q.double() - zero) * float(weight.input_scale) @ weight.dequantize(torch.float64).t()
            want = want if bias is None else want + bias.double()
            assert weight.scale.dtype == torch.float32 and (weight.gemm(x).double() - want).norm() <= 1e-3 * whole
            module = nn.Int8Linear.from_weight(weight, dtype=torch.float16)
            other = nn.Int8Linear(256, 48, bias is not None, static=True, zero=zero != 0, dtype=torch.float16)
            other.load_state_dict(module.state_dict())
            assert torch.equal(other(x), weight.gemm(x))


def test_loaders_of_fp8():
    """Every form of scale that published checkpoints have."""
    torch.manual_seed(3)
    n, k = 200, 320
    w = torch.randn(n, k)
    codes = {mode: quantize.quantize_fp8_weight(w, mode) for mode in FP8_MODES}
    of_blocks, channel, whole = (codes[mode] for mode in FP8_MODES)
    narrow = of_blocks.scale.bfloat16()
    exponents = torch.exp2(torch.randint(-9, -5, of_blocks.scale.shape).float()).to(torch.float8_e8m0fnu)
    forms = [  # tensors, the float64 scales of [n, k]
        (of_blocks, {"weight_scale_inv": of_blocks.scale}, of_blocks.scale),
        (of_blocks, {"weight_scale_inv": narrow}, narrow),
        (of_blocks, {"weight_scale_inv": exponents}, exponents.float()),
        (of_blocks, {"weight_scale": of_blocks.scale}, of_blocks.scale),
        (of_blocks, {"weight_scale": of_blocks.scale.view(blocks_of(n), 1, blocks_of(k), 1)}, of_blocks.scale),
        (channel, {"weight_scale": channel.scale}, channel.scale),
        (channel, {"weight_scale": channel.scale[:, None]}, channel.scale),
        (channel, {"weight_scale": channel.scale[:, None].bfloat16(), "input_scale": None}, channel.scale.bfloat16()),
        (whole, {"weight_scale": whole.scale}, whole.scale),
        (whole, {"weight_scale": whole.scale[0]}, whole.scale),
    ]
    for source, tensors, scale in forms:
        weight = quantize.from_fp8({"weight": source.weight.clone()} | tensors)
        scale = scale.double()
        if scale.dim() == 2:
            scale = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        else:
            scale = scale.view(-1, 1)
        want = source.weight.double() * scale
        assert torch.equal(weight.dequantize(torch.float64), want.float().double()) and weight.mode == source.mode
        x = torch.randn(4, k).bfloat16()
        assert (weight.gemm(x).double() - x.double() @ want.t()).norm() <= 0.06 * (x.double() @ want.t()).norm()


GOOD = {"weight": torch.ones(200, 320).to(FP8), "weight_scale_inv": torch.ones(2, 3)}
GOOD_INT8 = {"weight": torch.ones(24, 32, dtype=torch.int8), "weight_scale": torch.ones(24, 1), "input_scale": torch.ones(1)}
BAD = [
    ("from_fp8", {}, dict(weight=None), "weight must be a tensor, got NoneType"),
    ("from_fp8", {}, dict(weight=torch.ones(200, 320)), "weight must be torch.float8_e4m3fn"),
    ("from_fp8", {}, dict(weight=torch.ones(200).to(FP8)), "weight must have 2 dimensions"),
    ("from_fp8", {}, dict(weight_scale_inv=torch.ones(3, 2)), "weight_scale_inv must be [2, 3], a scale for each 128 x 128, got [3, 2]"),
    ("from_fp8", {}, dict(weight_scale_inv=torch.ones(1)), "weight_scale_inv must be [2, 3]"),
    ("from_fp8", {}, dict(weight_scale_inv=None, weight_scale=torch.ones(3, 2)), "weight_scale must be one number, [200]"),
    ("from_fp8", {}, dict(weight_scale_inv=None), "tensor 'weight_scale' is missing"),
    ("from_fp8", {}, dict(weight_scale=torch.ones(1)), "weight_scale and weight_scale_inv are both there"),
    ("from_fp8", {}, dict(weight_scale_inv=torch.full((2, 3), torch.nan)), "weight_scale_inv must be finite"),
    ("from_fp8", {}, dict(weight_scale_inv=-torch.ones(2, 3)), "weight_scale_inv must be finite in float32 and not negative"),
    ("from_fp8", {}, dict(weight_scale_inv=torch.full((2, 3), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)), "the NaN of e8m0"),
    ("from_fp8", {}, dict(input_scale=torch.ones(2)), "input_scale must be one number, got [2]"),
    ("from_fp8", {}, dict(input_scale=torch.zeros(1)), "input_scale must be positive"),
    ("from_fp8", {}, dict(bias=torch.ones(320)), "bias must be [200], got [320]"),
    ("from_fp8", dict(weight_block_size=[64, 128]), {}, "weight_block_size must be [128, 128], got [64, 128]"),
    ("from_fp8", dict(weight_block_size="128"), {}, "weight_block_size must be [128, 128]"),
    ("from_int8", {}, dict(weight=torch.ones(24, 32)), "weight must be torch.int8"),
    ("from_int8", {}, dict(weight_scale=torch.ones(24, 2)), "weight_scale must be one number, [24] or [24, 1], got [24, 2]"),
    ("from_int8", {}, dict(weight_zero_point=torch.ones(24)), "weight_zero_point must be 0"),
    ("from_int8", {}, dict(input_zero_point=torch.tensor(128)), "input_zero_point must be -128 to 127, got 128"),
    ("from_int8", {}, dict(input_zero_point=torch.tensor(3), input_scale=None), "input_zero_point is there, but no input_scale"),
]


@pytest.mark.parametrize("loader, options, tensors, message", BAD, ids=lambda x: x[:48] if isinstance(x, str) else "")
def test_malformed_checkpoints(loader, options, tensors, message):
    good = GOOD if loader == "from_fp8" else GOOD_INT8
    getattr(quantize, loader)(good)
    with pytest.raises(ValueError) as raised:
        getattr(quantize, loader)(good | tensors, **options)
    assert str(raised.value).startswith(f"{loader}: ") and message in str(raised.value)


def test_quantisers_refuse():
    w = torch.randn(16, 32)
    for call, message in (
        (lambda: quantize.quantize_fp8_weight(w, "token"), "mode must be block128, channel or tensor, got 'token'"),
        (lambda: quantize.quantize_int8_weight(w, "block128"), "mode must be channel or tensor, got 'block128'"),
        (lambda: quantize.quantize_fp8_weight(w[0]), "weight must be [n, k] and not empty, got [32]"),
        (lambda: quantize.quantize_fp8_weight(w * torch.inf), "weight must be finite"),
        (lambda: quantize.quantize_fp8_weight(w.long()), "weight must be float16"),
        (lambda: quantize.quantize_int8_weight(w, bias=torch.ones(3)), "bias must be [16]"),
        (lambda: nn.Fp8Linear(0, 3), "in_features must be a positive integer, got 0"),
        (lambda: nn.Int8Linear(3, 3, mode="block128"), "mode must be one of channel, tensor, got 'block128'"),
        (lambda: nn.Int8Linear(3, 3, zero=True), "zero must be False where activations are not static"),
        (lambda: nn.Fp8Linear.from_weight(quantize.quantize_int8_weight(w)), "weight must be a Fp8Weight, got Int8Weight"),
    ):
        with pytest.raises(ValueError) as raised:
            call()
        assert message in str(raised.value)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype, mode", EVERY_MODE, ids=str)
def test_modules(dtype, mode, bias):
    """What the layer computes, through state dicts, copies, moves and changes of type."""
    torch.manual_seed(4)
    linear = torch.nn.Linear(200, 136, bias=bias, dtype=torch.bfloat16)
    kind = nn.Fp8Linear if dtype == FP8 else nn.Int8Linear
    module = kind.from_linear(linear, mode)
    x = torch.randn(2, 3, 200).bfloat16()
    with torch.no_grad():
        want = linear(x).float()
    have = module(x)
    assert have.dtype == torch.bfloat16 and (have.float() - want).norm() <= 0.06 * want.norm()
    assert torch.equal(have, module(module.quantized_weight().quantize_input(x)))
    assert not list(module.parameters()) and module.quantized_weight().mode == mode
    target = kind(200, 136, bias, mode=mode)
    target.load_state_dict(module.state_dict())
    assert torch.equal(target(x), have) and target.weight.stride(0) == 208
    late = kind(200, 136, bias, mode=mode, device="meta").to_empty(device="cpu")
    late.load_state_dict(copy.deepcopy(module).state_dict())
    assert torch.equal(late(x), have) and late.weight.stride(0) == 208
    half = copy.deepcopy(module).half()
    assert half.weight.dtype == dtype and half.weight_scale.dtype == torch.float32 and half.dtype == torch.float16
    assert (half(x.half()).float() - want).norm() <= 0.06 * want.norm()
    assert half(half.quantized_weight().quantize_input(x)).dtype == torch.float16
    moved = kind.from_weight(module.quantized_weight().to("cpu"))
    assert torch.equal(moved(x), have)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(module, backend="eager", fullgraph=True)(x), have)


def test_modules_load_published_names():
    """DeepSeek's name, exponents of two, scales of [n, 1] and of no mode; and not codes of another type."""
    torch.manual_seed(5)
    x, w = torch.randn(3, 256).bfloat16(), torch.randn(192, 256)
    block = quantize.quantize_fp8_weight(w)
    module = nn.Fp8Linear(256, 192, False)
    module.load_state_dict({"weight": block.weight, "weight_scale_inv": block.scale})
    assert torch.equal(module(x), block.gemm(x))
    powers = torch.exp2(block.scale.log2().ceil())
    for stored in (powers.to(torch.float8_e8m0fnu), (powers.log2() + 127).to(torch.uint8)):
        module.load_state_dict({"weight": block.weight, "weight_scale": stored})
        assert module.weight_scale.dtype == torch.uint8
        assert torch.equal(module(x), quantize.from_fp8({"weight": block.weight, "weight_scale_inv": powers}).gemm(x))
    module.load_state_dict({"weight": block.weight, "weight_scale": block.scale})
    assert torch.equal(module(x), block.gemm(x))
    channel = quantize.quantize_int8_weight(w)
    module = nn.Int8Linear(256, 192, False, static=True)
    module.load_state_dict({"weight": channel.weight, "weight_scale": channel.scale[:, None], "input_scale": torch.tensor(0.03)})
    assert torch.equal(module.weight_scale, channel.scale) and float(module.input_scale) == pytest.approx(0.03)
    for state, message in (
        ({"weight": w.bfloat16(), "weight_scale": channel.scale}, "weight must be int8, got bfloat16"),
        ({"weight": channel.weight, "weight_scale": torch.ones(192, dtype=torch.uint8)}, "weight_scale must be floating-point"),
    ):
        with pytest.raises(ValueError) as raised:
            module.load_state_dict(state)
        assert message in str(raised.value)


@pytest.mark.parametrize("dtype, mode", EVERY_MODE, ids=str)
def test_gate_up(dtype, mode):
    """One weight of gate and up, each with its own scales, does what two do."""
    torch.manual_seed(8)
    n, k = 200, 320
    dense = [torch.randn(n, k) / 18, torch.randn(n, k) / 5]
    for bias in (False, True):
        gate, up = (quantizer(dtype)(w, mode, bias=torch.randn(n) if bias else None) for w in dense)
        both = quantize.gate_up_weight(gate, up)
        assert both.gated and (both.n, both.k) == (2 * n, k) and both.mode == (mode if mode != "tensor" else "channel")
        dequantized = minfer.unpack_gate_up(both.dequantize(torch.float64))
        assert all(torch.equal(have, want.dequantize(torch.float64)) for have, want in zip(dequantized, (gate, up), strict=True))
        x = torch.randn(2, 3, k).bfloat16()
        have = both.gemm(x, out_dtype=torch.float32)
        want = torch.nn.functional.silu(gate.gemm(x, out_dtype=torch.float32)) * up.gemm(x, out_dtype=torch.float32)
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)
        want = torch.nn.functional.gelu(gate.gemm(x, out_dtype=torch.float32)) * up.gemm(x, out_dtype=torch.float32)
        have = both.to("cpu").gemm(x, activation="gelu", out_dtype=torch.float32)
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)
        with pytest.raises(ValueError, match="must not be gated"):
            (nn.Fp8Linear if dtype == FP8 else nn.Int8Linear).from_weight(both)
    assert quantize.gate_up_weight(gate, gate).mode == mode


def test_gate_up_refuses():
    gate = quantize.quantize_fp8_weight(torch.randn(16, 32))
    for up, message in (
        (quantize.quantize_int8_weight(torch.randn(16, 32)), "up must be a Fp8Weight as gate is, got Int8Weight"),
        (quantize.quantize_fp8_weight(torch.randn(24, 32)), "gate and up must have one shape"),
        (quantize.quantize_fp8_weight(torch.randn(16, 32), "channel"), "scales of one mode, got block128 and channel"),
        (quantize.quantize_fp8_weight(torch.randn(16, 32), bias=torch.ones(16)), "must both have bias, or neither"),
        (quantize.gate_up_weight(gate, gate), "must not be gated themselves"),
    ):
        with pytest.raises(ValueError) as raised:
            quantize.gate_up_weight(gate, up)
        assert message in str(raised.value)
    stored = {"weight": torch.ones(16, 32, dtype=torch.int8), "weight_scale": torch.ones(16), "input_scale": torch.ones(1)}
    one, other = (quantize.from_int8(stored | {"input_zero_point": torch.tensor(zero)}) for zero in (3, 4))
    assert int(quantize.gate_up_weight(one, one).input_zero) == 3
    with pytest.raises(ValueError, match="one zero point"):
        quantize.gate_up_weight(one, other)
    larger = quantize.from_int8(stored | {"input_scale": torch.full((1,), 2.0)})
    assert float(quantize.gate_up_weight(quantize.from_int8(stored), larger).input_scale) == 2.0


def test_smoothquant():
    """The product stays what it was, and int8 codes of activations with outliers lose less."""
    torch.manual_seed(6)
    k = 128
    x = torch.randn(64, k)
    x[:, 5] *= 60
    norm, bias = torch.rand(k) + 0.5, torch.randn(k)
    norm[5] *= 60
    weights = [torch.randn(96, k) / 11, torch.randn(40, k) / 11]
    normed = torch.nn.functional.layer_norm(x, (k,))
    of = lambda n, b: normed * n + b  # noqa: E731
    scales = quantize.smoothquant_scales(of(norm, bias).abs().amax(0), weights)
    assert torch.equal(scales, of(norm, bias).abs().amax(0).sqrt() / torch.cat(weights).abs().amax(0).sqrt())
    (norm2, bias2), weights2 = quantize.migrate_scales(scales, [norm, bias], weights)
    for w, w2 in zip(weights, weights2, strict=True):
        want = of(norm, bias).double() @ w.double().t()
        torch.testing.assert_close(of(norm2, bias2).double() @ w2.double().t(), want, rtol=1e-5, atol=1e-4)
        plain = quantize.quantize_int8_weight(w).gemm(of(norm, bias).half(), out_dtype=torch.float32)
        smooth = quantize.quantize_int8_weight(w2).gemm(of(norm2, bias2).half(), out_dtype=torch.float32)
        assert (smooth - want).norm() < 0.5 * (plain - want).norm()
    assert torch.equal(quantize.smoothquant_scales(torch.zeros(k), weights), torch.ones(k))
    (gemma,), _ = quantize.migrate_scales(scales, [norm - 1], weights, weight_offset=1.0)
    torch.testing.assert_close(gemma + 1, norm2, rtol=1e-5, atol=1e-6)
    (rows,), _ = quantize.migrate_scales(scales, [torch.ones(k, 7)], weights)
    torch.testing.assert_close(rows, (1 / scales)[:, None].expand(k, 7))
    for call, message in (
        (lambda: quantize.smoothquant_scales(torch.ones(3), weights), "weights must be [n, 3]"),
        (lambda: quantize.smoothquant_scales(torch.ones(k), weights, 1.5), "strength must be 0 to 1"),
        (lambda: quantize.migrate_scales(torch.zeros(k), [norm], weights), "scales must be [k], finite and positive"),
        (lambda: quantize.migrate_scales(scales, [torch.ones(3)], weights), "previous must be [128]"),
    ):
        with pytest.raises(ValueError) as raised:
            call()
        assert message in str(raised.value)
