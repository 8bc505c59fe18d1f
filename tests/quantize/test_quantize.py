"""Quantisation, checkpoint loaders and files. Checkpoints are built here bit by bit from their documented layouts."""

import builtins

import minfer
import pytest
import torch
from minfer import quantize
from minfer.formats import weight_layout

from tests.gemm.cases import DTYPES, name_of

N, K = 48, 256
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words_along(codes, dim, order=range(8)):
    """int32 words of eight codes along ``dim``: nibble i holds the word's code number order[i]."""
    codes = codes.movedim(dim, -1).to(torch.int64)
    words = sum(codes[..., order[i] :: 8] << (4 * i) for i in range(8))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).movedim(-1, dim).contiguous()


def random_layer(groups, zero_range=(0, 16), dtype=torch.float16):
    codes = torch.randint(0, 16, (N, K))
    scales = torch.rand(groups, N).add_(0.5).mul_(0.02).to(dtype)
    zeros = torch.randint(*zero_range, (groups, N))
    return codes, scales, zeros


def formula(codes, scales, zeros, group_of_column):
    """scale * (code - zero) in 16 bits, the last step of every format's own dequantisation."""
    difference = codes - zeros[group_of_column].t()
    return difference.to(scales.dtype) * scales[group_of_column].t()


def same_weights(a, b):
    assert a.tensors().keys() == b.tensors().keys()
    assert all(torch.equal(x, b.tensors()[name]) for name, x in a.tensors().items())
    rest = [{name: x for name, x in vars(weight).items() if not isinstance(x, torch.Tensor)} for weight in (a, b)]
    assert rest[0] == rest[1]


def check_product(weight, dense):
    """The loaded weight multiplies as the checkpoint's weight does."""
    a = torch.randn(3, K).to(dense.dtype)
    truth = a.double() @ dense.double().t()
    out = weight.gemm(a).double()
    assert (out - truth).norm() / truth.norm() < torch.finfo(dense.dtype).eps


# ---- GPTQ ----------------------------------------------------------------------------------------------------------------------


def gptq_tensors(codes, scales, zeros, g_idx=None, version=1):
    stored = (zeros - 1) % 16 if version == 1 else zeros
    tensors = {"qweight": words_along(codes.t(), 0), "qzeros": words_along(stored, 1), "scales": scales}
    return tensors if g_idx is None else tensors | {"g_idx": g_idx.int()}


