"""Bad input: a RuntimeError that names the argument, what it must be and what it is, on CPU, meta and CUDA alike; nothing is launched."""

import itertools
import math

import minfer
import pytest
import torch
from torch.autograd import forward_ad

DEVICES = ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)]
NAME = minfer.kernels()[0]["name"]


def make(device, *shape, dtype=torch.float16):
    return torch.zeros(shape, dtype=dtype, device=device)


# name: (arguments of gemm beside a [3, 64] and b [64, 8], given a maker of tensors; what the message says)
BAD_GEMM = {
    "a rank 1": (lambda t: {"a": t(64)}, r"a must be \[m, k\] or \[batch, m, k\], got a \[64\]"),
    "a rank 4": (lambda t: {"a": t(1, 1, 3, 64)}, r"a must be \[m, k\] or \[batch, m, k\], got a \[1, 1, 3, 64\]"),
    "b rank 1": (lambda t: {"b": t(64)}, r"b must be \[k, n\] or \[batch, k, n\], got b \[64\]"),
    "a dtype": (lambda t: {"a": t(3, 64, dtype=torch.float32)}, "a must be float16 or bfloat16, got [Ff]loat"),
    "integers": (lambda t: {"a": t(3, 64, dtype=torch.int8), "b": t(64, 8, dtype=torch.int8)}, "a must be float16 or bfloat16, got "),
    "b dtype": (lambda t: {"b": t(64, 8, dtype=torch.bfloat16)}, r"b must have a's dtype \w+, got [Bb][Ff]loat16"),
    "k": (lambda t: {"b": t(65, 8)}, r"b must have k = 64 rows to match a \[3, 64\], got b \[65, 8\]"),
    "weight not transposed": (lambda t: {"b": t(8, 64)}, r"b must have k = 64 rows to match a \[3, 64\], got b \[8, 64\]"),
    "batch": (lambda t: {"a": t(2, 3, 64), "b": t(3, 64, 8)}, r"a and b must have the same batch, got a \[2, 3, 64\] and b \[3, 64, 8\]"),
    "activation": (lambda t: {"activation": "swish"}, "activation must be one of none, relu, gelu, gelu_tanh, silu, relu2, got 'swish'"),
    "activation case": (lambda t: {"activation": "SiLU"}, "activation must be one of .*, got 'SiLU'"),
    "alpha nan": (lambda t: {"alpha": math.nan}, "alpha must be finite in float32, got -?nan"),
    "alpha inf": (lambda t: {"alpha": math.inf}, "alpha must be finite in float32, got inf"),
    "alpha in float64": (lambda t: {"alpha": 1e300}, r"alpha must be finite in float32, got 1e\+300"),
    "beta": (lambda t: {"c": t(3, 8), "beta": -math.inf}, "beta must be finite in float32, got -inf"),
    "c missing": (lambda t: {"beta": 1.0}, "c must be given when beta is not 0, got beta = 1"),
    "c rows": (lambda t: {"c": t(4, 8), "beta": 1.0}, r"c must broadcast to \[3, 8\], got c \[4, 8\]"),
    "c rank": (lambda t: {"c": t(1, 3, 8), "beta": 1.0}, r"c must broadcast to .*, got c \[1, 3, 8\]"),
    "c dtype": (lambda t: {"c": t(3, 8, dtype=torch.bfloat16), "beta": 1.0}, r"c must be \w+ or \w+, got [Bb][Ff]loat16"),
    "bias shape": (lambda t: {"bias": t(9)}, r"bias must be \[n\] = \[8\], got \[9\]"),
    "bias rank": (lambda t: {"bias": t(1, 8)}, r"bias must be \[n\] = \[8\], got \[1, 8\]"),
    "bias dtype": (lambda t: {"bias": t(8, dtype=torch.float64)}, r"bias must be \w+ or \w+, got \w+"),
    "out_dtype": (lambda t: {"out_dtype": torch.float64}, r"out_dtype must be \w+ or \w+, got \w+"),
    "out_dtype other": (lambda t: {"out_dtype": torch.bfloat16}, r"out_dtype must be \w+ or \w+, got [Bb][Ff]loat16"),
    "out shape": (lambda t: {"out": t(3, 9)}, r"out must be \[3, 8\], got \[3, 9\]"),
    "out rank": (lambda t: {"out": t(1, 3, 8)}, r"out must be \[3, 8\], got \[1, 3, 8\]"),
    "out dtype": (lambda t: {"out": t(3, 8, dtype=torch.float64)}, r"out(_dtype)? must be \w+ or \w+, got \w+"),
    "out not out_dtype": (lambda t: {"out": t(3, 8), "out_dtype": torch.float32}, r"out must be \w+.*, got \w+"),
    "kernel": (lambda t: {"kernel": NAME + "x"}, f"kernel '{NAME}x' is not in the registry; nearest: .*{NAME}"),
    "kernel empty": (lambda t: {"kernel": ""}, "kernel '' is not in the registry; nearest: gemm_"),
    "kernel key": (
        lambda t: {"kernel": NAME + "@stages=3"},
        "kernel option 'stages' is not known; expected decomposition, splits, swizzle, raster, columns, realign_a or realign_b",
    ),
    "kernel value": (lambda t: {"kernel": NAME + "@decomposition=magic"}, "kernel option decomposition must be .*, got 'magic'"),
    "kernel raster": (lambda t: {"kernel": NAME + "@raster=up"}, "kernel option raster must be .*, got 'up'"),
    "kernel realign": (lambda t: {"kernel": NAME + "@realign_a=2"}, "kernel option realign_a must be (one of 0, 1|0 or 1), got '2'"),
    "kernel splits": (lambda t: {"kernel": NAME + "@decomposition=split_k,splits=0"}, "kernel option splits must be .*, got '?0"),
    "kernel splits text": (lambda t: {"kernel": NAME + "@splits=two"}, "kernel option splits must be .*, got 'two'"),
    "kernel without options": (lambda t: {"kernel": NAME + "@"}, "kernel option '' is not known"),
    "kernel end": (lambda t: {"kernel": NAME + "@decomposition=split_k,splits=2,"}, "kernel option '' is not known"),
    "kernel twice": (lambda t: {"kernel": NAME + "@swizzle=2,swizzle=2"}, "kernel option swizzle is given twice"),
    "kernel splits alone": (
        lambda t: {"kernel": NAME + "@splits=2"},
        "kernel option splits needs decomposition=split_k or ranges, got splits=2 with persistent",
    ),
    "kernel splits of stream_k": (
        lambda t: {"kernel": NAME + "@decomposition=stream_k,splits=7"},
        "kernel option splits needs .* stream_k",
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", BAD_GEMM)
def test_gemm(case, device):
    def t(*shape, dtype=torch.float16):
        return make(device, *shape, dtype=dtype)

    arguments, message = BAD_GEMM[case]
    call = {"a": t(3, 64), "b": t(64, 8)} | arguments(t)
    a, b = call.pop("a"), call.pop("b")
    with pytest.raises(RuntimeError, match="minfer::gemm: " + message):
        minfer.gemm(a, b, **call)


BAD_GATED = {
    "columns": (lambda t: {"b": t(64, 24)}, r"b must have a multiple of 16 columns .*, got b \[64, 24\]"),
    "k": (lambda t: {"b": t(65, 32)}, r"b must have k = 64 rows to match a \[3, 64\], got b \[65, 32\]"),
    "dtype": (lambda t: {"b": t(64, 32, dtype=torch.bfloat16)}, r"b must have a's dtype \w+, got [Bb][Ff]loat16"),
    "bias of one half": (lambda t: {"bias": t(16)}, r"bias must be \[n\] = \[32\], got \[16\]"),
    "activation": (lambda t: {"activation": ""}, "activation must be one of .*, got ''"),
    "kernel": (lambda t: {"kernel": "gemm"}, "kernel 'gemm' is not in the registry; nearest: gemm_"),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", BAD_GATED)
def test_gemm_gated(case, device):
    def t(*shape, dtype=torch.float16):
        return make(device, *shape, dtype=dtype)

    arguments, message = BAD_GATED[case]
    call = {"a": t(3, 64), "b": t(64, 32)} | arguments(t)
    a, b = call.pop("a"), call.pop("b")
    with pytest.raises(RuntimeError, match="minfer::gemm_gated: " + message):
        minfer.gemm_gated(a, b, **call)


@pytest.mark.parametrize("name", ["b", "c", "bias", "out"])
def test_mixed_devices(name):
    call = {
        "a": make("cpu", 3, 64),
        "b": make("cpu", 64, 8),
        "c": make("cpu", 3, 8),
        "beta": 1.0,
        "bias": make("cpu", 8),
        "out": make("cpu", 3, 8),
    }
    call[name] = call[name].to("meta")
    a, b = call.pop("a"), call.pop("b")
    with pytest.raises(RuntimeError, match=f"minfer::gemm: {name} must be on a's device cpu, got meta"):
        minfer.gemm(a, b, **call)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["b", "c", "bias", "out"])
def test_mixed_devices_with_cuda(name):
    call = {
        "a": make("cuda", 3, 64),
        "b": make("cuda", 64, 8),
        "c": make("cuda", 3, 8),
        "beta": 1.0,
        "bias": make("cuda", 8),
        "out": make("cuda", 3, 8),
    }
    call[name] = call[name].cpu()
    a, b = call.pop("a"), call.pop("b")
    with pytest.raises(RuntimeError, match=f"minfer::gemm: {name} must be on a's device cuda:0, got "):
        minfer.gemm(a, b, **call)


@pytest.mark.gpu
def test_a_on_cpu_b_on_cuda():
    with pytest.raises(RuntimeError, match="must be on a's device|[Ee]xpected all tensors|is_cuda|device"):
        minfer.gemm(make("cpu", 3, 64), make("cuda", 64, 8))


@pytest.mark.gpu
def test_forced_kernel_that_cannot_compute_it():
    aligned = next(k for k in minfer.kernels() if k["compiled"] and k["alignment"] == 16 and k["ab_type"] == "f16" and k["a_major"] == "k")
    b = make("cuda", 64, 64) if aligned["b_major"] == "mn" else make("cuda", 64, 64).t()
    misaligned = make("cuda", 16 * 64 + 1)[1:].view(16, 64)
    with pytest.raises(RuntimeError, match=f"kernel {aligned['name']} cannot compute this problem: .*16 bytes"):
        minfer.gemm(misaligned, b, kernel=aligned["name"])
    with pytest.raises(RuntimeError, match="cannot compute this problem: .*type"):
        minfer.gemm(make("cuda", 16, 64, dtype=torch.bfloat16), b.bfloat16(), kernel=aligned["name"])
    with pytest.raises(RuntimeError, match="cannot compute this problem: .*layout"):
        minfer.gemm(make("cuda", 64, 16).t(), b, kernel=aligned["name"])


@pytest.mark.gpu
def test_nothing_is_launched():
    out = torch.full((3, 8), 7.0, dtype=torch.float16, device="cuda")
    with pytest.raises(RuntimeError):
        minfer.gemm(make("cuda", 3, 64), make("cuda", 64, 8), alpha=math.nan, out=out)
    assert (out == 7).all()


def test_sparse_operand():
    with pytest.raises((RuntimeError, NotImplementedError), match="dense|SparseCPU"):
        minfer.gemm(make("cpu", 3, 64).to_sparse(), make("cpu", 64, 8))


def test_no_backward():
    a, weight = torch.randn(3, 16).half(), torch.randn(32, 16).half().requires_grad_()
    for y in (minfer.gemm(a, weight.t()), minfer.gemm_gated(a, weight.t()), minfer.gemm(a, weight.detach().t(), bias=weight[:, 0])):
        with pytest.raises(RuntimeError, match="minfer::gemm(_gated)?: has no backward"):
            y.sum().backward()
    with pytest.raises(RuntimeError, match="minfer::gemm: out= cannot be differentiated"):
        minfer.gemm(a, weight.t(), out=torch.empty(3, 32).half())
    with torch.no_grad():
        assert not minfer.gemm(a, weight.t()).requires_grad


WITH_VALUES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", WITH_VALUES)
def test_no_forward_mode(device):
    """A tangent is refused, whoever made it, with and without grad mode; inference_mode drops it."""
    a, b, tangent = make(device, 3, 16), make(device, 16, 32), make(device, 3, 16)
    refused = "minfer::gemm(_gated)?: has no derivative, it is an inference operator; its arguments must have no tangent"
    calls = (
        lambda x: minfer.gemm(x, b),
        lambda x: minfer.gemm(a, b, c=x[:, :1], beta=1.0),
        lambda x: minfer.gemm_gated(x, b),
        lambda x: minfer.gemm(x, b, out=torch.empty(3, 32, dtype=a.dtype, device=device)),
        lambda x: minfer.gemm(a, b[:, :16], out=x.clone()),
    )
    for call, mode in itertools.product(calls, (torch.enable_grad, torch.no_grad)):
        with pytest.raises(RuntimeError, match=refused), mode():
            torch.func.jvp(call, (a,), (tangent,))
        with pytest.raises(RuntimeError, match=refused), mode(), forward_ad.dual_level():
            call(forward_ad.make_dual(a, tangent))
        with pytest.raises(RuntimeError, match=refused), mode(), forward_ad.dual_level():
            call(forward_ad.make_dual(a.clone().requires_grad_(), tangent))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(a, tangent)
        assert forward_ad.unpack_dual(minfer.gemm(a, b)).tangent is None, "an operand that has none"
        with torch.inference_mode():
            assert forward_ad.unpack_dual(minfer.gemm(dual, b)).tangent is None
    assert torch.equal(torch.func.jvp(lambda x: x[:, :1] + minfer.gemm(a, b), (a,), (tangent,))[1], tangent[:, :1].expand(3, 32))


@pytest.mark.parametrize("device", WITH_VALUES)
def test_no_derivative_of_lists(device):
    """Of an operator that returns several tensors."""
    with pytest.raises(RuntimeError, match="minfer::moe_router: has no derivative"):
        torch.func.jvp(lambda x: minfer.moe_router(x, 2)[0], (torch.ones(3, 8, device=device),), (torch.ones(3, 8, device=device),))


@pytest.mark.parametrize("device", WITH_VALUES)
def test_no_backward_under_func(device):
    a, b = make(device, 3, 16), make(device, 16, 32)
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.hessian):
        with pytest.raises(RuntimeError, match="minfer::gemm: has no backward, it is an inference operator"):
            transform(lambda x: minfer.gemm(x, b).sum())(a)
    with pytest.raises(RuntimeError, match="minfer::gemm: has no backward"):
        torch.func.vjp(lambda x: minfer.gemm(x, b), a)
    with pytest.raises(RuntimeError, match="minfer::gemm: out= cannot be differentiated"):
        torch.func.grad(lambda x: minfer.gemm(x, b, out=torch.empty(3, 32, dtype=a.dtype, device=device)).sum())(a)
    assert torch.equal(torch.func.grad(lambda x: (x[:, :1] * minfer.gemm(a, b)).sum())(a)[:, 1:], torch.zeros_like(a[:, 1:]))

    def constant(x):
        with torch.no_grad():
            return x.sum() + minfer.gemm(x, b).sum()

    assert not torch.func.grad(lambda x: x.sum() + constant(x))(a).sub(1).any()


@pytest.mark.gpu
def test_no_backward_on_cuda():
    a, weight = make("cuda", 3, 16), make("cuda", 32, 16).requires_grad_()
    with pytest.raises(RuntimeError, match="minfer::gemm: has no backward"):
        minfer.gemm(a, weight.t()).sum().backward()
