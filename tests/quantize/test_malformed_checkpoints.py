"""Checkpoints that cannot be right: loaders answer with a ValueError that has their name, or with the weight that the format's definition
says; never with another exception, never with another weight.

Each case is a good checkpoint and a definition of what its tensors mean, written from the documentation of formats in float64. Every tensor
is dropped, replaced by something else, given every other dtype and many other shapes; every option and every field of a text gets numbers,
types and texts that it may or may not be. Where the loader takes that, the definition, given the same, must say the same weight.
"""

import json
import math
from dataclasses import dataclass, field

import pytest
import torch
from minfer import quantize
from minfer.formats import weight_formats

from tests.moe.grouped_quantized_cases import gpt_oss
from tests.quantize.test_formats import bytes_along, fp4_bytes, json_tensor
from tests.quantize.test_quantize import AWQ_ORDER, compressed, gptq_tensors, words_along
from tests.quantized_gemm.weight_format_cases import e2m1, e4m3, e8m0

N, K = 16, 128
NF4_STATE = "weight.quant_state.bitsandbytes__nf4"
DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
SCALARS = (
    0,
    -1,
    1,
    3,
    4,
    8,
    16,
    32,
    64,
    128,
    256,
    48,
    2**31,
    2**62,
    2**63,
    2**100,
    32.0,
    math.nan,
    math.inf,
    "",
    "x",
    "4",
    True,
    [],
    {},
    None,
)


# ---- definitions ---------------------------------------------------------------------------------------------------------------


def fields_of(words, bits, dim, order=None):
    """Unsigned fields of ``bits`` bits along ``dim`` of int32 words; ``order``: which of a word's columns each field holds."""
    per = 32 // bits
    found = [(words.long() >> (bits * i)) & (2**bits - 1) for i in range(per)]
    if order is not None:
        found = [found[list(order).index(i)] for i in range(per)]
    return torch.stack(found, dim + 1).flatten(dim, dim + 1)


def in_16_bits(x, dtype):
    return x.to(dtype or x.dtype).double()


def group_of(k, group_size):
    return torch.zeros(k, dtype=torch.long) if group_size == -1 else torch.arange(k) // group_size


def affine(codes, scales, zeros, group):
    """[n, k] of codes [n, k], and scales and zeros [G, n]."""
    return (codes - zeros[group].t()) * scales[group].t()


def gptq(t, *, group_size=128, bits=4, sym=None, desc_act=None, checkpoint_format="gptq", dtype=None):
    codes, zeros = fields_of(t["qweight"], bits, 0).t(), fields_of(t["qzeros"], bits, 1)
    zeros = (zeros + 1) % 2**bits if checkpoint_format == "gptq" else zeros
    g_idx = t.get("g_idx")
    group = group_of(codes.shape[1], group_size) if g_idx is None or g_idx.numel() == 0 else g_idx.long()
    assert not sym or (zeros == 2 ** (bits - 1)).all()
    assert desc_act is not False or bool((group == group_of(codes.shape[1], group_size)).all())
    return affine(codes, in_16_bits(t["scales"], dtype), zeros, group)


def awq(t, *, group_size=128, bits=4, version="gemm", dtype=None):
    assert bits == 4 and version == "gemm"
    codes, zeros = (fields_of(t[name], 4, 1, AWQ_ORDER) for name in ("qweight", "qzeros"))
    return affine(codes.t(), in_16_bits(t["scales"], dtype), zeros, group_of(codes.shape[0], group_size))