@pytest.mark.parametrize("group_size", [32, 128, -1])
@pytest.mark.parametrize("version", [1, 2])
def test_gptq(version, group_size):
    size = K if group_size == -1 else group_size
    codes, scales, zeros = random_layer(K // size)
    g_idx = torch.arange(K) // size
    tensors = gptq_tensors(codes, scales, zeros, g_idx, version)
    weight = quantize.from_gptq(tensors, group_size=group_size, checkpoint_format=("gptq", "gptq_v2")[version - 1])
    dense = formula(codes, scales, zeros, g_idx)
    assert weight.perm is None and weight.zeros is not None
    assert torch.equal(weight.dequantize(), dense)
    check_product(weight, dense)
    del tensors["g_idx"]
    same_weights(weight, quantize.from_gptq(tensors, group_size=group_size, checkpoint_format=("gptq", "gptq_v2")[version - 1]))


def test_gptq_bits_of_a_word():
    """A layer written out by hand: row j of a word along k is nibble j; a v1 zero is one more than stored, and 15 is 0."""
    qweight = torch.full((8, 8), 0x76543210, dtype=torch.int32)  # [k / 8, n]: codes 0 to 7 down every eight columns of W
    qzeros = torch.tensor([[0x0321_0F7, 0], [0, 0]], dtype=torch.int32)[:, :1]  # [G, n / 8]
    scales = torch.ones(2, 8).half()
    dense = quantize.from_gptq({"qweight": qweight, "qzeros": qzeros, "scales": scales}, group_size=32).dequantize()
    zeros_of_group_0 = torch.tensor([8, 0, 1, 2, 3, 4, 1, 1])
    expected = torch.arange(8).repeat(4)[None] - zeros_of_group_0[:, None]
    assert torch.equal(dense[:, :32], expected.half())
    assert torch.equal(dense[:, 32:], (torch.arange(8).repeat(4)[None] - 1).expand(8, 32).half())


def test_gptq_act_order():
    """Columns out of their groups' order: perm sorts them, and the dequantised weight is in the original order."""
    codes, scales, zeros = random_layer(4)
    g_idx = (torch.arange(K) // 64)[torch.randperm(K)]
    weight = quantize.from_gptq(gptq_tensors(codes, scales, zeros, g_idx), group_size=64, desc_act=True)
    dense = formula(codes, scales, zeros, g_idx)
    assert weight.perm.dtype == torch.int32
    assert torch.equal(weight.perm.long(), torch.argsort(g_idx, stable=True))
    assert torch.equal(weight.dequantize(), dense)
    check_product(weight, dense)


def test_gptq_symmetric():
    """Zero points that are all 8 need no tensor."""
    codes, scales, zeros = random_layer(2, (8, 9))
    weight = quantize.from_gptq(gptq_tensors(codes, scales, zeros), sym=True)
    assert weight.zeros is None
    assert torch.equal(weight.dequantize(), formula(codes, scales, zeros, torch.arange(K) // 128))
    with pytest.raises(ValueError, match="sym is set, but not all zero points are 8"):
        quantize.from_gptq(gptq_tensors(codes, scales, zeros), sym=True, checkpoint_format="gptq_v2")


def test_gptq_bias_and_dtype():
    codes, scales, zeros = random_layer(2)
    tensors = gptq_tensors(codes, scales, zeros) | {"bias": torch.randn(N).half()}
    weight = quantize.from_gptq(tensors)
    assert torch.equal(weight.bias, tensors["bias"])
    weight = quantize.from_gptq(tensors, dtype=torch.bfloat16)
    assert weight.scales.dtype == weight.zeros.dtype == weight.bias.dtype == torch.bfloat16
    assert torch.equal(weight.dequantize(), formula(codes, scales.bfloat16(), zeros, torch.arange(K) // 128))


BAD_GPTQ = {
    "missing": (lambda t: t.pop("scales"), {}, "tensor 'scales' is missing, got qweight, qzeros"),
    "bits": (lambda t: None, {"bits": 3}, "bits must be 4 or 8, got 3"),
    "group_size": (lambda t: None, {"group_size": 48}, "group_size must be -1 or a power of two >= 32, got 48"),
    "groups": (lambda t: None, {"group_size": 64}, r"scales must be \[4, 48\], got \[2, 48\]"),
    "qweight dtype": (lambda t: t.update(qweight=t["qweight"].long()), {}, "qweight must be torch.int32, got torch.int64"),
    "qzeros": (lambda t: t.update(qzeros=t["qzeros"][:, 1:]), {}, r"qzeros must be \[2, 6\], got \[2, 5\]"),
    "scales dtype": (lambda t: t.update(scales=t["scales"].float()), {}, "scales must be .*float16 or .*bfloat16, got torch.float32"),
    "format": (lambda t: None, {"checkpoint_format": "gptq_v3"}, "checkpoint_format must be gptq or gptq_v2, got 'gptq_v3'"),
    "g_idx": (lambda t: t.update(g_idx=torch.zeros(K).int()), {}, "g_idx must give each of the groups 0 to 1 its 128 columns, .* 0 to 0"),
    "desc_act": (lambda t: t.update(g_idx=1 - torch.arange(K).int() // 128), {"desc_act": False}, "desc_act is not set"),
    "no g_idx": (lambda t: None, {"desc_act": True}, "desc_act is set, but there is no g_idx"),
    "flags": (lambda t: None, {"desc_act": "GEMM"}, "desc_act must be a bool or None, got 'GEMM'"),
    "sym": (lambda t: None, {"sym": torch.tensor([4, 8])}, "sym must be a bool or None"),
    "scales of nothing": (
        lambda t: t.update(scales=t["scales"].float() * 1e-12),
        {"dtype": torch.float16},
        "scales must not all round to 0 in torch.float16",
    ),
}


@pytest.mark.parametrize("case", BAD_GPTQ)
def test_bad_gptq(case):
    change, arguments, message = BAD_GPTQ[case]
    tensors = gptq_tensors(*random_layer(2))
    quantize.from_gptq(tensors)
    change(tensors)
    with pytest.raises(ValueError, match="from_gptq: " + message):
        quantize.from_gptq(tensors, **arguments)


# ---- AWQ -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group_size", [32, 128, -1])
def test_awq(group_size):
    size = K if group_size == -1 else group_size
    codes, scales, zeros = random_layer(K // size)
    tensors = {
        "qweight": words_along(codes.t(), 1, AWQ_ORDER),
        "qzeros": words_along(zeros, 1, AWQ_ORDER),
        "scales": scales,
        "bias": torch.randn(N).half(),
    }
    weight = quantize.from_awq(tensors, group_size=group_size)
    dense = formula(codes, scales, zeros, torch.arange(K) // size)
    assert weight.qweight.shape == weight_layout.packed_shape(N, K)
    assert torch.equal(weight.bias, tensors.pop("bias"))
    assert torch.equal(weight.dequantize(), dense)
    check_product(quantize.from_awq(tensors, group_size=group_size), dense)


def test_awq_bits_of_a_word():
    """0x76543210 holds column 0 of W^T in nibble 0, column 2 in nibble 1, ..."""
    tensors = {
        "qweight": torch.full((32, 1), 0x76543210, dtype=torch.int32),
        "qzeros": torch.zeros(1, 1, dtype=torch.int32),
        "scales": torch.ones(1, 8).half(),
    }
    dense = quantize.from_awq(tensors, group_size=32).dequantize()
    assert dense[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert torch.equal(dense, dense[:, :1].expand(8, 32))


def test_bad_awq():
    tensors = {"qweight": torch.zeros(64, 2).int(), "qzeros": torch.zeros(2, 2).int(), "scales": torch.ones(2, 16).half()}
    quantize.from_awq(tensors, group_size=32)
    with pytest.raises(ValueError, match="from_awq: version must be gemm, got 'gemv'"):
        quantize.from_awq(tensors, group_size=32, version="gemv")
    with pytest.raises(ValueError, match=r"from_awq: scales must be \[1, 16\], got \[2, 16\]"):
        quantize.from_awq(tensors)
    with pytest.raises(ValueError, match="from_awq: bits must be 4, got 3"):
        quantize.from_awq(tensors, group_size=32, bits=3)


# ---- compressed-tensors --------------------------------------------------------------------------------------------------------


def compressed(values, scales, zero_points=None, g_idx=None):
    """Signed values [n, k] and zero points [G, n], stored as value + 8."""
    tensors = {
        "weight_packed": words_along(values + 8, 1),
        "weight_scale": scales.t().contiguous(),
        "weight_shape": torch.tensor(values.shape),
    }
    if zero_points is not None:
        tensors["weight_zero_point"] = words_along(zero_points.t() + 8, 0)
    return tensors if g_idx is None else tensors | {"weight_g_idx": g_idx.int()}


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("groups", [8, 2, 1])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors(symmetric, groups, dtype):
    codes, scales, zeros = random_layer(groups, dtype=dtype)
    values, zero_points = codes - 8, torch.zeros_like(zeros) if symmetric else zeros - 8
    group = torch.arange(K) // (K // groups)
    weight = quantize.from_compressed_tensors(compressed(values, scales, None if symmetric else zero_points))
    dense = formula(values, scales, zero_points, group)
    assert weight.group_size == (-1 if groups == 1 else K // groups)
    assert (weight.zeros is None) == symmetric
    assert torch.equal(weight.dequantize(), dense)
    check_product(weight, dense)


def test_compressed_tensors_act_order():
    codes, scales, zeros = random_layer(4)
    g_idx = (torch.arange(K) // 64)[torch.randperm(K)]
    dense = formula(codes - 8, scales, zeros - 8, g_idx)
    weight = quantize.from_compressed_tensors(compressed(codes - 8, scales, zeros - 8, g_idx))
    assert weight.perm is not None
    assert torch.equal(weight.dequantize(), dense)
    check_product(weight, dense)
    unused = quantize.from_compressed_tensors(compressed(codes - 8, scales, zeros - 8, torch.full((K,), -1)))
    assert unused.perm is None
    assert torch.equal(unused.dequantize(), formula(codes - 8, scales, zeros - 8, torch.arange(K) // 64))


@pytest.mark.parametrize("format", ["int-quantized", "naive-quantized"])
def test_compressed_tensors_act_order_of_bytes(format):
    scales, values = torch.rand(4, N).half() / 100, torch.randint(-128, 128, (N, K), dtype=torch.int8)
    g_idx = (torch.arange(K) // 64)[torch.randperm(K)]
    tensors = {"weight": values, "weight_scale": scales.t().contiguous(), "weight_g_idx": g_idx.int()}
    dense = (values.float() * scales.float().t()[:, g_idx]).half()
    weight = quantize.from_compressed_tensors(tensors, format=format)
    assert torch.equal(weight.dequantize(), dense) and weight.perm is not None
    unused = quantize.from_compressed_tensors(tensors | {"weight_g_idx": torch.full((K,), -1)}, format=format)
    assert unused.perm is None and not torch.equal(unused.dequantize(), dense)


def test_bad_compressed_tensors():
    tensors = compressed(*random_layer(2)[:2])
    quantize.from_compressed_tensors(tensors, group_size=128)
    with pytest.raises(ValueError, match="from_compressed_tensors: num_bits must be 4 or 8, got 3"):
        quantize.from_compressed_tensors(tensors, num_bits=3)
    with pytest.raises(ValueError, match=r"weight_scale must be \[48, 4\], got \[48, 2\]"):
        quantize.from_compressed_tensors(tensors, group_size=64)
    with pytest.raises(ValueError, match=r"weight_packed must be \[48, 33\], got \[48, 32\]"):
        quantize.from_compressed_tensors(tensors | {"weight_shape": torch.tensor([N, K + 8])}, group_size=128)
    with pytest.raises(ValueError, match="tensor 'weight_shape' is missing"):
        quantize.from_compressed_tensors({})


# ---- round to nearest ----------------------------------------------------------------------------------------------------------


def relative(weight, dense):
    return ((weight.dequantize().double() - dense.double()).norm() / dense.double().norm()).item()


def plain_error(dense, size, symmetric):
    """Rounding to nearest over each group's whole range, without clipping or rounded scales; float64."""
    groups = torch.nn.functional.pad(dense.double(), (0, -dense.shape[1] % size)).unflatten(1, (-1, size))
    if symmetric:
        scale, zero = groups.abs().amax(2, keepdim=True) / 7, 8
    else:
        low, high = groups.amin(2, keepdim=True).clamp(max=0), groups.amax(2, keepdim=True).clamp(min=0)
        scale = (high - low) / 15
        zero = (-low / scale).round()
    rounded = (((groups / scale).round() + zero).clamp(0, 15) - zero) * scale
    return ((rounded - groups).norm() / groups.norm()).item()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, 128, -1])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_clipping_beats_plain_rounding(dtype, group_size, symmetric):
    """The searched range has a smaller error than the whole one, by several per cent on normal weights."""
    dense = torch.randn(64, 1024).to(dtype)
    weight = quantize.quantize_w4(dense, group_size, symmetric)
    assert (weight.zeros is None) == symmetric
    assert weight.scales.dtype == dtype and (weight.n, weight.k, weight.group_size) == (64, 1024, group_size)
    allowed = plain_error(dense, 1024 if group_size == -1 else group_size, symmetric) * (0.97 if group_size != 32 else 1.0)
    assert relative(weight, dense) < allowed


def test_weights_on_the_grid_are_exact():
    """What 4 bits can hold comes back as it was."""
    codes = torch.randint(0, 16, (16, 256))
    codes[:, ::32] = 15  # value 7: the whole range is used
    dense = ((codes - 8) * 0.25).clamp_(min=-1.75).half()
    assert torch.equal(quantize.quantize_w4(dense, 32).dequantize(), dense)
    codes[:, 1::32] = 0
    shifted = ((codes - 3) * 0.25).half()
    assert torch.equal(quantize.quantize_w4(shifted, 32, symmetric=False).dequantize(), shifted)


def test_tails_outliers_and_zero_groups():
    dense = torch.randn(24, 200).half()
    dense[3] = 0
    dense[5, 10] = 60000.0
    for symmetric in (True, False):
        weight = quantize.quantize_w4(dense, 128, symmetric)
        back = weight.dequantize()
        assert weight.scales.shape == (2, 24)
        assert back.isfinite().all() and (back[3] == 0).all()
        assert abs(back[5, 10].item() / 60000 - 1) < 0.1
        ordinary = [row for row in range(24) if row not in (3, 5)]
        assert (back[ordinary] - dense[ordinary]).float().norm() / dense[ordinary].float().norm() < 0.13
        short = quantize.quantize_w4(dense[:, 128:], -1, symmetric).dequantize()
        assert torch.equal(back[:, 128:], short), "padding of the last group counts for nothing"


def test_rows_are_independent():
    """Large weights are searched in parts; a row's result does not depend on its neighbours."""
    dense = torch.randn(2056, 4096).half()
    weight = quantize.quantize_w4(dense, 128)
    part = quantize.quantize_w4(dense[2040:], 128)
    assert torch.equal(weight.dequantize()[2040:], part.dequantize())


def test_dtype_and_bias():
    linear = torch.nn.Linear(128, 16)
    weight = quantize.quantize_w4(linear.weight, 64, dtype=torch.bfloat16, bias=linear.bias)
    assert weight.scales.dtype == torch.bfloat16 and torch.equal(weight.bias, linear.bias)
    assert not weight.bias.requires_grad
    assert relative(weight, linear.weight.detach()) < 0.12


@pytest.mark.parametrize(
    "weight, arguments, message",
    [
        (torch.zeros(8), {}, r"weight must be \[n, k\] in multiples of 8, got \[8\]"),
        (torch.zeros(12, 64).half(), {}, r"weight must be \[n, k\] in multiples of 8, got \[12, 64\]"),
        (torch.zeros(8, 64).int(), {}, "weight must be float16, bfloat16, float32 or float64, got torch.int32"),
        (torch.zeros(8, 64), {}, "dtype must be torch.float16 or torch.bfloat16 .*, got torch.float32"),
        (torch.zeros(8, 64).half(), {"group_size": 100}, "group_size must be -1 or a power of two >= 32, got 100"),
        (torch.zeros(8, 64).half(), {"format": "int8"}, "format must be one of int4, nf4, mxfp4, nvfp4, got 'int8'"),
        (torch.full((8, 64), torch.inf).half(), {}, "weight must be finite"),
    ],
)
def test_bad_quantize(weight, arguments, message):
    with pytest.raises(ValueError, match="quantize_w4: " + message):
        quantize.quantize_w4(weight, **arguments)


# ---- W4Weight and files --------------------------------------------------------------------------------------------------------


def a_weight(perm):
    codes, scales, zeros = random_layer(2)
    g_idx = (torch.arange(K) // 128)[torch.randperm(K)] if perm else None
    tensors = gptq_tensors(codes, scales, zeros, g_idx) | ({"bias": torch.randn(N).half()} if perm else {})
    return quantize.from_gptq(tensors)


def test_weight():
    weight = a_weight(perm=True)
    a = torch.randn(2, 3, K).half()
    out = weight.gemm(a, activation="relu", c=torch.ones(N).half())
    truth = torch.relu(a.double() @ weight.dequantize().double().t() + weight.bias.double() + 1)
    torch.testing.assert_close(out.double(), truth, rtol=2e-3, atol=2e-3)
    meta = weight.to("meta")
    assert {x.device.type for x in meta.tensors().values()} == {"meta"} and len(meta.tensors()) == 5
    assert meta.dequantize().shape == (N, K)
    same_weights(weight, weight.to("cpu"))
    with pytest.raises(AttributeError):
        weight.n = 8


def test_safetensors(tmp_path):
    pytest.importorskip("safetensors")
    weights = {"model.layers.0.q_proj": a_weight(perm=True), "lm_head": quantize.quantize_w4(torch.randn(16, 64).bfloat16(), -1)}
    path = tmp_path / "weights.safetensors"
    quantize.to_safetensors(weights, path)
    loaded = quantize.from_safetensors(path)
    assert loaded.keys() == weights.keys()
    for name, weight in weights.items():
        same_weights(loaded[name], weight)


def test_safetensors_of_others(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"x": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="other.safetensors was not written by minfer"):
        quantize.from_safetensors(tmp_path / "other.safetensors")


def test_without_safetensors(tmp_path, monkeypatch):
    """One sentence says what to install."""
    original = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("safetensors"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match="pip install safetensors"):
        quantize.to_safetensors({}, tmp_path / "x")
    with pytest.raises(ImportError, match="pip install safetensors"):
        minfer.quantize.from_safetensors(tmp_path / "x")