def compressed_tensors(t, *, format="pack-quantized", group_size=None, num_bits=None, dtype=None):
    if format == "pack-quantized":
        bits = num_bits or 4
        n, k = t["weight_shape"].tolist()
        values = fields_of(t["weight_packed"], bits, 1)[:, :k] - 2 ** (bits - 1)
        scale, zero = in_16_bits(t["weight_scale"], dtype), torch.zeros(t["weight_scale"].shape)
        if t.get("weight_zero_point") is not None:
            zero = fields_of(t["weight_zero_point"], bits, 0)[:n] - 2 ** (bits - 1)
        group = torch.arange(k) // (group_size if group_size not in (None, -1) else k // scale.shape[1])
        g_idx = t.get("weight_g_idx")
        group = group if g_idx is None or (g_idx == -1).all() else g_idx.long()
        assert values.shape == (n, k)
        return affine(values, scale.t(), zero.t(), group)
    if "fp4" in format:
        packed = t["weight_packed"].view(torch.uint8)
        values = e2m1(torch.stack((packed & 15, packed >> 4), -1).flatten(1))
        if format.startswith("mxfp4"):
            return values * e8m0(t["weight_scale"].view(torch.uint8)).repeat_interleave(32, 1)
        return values * e4m3(t["weight_scale"].view(torch.uint8)).repeat_interleave(16, 1) / t["weight_global_scale"].double().reshape(())
    assert num_bits in (None, 8) and t["weight"].dtype in (torch.int8, torch.float8_e4m3fn)
    assert {"int-quantized": torch.int8, "float-quantized": torch.float8_e4m3fn}.get(format, t["weight"].dtype) == t["weight"].dtype
    values, scale = t["weight"].double(), t["weight_scale"]
    n, k = values.shape
    zero = t.get("weight_zero_point")
    zero = torch.zeros(()).double() if zero is None else zero.double()
    scale = scale.double() if scale.numel() == 1 else in_16_bits(scale, dtype)

    def columns(x):
        return x.reshape(1, 1) if x.numel() == 1 else x.reshape(n, -1).repeat_interleave(k // (x.numel() // n), 1)

    return (values - columns(zero)) * columns(scale)


def bitsandbytes(t, *, dtype=None):
    state = json.loads(bytes(t[NF4_STATE].tolist()))
    assert state["quant_type"] == "nf4"
    packed = t["weight"].contiguous().flatten().view(torch.uint8)
    values = torch.tensor(weight_formats.NF4).double()[torch.stack((packed >> 4, packed & 15), -1).flatten().long()]
    absmax = t["weight.absmax"].flatten()
    if absmax.dtype == torch.uint8:
        outer = t["weight.nested_absmax"].double()[torch.arange(len(absmax)) // state["nested_blocksize"]]
        absmax = t["weight.nested_quant_map"].double()[absmax.long()] * outer + state["nested_offset"]
    absmax = absmax.double().to(dtype or getattr(torch, state["dtype"])).double()
    return (values * absmax.repeat_interleave(state["blocksize"])).view(state["shape"])


def mxfp4(t):
    blocks = t["blocks"].view(torch.uint8)
    values = e2m1(torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2))
    return (values * e8m0(t["scales"].view(torch.uint8))[..., None]).flatten(-2)


def from_gpt_oss(t):
    gate_up, down = ({name: t[f"{part}_{name}"] for name in ("blocks", "scales")} for part in ("gate_up_proj", "down_proj"))
    return mxfp4(gate_up), mxfp4(down)


# ---- cases ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    loader: str
    tensors: dict
    truth: object
    options: dict = field(default_factory=dict)

    def load(self, tensors, options):
        return getattr(quantize, self.loader)(tensors, **options)


def layer(groups, bits=4, zeros=True, dtype=torch.float16):
    codes = torch.randint(0, 2**bits, (N, K))
    usual = torch.full((groups, N), 2 ** (bits - 1))
    return codes, torch.rand(groups, N).add_(0.5).mul_(0.02).to(dtype), torch.randint(0, 2**bits, (groups, N)) if zeros else usual


def gptq_case(bits, group_size, act_order, **options):
    codes, scales, zeros = layer(1 if group_size == -1 else K // group_size, bits, zeros=not options.get("sym"))
    group = group_of(K, group_size)[torch.randperm(K) if act_order else torch.arange(K)]
    if bits == 4:
        tensors = gptq_tensors(codes, scales, zeros, group)
    else:
        tensors = {
            "qweight": bytes_along(codes.t(), 0),
            "qzeros": bytes_along((zeros - 1) % 256, 1),
            "scales": scales,
            "g_idx": group.int(),
        }
    tensors["bias"] = torch.randn(N).half()
    named = {"group_size": group_size, "bits": bits, "sym": None, "desc_act": None, "checkpoint_format": "gptq", "dtype": None}
    return Case("from_gptq", tensors, gptq, named | options)


def awq_case(group_size, **options):
    codes, scales, zeros = layer(1 if group_size == -1 else K // group_size)
    tensors = {"qweight": words_along(codes.t(), 1, AWQ_ORDER), "qzeros": words_along(zeros, 1, AWQ_ORDER), "scales": scales}
    named = {"group_size": group_size, "bits": 4, "version": "gemm", "dtype": None}
    return Case("from_awq", tensors | {"bias": torch.randn(N).bfloat16()}, awq, named | options)


def packed_case(bits, groups, act_order, **options):
    codes, scales, zeros = layer(groups, bits)
    if bits == 4:
        tensors = compressed(codes - 8, scales, zeros - 8)
    else:
        tensors = {"weight_packed": bytes_along(codes, 1), "weight_scale": scales.t().contiguous(), "weight_shape": torch.tensor([N, K])}
        tensors["weight_zero_point"] = bytes_along(zeros.t(), 0)
    if act_order:
        tensors["weight_g_idx"] = (torch.arange(K) // (K // groups))[torch.randperm(K)].int()
    tensors["bias"] = torch.randn(N)
    named = {"format": "pack-quantized", "group_size": None, "num_bits": bits, "dtype": None}
    return Case("from_compressed_tensors", tensors, compressed_tensors, named | options)


def bytes_case(format, scale_shape, zero, **options):
    weight = torch.randint(-128, 128, (N, K)).to(torch.int8) if "int" in format else torch.randn(N, K).mul_(50).to(torch.float8_e4m3fn)
    tensors = {"weight": weight, "weight_scale": torch.rand(scale_shape).add_(0.5).mul_(0.01).bfloat16(), "bias": torch.randn(N).bfloat16()}
    if zero:
        tensors["weight_zero_point"] = torch.randint(-128, 128, scale_shape).to(torch.int8)
    named = {"format": format, "group_size": None, "num_bits": None, "dtype": None}
    return Case("from_compressed_tensors", tensors, compressed_tensors, named | options)


def fp4_case(name):
    tensors = {"weight_packed": fp4_bytes(torch.randint(0, 16, (N, K))), "bias": torch.randn(N).half()}
    if name == "nvfp4":
        tensors |= {"weight_scale": torch.rand(N, K // 16).mul_(400).to(torch.float8_e4m3fn), "weight_global_scale": torch.tensor([4096.0])}
    else:
        tensors["weight_scale"] = torch.randint(115, 130, (N, K // 32)).to(torch.uint8)
    named = {"format": f"{name}-pack-quantized", "group_size": None, "num_bits": None, "dtype": None}
    return Case("from_compressed_tensors", tensors, compressed_tensors, named)


def nf4_case(nested, **options):
    size = 64
    count = N * K // size
    state = {"quant_type": "nf4", "blocksize": size, "dtype": "bfloat16", "shape": [N, K]}
    tensors = {"weight": torch.randint(0, 256, (N * K // 2, 1)).byte(), "weight.quant_map": torch.tensor(weight_formats.NF4)}
    if nested:
        tensors |= {"weight.absmax": torch.randint(0, 256, (count,)).byte(), "weight.nested_quant_map": torch.rand(256) - 0.5}
        tensors["weight.nested_absmax"] = torch.rand(-(-count // 16)) + 0.1
        state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": 0.875}
    else:
        tensors["weight.absmax"] = torch.rand(count) + 0.5
    return Case(
        "from_bitsandbytes", tensors | {NF4_STATE: json_tensor(state), "bias": torch.randn(N)}, bitsandbytes, {"dtype": None} | options
    )


def mxfp4_case(*experts):
    blocks = torch.randint(0, 256, (*experts, N, K // 32, 16)).byte()
    scales = torch.randint(115, 130, (*experts, N, K // 32)).byte()
    return Case("from_mxfp4", {"blocks": blocks, "scales": scales, "bias": torch.randn(*experts, N).bfloat16()}, mxfp4)


CASES = {
    "gptq": lambda: gptq_case(4, 32, False),
    "gptq act-order": lambda: gptq_case(4, 32, True),
    "gptq one group": lambda: gptq_case(4, -1, False),
    "gptq sym": lambda: gptq_case(4, 64, False, sym=True, desc_act=False),
    "gptq 8 bits": lambda: gptq_case(8, 64, True, dtype=torch.bfloat16),
    "awq": lambda: awq_case(32),
    "awq one group": lambda: awq_case(-1, dtype=torch.bfloat16),
    "pack-quantized": lambda: packed_case(4, 4, False),
    "pack-quantized act-order": lambda: packed_case(4, 2, True, group_size=64),
    "pack-quantized 8 bits": lambda: packed_case(8, 1, False, dtype=torch.bfloat16),
    "int-quantized groups": lambda: bytes_case("int-quantized", (N, 4), True),
    "int-quantized channels": lambda: bytes_case("int-quantized", (N,), True),
    "int-quantized": lambda: bytes_case("int-quantized", (), True, dtype=torch.float16),
    "float-quantized channels": lambda: bytes_case("float-quantized", (N, 1), False),
    "float-quantized": lambda: bytes_case("naive-quantized", (1,), False),
    "nvfp4": lambda: fp4_case("nvfp4"),
    "mxfp4 compressed": lambda: fp4_case("mxfp4"),
    "nf4": lambda: nf4_case(False),
    "nf4 nested": lambda: nf4_case(True, dtype=torch.float16),
    "mxfp4": lambda: mxfp4_case(),
    "mxfp4 experts": lambda: mxfp4_case(2),
    "gpt-oss": lambda: Case("from_gpt_oss", gpt_oss(2, 64, 32)[0], from_gpt_oss),
}


# ---- mutations -----------------------------------------------------------------------------------------------------------------


def as_bytes(function, *tensors):
    """A function of tensors, for types that few operations know: 8-bit floats."""
    (x, *_) = tensors
    return function(*(t.view(torch.uint8) for t in tensors)).view(x.dtype) if x.element_size() == 1 else function(*tensors)


def shapes_of(x):
    """What else a tensor's shape may be, by name."""
    yield "flattened", x.flatten()
    yield "in a list", x[None]
    yield "of lists", x[..., None]
    yield "no element", x.flatten()[:0]
    yield "one element", x.flatten()[:1]
    yield "one number", x.flatten()[:1].reshape(())
    for dim in range(x.dim()):
        size = x.shape[dim]
        for what, length in (("emptied", 0), ("one", 1), ("shorter", size - 1), ("half", size // 2)):
            yield f"{dim} {what}", x.narrow(dim, 0, length)
        for what, more in (("longer", 1), ("twice", size)):
            yield f"{dim} {what}", as_bytes(lambda *parts: torch.cat(parts, dim), x, x.narrow(dim, 0, more))  # noqa: B023
    if x.dim() >= 2:
        yield "transposed", x.mT


def values_of(x):
    if x.dtype.is_floating_point and x.element_size() > 1:
        for value in (0.0, -1.0, 1e-30, 1e30, math.inf, math.nan):
            yield f"all {value}", torch.full(x.shape, value).to(x.dtype)
    elif x.dtype in (torch.int32, torch.int64):
        for value in (-1, 0, 1, 2**31 - 1, -(2**31)):
            yield f"all {value}", torch.full_like(x, value)
            changed = x.clone()
            changed.view(-1)[-1] = value
            yield f"one {value}", changed


def tensor_mutations(x):
    for dtype in DTYPES:
        if dtype != x.dtype:
            try:
                yield f"{dtype}", x.to(dtype)
            except RuntimeError:  # torch has no such conversion
                continue
    yield from shapes_of(x)
    yield from values_of(x)
    yield "None", None
    yield "a list", x.tolist()
    yield "a number", 4
    yield "a text", "x"
    yield "meta", x.to("meta")
    if x.dtype == torch.float32:
        yield "sparse", x.to_sparse()
    yield "strided", as_bytes(lambda t: torch.stack((t, t), -1)[..., 0], x)


def text_mutations(x):
    """Of a JSON text: no text, no object, every field dropped and with every scalar."""
    state = json.loads(bytes(x.tolist()))
    for text in (b"", b"{", b"[]", b"1", b"null", b"\xff\xfe", b'"x"', b"[" * 100000, b"{}"):
        yield f"text {text[:8]!r}", torch.tensor(list(text), dtype=torch.uint8)
    for name in state:
        yield f"{name} dropped", json_tensor({key: value for key, value in state.items() if key != name})
        for value in SCALARS:
            yield f"{name} = {value!r}", json_tensor(state | {name: value})
    for shape in (
        [N],
        [N, K, 1],
        [0, K],
        [N, 0],
        [-N, -K],
        [N / 1, K],
        [str(N), K],
        [2 * N, K // 2],
        [N // 2, 2 * K],
        [N * K, 1],
        [2**40, 2**40],
    ):
        yield f"shape = {shape}", json_tensor(state | {"shape": shape})


def mutations(case):
    for name, x in case.tensors.items():
        without = {key: value for key, value in case.tensors.items() if key != name}
        yield f"{name} dropped", without, case.options
        found = list(tensor_mutations(x)) + (list(text_mutations(x)) if name == NF4_STATE else [])
        for what, mutated in found:
            yield f"{name}: {what}", case.tensors | {name: mutated}, case.options
    yield "no tensors", {}, case.options
    yield "no mapping", list(case.tensors), case.options
    yield "tensors of another name", {f"model.{name}": x for name, x in case.tensors.items()}, case.options
    for name, value in case.options.items():
        for other in (*SCALARS, torch.float32, torch.bfloat16, "gptq_v2", "gemv", "int-quantized", "nvfp4-pack-quantized"):
            if type(other) is not type(value) or other != value:
                yield f"{name} = {other!r}", case.tensors, case.options | {name: other}


def dense_of(result):
    """All weights that a loader returned, in float64, in their own order of rows."""
    if isinstance(result, tuple):  # gpt-oss: gate and up rows alternate in the file
        gate_up, down = (x.dequantize().double() for x in result)
        blocks = gate_up.unflatten(1, (-1, 2, 8))
        return blocks.movedim(3, 2).flatten(1, 3), down
    if isinstance(result, list):
        return torch.stack([x.dequantize().double() for x in result]) if result else torch.zeros(0)
    return result.dequantize().double()


def same(have, want):
    if isinstance(have, tuple):
        return all(map(same, have, want))
    if have.shape != want.shape:
        return have.numel() == want.numel() == 0 or (have.shape[1:] == want.shape[-2:] and same(have, want.reshape(have.shape)))
    unit = torch.finfo(torch.bfloat16).eps
    close = (have - want).abs() <= unit * want.abs() + 2.0**-24
    overflows = want.abs() > torch.finfo(torch.float16).max * (1 - 2.0**-11)  # in the 16 bits of dequantize
    return bool((close | (have == want) | (have.isnan() & want.isnan()) | overflows).all())


def result_of(call, *arguments):
    """What a call gives, or its exception."""
    try:
        return call(*arguments)
    except Exception as error:  # noqa: BLE001  the kind of it is what is asked
        return error


def biases_of(result):
    weights = result if isinstance(result, (tuple, list)) else [result]
    return [w.bias for w in weights]


@pytest.mark.parametrize("name", CASES)
def test_every_mutation(name):
    case = CASES[name]()
    good = case.load(case.tensors, case.options)
    assert same(dense_of(good), case.truth(case.tensors, **case.options)), "the case itself"
    wrong, taken, refused = [], 0, 0
    for what, tensors, options in mutations(case):
        result = result_of(case.load, tensors, options)
        if isinstance(result, Exception):
            refused += 1
            message = str(result)
            if type(result) is not ValueError or not message.startswith(f"{case.loader}: "):
                wrong.append(f"{what}: {type(result).__name__}: {message[:200]}")
            elif not any(word in message for word in ("got", "missing", "is set", "is not set")):
                wrong.append(f"{what}: does not say what it is: {message[:200]}")
            continue
        taken += 1
        want = result_of(lambda: case.truth(tensors, **options))  # noqa: B023
        if isinstance(want, Exception):
            wrong.append(f"{what}: taken, but its definition has no answer: {type(want).__name__}: {str(want)[:100]}")
        elif not same(dense_of(result), want):
            wrong.append(f"{what}: taken as another weight")
        for bias in biases_of(result):
            if "bias" in tensors and tensors["bias"] is not None and (bias is None or bias.shape[-1] != N):
                wrong.append(f"{what}: a bias of {None if bias is None else list(bias.shape)}")
    assert not wrong, f"{len(wrong)} of {taken + refused}:\n" + "\n".join(wrong)
    assert taken > 3 and refused > 40, (taken, refused)


# ---- files ---------------------------------------------------------------------------------------------------------------------


def test_every_mutation_of_a_file(tmp_path):
    """Weights of every kind that to_safetensors wrote, each tensor and each number of them changed."""
    package = pytest.importorskip("safetensors.torch")
    path, perm = tmp_path / "weights.safetensors", torch.randperm(K).int()
    dense, bias = torch.randn(N, K).half(), torch.randn(N).half()
    linear = quantize.quantize_w4(dense, 32, symmetric=False, bias=bias)
    weights = {
        "minfer.w4a16": type(linear)(**vars(linear) | {"perm": perm}),
        "minfer.w8a16": quantize.quantize_w8(dense, format="fp8_e4m3", bias=bias),
        "minfer.w4a16_experts": quantize.quantize_w4_experts(dense.expand(2, N, K), format="nvfp4", gated=True, bias=bias.expand(2, N)),
    }
    quantize.to_safetensors({"w": weights["minfer.w4a16"]}, path)
    wrong, taken, refused = [], 0, 0

    def attempt(what, key, weight, tensors, metadata):
        nonlocal taken, refused
        package.save_file({f"w.{name}": x.contiguous() for name, x in tensors.items()}, path, metadata=metadata)
        result = result_of(quantize.from_safetensors, path)
        if isinstance(result, Exception):
            refused += 1
            if type(result) is not ValueError or not str(result).startswith("from_safetensors: "):
                wrong.append(f"{key}: {what}: {type(result).__name__}: {str(result)[:200]}")
            return
        taken += 1
        (loaded,) = result.values()
        a = torch.randn(2, 3, K)
        for dtype in (torch.float16, torch.bfloat16):  # of scales, or, where those are bytes, of what the bias is
            if dtype in (loaded.scales.dtype, None if loaded.bias is None else loaded.bias.dtype):
                x = a[0].to(dtype)
                product = loaded.gemm(x, torch.tensor([1, 3]).int()) if hasattr(loaded, "gated") else loaded.gemm(x)
                assert product.shape == (3, N // 2 if getattr(loaded, "gated", False) else N), what

    for key, weight in weights.items():
        quantize.to_safetensors({"w": weight}, path)
        assert same(*(dense_of(x) for x in (quantize.from_safetensors(path)["w"], weight)))
        tensors = weight.tensors()
        with package.safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        fields = json.loads(metadata[key])["w"]
        for name, x in tensors.items():
            attempt(f"{name} dropped", key, weight, {other: t for other, t in tensors.items() if other != name}, metadata)
            for what, mutated in tensor_mutations(x):
                if isinstance(mutated, torch.Tensor) and not mutated.is_meta and not mutated.is_sparse:
                    attempt(f"{name}: {what}", key, weight, tensors | {name: mutated}, metadata)
        for name in fields:
            for value in SCALARS:
                if type(value) is type(fields[name]) and value == fields[name]:
                    continue
                attempt(f"{name} = {value!r}", key, weight, tensors, metadata | {key: json.dumps({"w": fields | {name: value}})})
            short = {other: value for other, value in fields.items() if other != name}
            attempt(f"{name} dropped", key, weight, tensors, metadata | {key: json.dumps({"w": short})})
        attempt("a field more", key, weight, tensors, metadata | {key: json.dumps({"w": fields | {"other": 1}})})
        for text in ("", "{", "[]", "1", "null", '{"w": 1}', '{"w": []}', "[" * 100000):
            attempt(f"text {text[:9]}", key, weight, tensors, metadata | {key: text})
        for layout in ("", "x", "-1", "4", "3.0"):
            attempt(f"layout {layout}", key, weight, tensors, metadata | {"minfer.layout": layout})
    path.write_bytes(b"no safetensors file")
    with pytest.raises(ValueError, match="from_safetensors: .*weights.safetensors is no safetensors file"):
        quantize.from_safetensors(path)
    assert not wrong, f"{len(wrong)} of {taken + refused}:\n" + "\n".join(wrong)
    assert taken > 10 and refused > 300, (taken, refused)


def test_experts_of_other_kinds():
    """stack_experts takes what the 4-bit loaders make."""
    dense = torch.randn(N, K).half()
    for bad in (quantize.quantize_w8(dense), dense, None, quantize.quantize_w4_experts(dense[None])):
        with pytest.raises(ValueError, match="stack_experts: weights must be W4Weights, got .* as weight 1"):
            quantize.stack_experts([quantize.quantize_w4(dense), bad])


BAD_WEIGHTS = {
    "bias shape": ({"bias": torch.zeros(N + 1)}, r"bias must be \[16\], floating-point, .* got \[17\], torch.float32"),
    "bias type": ({"bias": torch.zeros(N).int()}, "bias must be .* got .*torch.int32"),
    "bias device": ({"bias": torch.zeros(N, device="meta")}, "bias must be .* on the weight's device cpu, got .*meta"),
    "bias range": ({"bias": torch.full((N,), 1e30).bfloat16()}, "bias must be within the range of torch.float16, got 1.0.*e.30"),
    "scales' range": ({"weight": torch.full((N, K), 1e6)}, "weight must be at most 458528, for its scales are torch.float16, got 1e.06"),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_quantisers(case):
    changes, message = BAD_WEIGHTS[case]
    arguments = {"weight": torch.randn(N, K), "dtype": torch.float16, "bias": torch.randn(N)} | changes
    with pytest.raises(ValueError, match="^quantize_w4: " + message):
        quantize.quantize_w4(**arguments)


def test_a_bias_has_a_type_that_products_take():
    for dtype, kept in ((torch.float64, torch.float32), (torch.float32, torch.float32), (torch.bfloat16, torch.float16)):
        weight = quantize.quantize_w4(torch.randn(N, K), dtype=torch.float16, bias=torch.randn(N).to(dtype))
        assert weight.bias.dtype == kept and weight.gemm(torch.randn(3, K).half()).shape == (3, N)
