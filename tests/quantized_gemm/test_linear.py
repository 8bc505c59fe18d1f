"""minfer.nn.W4Linear and W8Linear."""

import copy
import dataclasses

import minfer
import pytest
import torch
from minfer.nn.linear import W4Linear, W8Linear

from tests.contracts.test_registration import need
from tests.gemm.cases import DTYPES, name_of
from tests.quantized_gemm.cases import make_weight
from tests.quantized_gemm.weight_format_cases import BITS, NEW

BUFFERS = ("qweight", "scales", "zeros", "perm", "bias")


def act_order_weight(n=48, k=256):
    """A weight with every optional tensor."""
    weight, perm = make_weight(n, k, 128, "integer"), torch.randperm(k).int()
    return minfer.quantize.W4Weight(weight.qweight, weight.scales, weight.zeros, perm, 128, n, k, bias=torch.randn(n).half())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_from_linear(dtype, symmetric, bias):
    """Computes what nn.Linear does with the dequantised weight, and nearly what it does with the original."""
    linear = torch.nn.Linear(256, 48, bias=bias, dtype=dtype)
    module = W4Linear.from_linear(linear, 64, symmetric)
    assert (module.bias is None) != bias and (module.zeros is None) == symmetric
    assert not list(module.parameters())
    x = torch.randn(2, 5, 256, dtype=dtype)
    out = module(x)
    assert out.shape == (2, 5, 48) and out.dtype == dtype
    dense = torch.nn.functional.linear(x.double(), module.weight().dequantize().double(), linear.bias.double() if bias else None)
    assert (out.double() - dense).norm() / dense.norm() < torch.finfo(dtype).eps
    with torch.no_grad():
        original = linear.double()(x.double())
    assert (out.double() - original).norm() / original.norm() < 0.15


def test_from_weight_shares_tensors():
    weight = act_order_weight()
    module = W4Linear.from_weight(weight)
    assert all(getattr(module, name) is getattr(weight, name) for name in BUFFERS)
    assert {name for name, _ in module.named_buffers()} == set(BUFFERS)
    x = torch.randn(3, 256).half()
    assert torch.equal(module(x), weight.gemm(x))
    assert torch.equal(module.weight().dequantize(), weight.dequantize())


@pytest.mark.parametrize("full", [True, False])
def test_state_dict(full):
    """Into a module that the constructor made, strictly; the optional buffers are there or not."""
    source = W4Linear.from_weight(act_order_weight()) if full else W4Linear.from_linear(torch.nn.Linear(64, 16, bias=False).half(), -1)
    n, k = source.out_features, source.in_features
    target = W4Linear(k, n, bias=full, zeros=full, perm=full, group_size=source.group_size)
    assert set(source.state_dict()) == (set(BUFFERS) if full else {"qweight", "scales"}) | {"alpha"}
    target.load_state_dict(source.state_dict())
    x = torch.randn(3, k).half()
    assert torch.equal(target(x), source(x))
    other = W4Linear(k, n, bias=full, zeros=not full, perm=full, group_size=source.group_size)
    with pytest.raises(RuntimeError, match="zeros"):
        other.load_state_dict(source.state_dict())


BAD_PERMS = {
    "twice": (lambda perm: perm.index_copy(0, torch.tensor([3]), perm[:1]), "got 0 to 255, 255 different numbers"),
    "too large": (lambda perm: perm + 1, "got 1 to 256, 256 different numbers"),
    "negative": (lambda perm: perm - 1, "got -1 to 254, 256 different numbers"),
    "wraps in 32 bits": (lambda perm: perm.long() + (perm == 5) * 2**32, "got 0 to 4294967301, 256 different numbers"),
    "fractions": (lambda perm: perm.float() + 0.25, "got numbers of float32"),
}


@pytest.mark.parametrize("case", BAD_PERMS)
def test_perm_is_checked_when_it_is_loaded(case, monkeypatch):
    """Once, and not in forward: values that no operator looks at. A module that refuses a state dict is what it was."""
    change, message = BAD_PERMS[case]
    weight = dataclasses.replace(act_order_weight(), perm=torch.cat((torch.arange(4, 256), torch.arange(4))).int())
    module, x = torch.nn.Sequential(W4Linear.from_weight(weight)), torch.randn(3, 256).half()
    before, out = {name: t.clone() for name, t in module.state_dict().items()}, module(x)
    bad = {name: change(t) if name == "0.perm" else t + 1 for name, t in before.items()}
    for arguments in ({}, {"assign": True}, {"strict": False}):
        with pytest.raises(ValueError, match="W4Linear: 0.perm must be a permutation of 0 to 255, " + message):
            module.load_state_dict(bad, **arguments)
    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())
    with pytest.raises(ValueError, match="W4Linear: perm must be a permutation of 0 to 255, " + message):
        W4Linear.from_weight(dataclasses.replace(weight, perm=change(weight.perm)))
    monkeypatch.setattr("minfer.nn.linear.check_permutation", lambda *_: pytest.fail("forward looks at values"))
    assert torch.equal(module(x), out)


def test_what_torch_says_of_a_perm():
    """Its shape and its absence are torch's to complain of; on the meta device there are no values."""
    module = W4Linear.from_weight(act_order_weight())
    state = module.state_dict()
    with pytest.raises(RuntimeError, match="size mismatch for perm"):
        module.load_state_dict(state | {"perm": torch.arange(8).int()})
    with pytest.raises(RuntimeError, match="Missing key.*perm"):
        module.load_state_dict({name: t for name, t in state.items() if name != "perm"})
    meta = W4Linear(256, 48, zeros=True, perm=True, device="meta")
    meta.load_state_dict({name: t.to("meta") for name, t in state.items()})
    meta.load_state_dict(state, assign=True)
    x = torch.randn(3, 256).half()
    assert torch.equal(meta(x), module(x))


@pytest.mark.parametrize(("form", "group_size"), [("mxfp4", 32.0), ("nvfp4", 16.0), ("int4", 64.0)])
def test_group_sizes_are_integers(form, group_size):
    with pytest.raises(ValueError, match="group_size must be"):
        W4Linear(64, 64, group_size=group_size, w4_format=form)


def test_bad_alpha():
    module = linear_of("nvfp4")[1]
    for value, message in (
        (torch.ones(2), r"alpha must be one number, got \[2\]"),
        (torch.tensor([]), r"alpha must be one number, got \[0\]"),
        (torch.tensor(float("nan")), "alpha must be finite in float32, got nan"),
        (torch.tensor(1e300, dtype=torch.float64), r"alpha must be finite in float32, got 1e\+300"),
    ):
        before = module.alpha
        with pytest.raises(ValueError, match="W4Linear: " + message):
            module.load_state_dict(module.state_dict() | {"alpha": value})
        assert module.alpha == before


def test_module_behaviour():
    """Moves, copies and casts like a module: codes and perm stay integers."""
    module = W4Linear.from_weight(act_order_weight())
    x = torch.randn(3, 256).half()
    assert torch.equal(copy.deepcopy(module)(x), module(x))
    assert module.to("meta")(x.to("meta")).shape == (3, 48)
    module = W4Linear.from_weight(act_order_weight()).bfloat16()
    assert (module.qweight.dtype, module.perm.dtype, module.scales.dtype) == (torch.int32, torch.int32, torch.bfloat16)
    out = module(x.bfloat16())
    truth = x.bfloat16().double() @ module.weight().dequantize().double().t() + module.bias.double()
    assert (out.double() - truth).norm() / truth.norm() < 2.0**-7
    with pytest.raises(RuntimeError, match="scales must have a's dtype float16, got bfloat16"):
        module(x)


def test_repr():
    module = W4Linear(256, 48, bias=False, zeros=True, group_size=64, dtype=torch.bfloat16)
    assert repr(module) == (
        "W4Linear(in_features=256, out_features=48, bias=False, zeros=True, perm=False, group_size=64, w4_format=int4, "
        "dtype=torch.bfloat16)"
    )


def test_bad_sizes():
    with pytest.raises(ValueError, match="in_features must be a positive multiple of 8, got 60"):
        W4Linear(60, 16)
    with pytest.raises(ValueError, match="out_features must be a positive multiple of 8, got 0"):
        W4Linear(64, 0)
    with pytest.raises(ValueError, match="group_size must be -1 or a power of two >= 32, got 24"):
        W4Linear(64, 16, group_size=24)
    with pytest.raises(ValueError, match="in_features must be a positive multiple of 8, got 64.0"):
        W4Linear(64.0, 16)
    with pytest.raises(ValueError, match="W4Linear: dtype must be float16 or bfloat16, got float32"):
        W4Linear(64, 16, dtype=torch.float32)
    with pytest.raises(ValueError, match="W4Linear: zeros must be False for nf4, which has no zero points"):
        W4Linear(64, 16, group_size=64, w4_format="nf4", zeros=True)
    with pytest.raises(ValueError, match="W4Linear: alpha must be finite in float32, got inf"):
        W4Linear(64, 16, group_size=16, w4_format="nvfp4", alpha=float("inf"))
    with pytest.raises(ValueError, match="W8Linear: weight must be a W8Weight, got W4Weight"):
        W8Linear.from_weight(act_order_weight())


def test_compile():
    need("aot_eager")
    model = torch.nn.Sequential(W4Linear.from_weight(act_order_weight()), torch.nn.SiLU(), W4Linear.from_weight(act_order_weight(16, 48)))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for m in (3, 5, 1):
        x = torch.randn(m, 256).half()
        assert torch.equal(compiled(x), model(x))


# ---- other formats -------------------------------------------------------------------------------------------------------------


def linear_of(name, n=48, k=256, dtype=torch.bfloat16):
    linear = torch.nn.Linear(k, n, dtype=dtype)
    return linear, (W4Linear if BITS[name] == 4 else W8Linear).from_linear(linear, format=name)


@pytest.mark.parametrize("name", NEW)
def test_formats(name):
    """Computes what nn.Linear does with the dequantised weight, and nearly what it does with the original."""
    linear, module = linear_of(name)
    assert not list(module.parameters()) and getattr(module, f"w{BITS[name]}_format") == name
    x = torch.randn(2, 5, 256).bfloat16()
    out = module(x)
    assert out.shape == (2, 5, 48) and out.dtype == torch.bfloat16 and torch.equal(out, module.weight().gemm(x))
    dense = torch.nn.functional.linear(x.double(), module.weight().dequantize().double(), linear.bias.double())
    assert (out.double() - dense).norm() / dense.norm() < 2.0**-7
    with torch.no_grad():
        original = linear(x).double()
    assert (out.double() - original).norm() / original.norm() < 0.16


@pytest.mark.parametrize("name", NEW)
def test_state_dict_of_formats(name):
    """alpha travels with the tensors, inside a larger model too."""
    _, source = linear_of(name)
    again = type(source)(256, 48, group_size=source.group_size, alpha=7.0, **{f"w{BITS[name]}_format": name}, dtype=torch.bfloat16)
    assert set(source.state_dict()) == {"qweight", "scales", "bias", "alpha"}
    torch.nn.Sequential(again).load_state_dict(torch.nn.Sequential(source).state_dict())
    x = torch.randn(3, 256).bfloat16()
    assert again.alpha == source.alpha and torch.equal(again(x), source(x))
    assert torch.equal(copy.deepcopy(source)(x), source(x))
    assert source.to("meta").weight().alpha == again.alpha


def test_parts_of_a_state_dict():
    """Of a checkpoint in several files, in any order; what a part does not have stays as it is, and is missing where it must not be."""
    _, source = linear_of("nvfp4")
    state, x = source.state_dict(), torch.randn(3, 256).bfloat16()
    for order in (1, -1):
        again = W4Linear(256, 48, group_size=16, w4_format="nvfp4", dtype=torch.bfloat16)
        for part in ({"alpha"}, {"qweight", "bias"}, {"scales"}, set())[::order]:
            again.load_state_dict({name: t for name, t in state.items() if name in part}, strict=False)
        assert torch.equal(again(x), source(x))
    without = {name: t for name, t in state.items() if name != "alpha"}
    with pytest.raises(RuntimeError, match="Missing key.*alpha"):
        again.load_state_dict(without)
    fresh = W4Linear(256, 48, group_size=16, w4_format="nvfp4", dtype=torch.bfloat16)
    fresh.load_state_dict(without)  # as written before alpha was always there
    assert fresh.alpha == 1.0


def test_scales_keep_their_bytes():
    _, module = linear_of("nvfp4", dtype=torch.float16)
    assert module.bfloat16().scales.dtype == torch.uint8 and module.bias.dtype == torch.bfloat16
    assert module(torch.randn(3, 256).bfloat16()).dtype == torch.bfloat16
    assert W4Linear(64, 16, group_size=32, w4_format="mxfp4").scales.dtype == torch.uint8


def test_repr_of_formats():
    assert repr(W4Linear(64, 16, group_size=16, w4_format="nvfp4", alpha=0.5)) == (
        "W4Linear(in_features=64, out_features=16, bias=True, zeros=False, perm=False, group_size=16, w4_format=nvfp4, alpha=0.5)"
    )
    assert "w8_format=fp8_e4m3, dtype=torch.bfloat16" in repr(W8Linear(64, 16, w8_format="fp8_e4m3", dtype=torch.bfloat16))


def test_bad_formats():
    with pytest.raises(ValueError, match="W4Linear: group_size must be 16 for nvfp4, got 128"):
        W4Linear(64, 16, w4_format="nvfp4")
    with pytest.raises(ValueError, match="W4Linear: w4_format must be one of int4, nf4, mxfp4, nvfp4, got 'int8'"):
        W4Linear(64, 16, w4_format="int8")
    with pytest.raises(ValueError, match="W8Linear: w8_format must be one of int8, fp8_e4m3, got 'int4'"):
        W8Linear(64, 16, w8_format="int4")
    with pytest.raises(ValueError, match="W8Linear: in_features must be a positive multiple of 8, got 60"):
        W8Linear(60, 16)


@pytest.mark.parametrize("name", NEW)
def test_compile_of_formats(name):
    """Layers of one graph that differ in alpha."""
    need("aot_eager")
    model = torch.nn.Sequential(linear_of(name)[1], torch.nn.SiLU(), linear_of(name, 16, 48)[1])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for m in (3, 5, 1):
        x = torch.randn(m, 256).bfloat16()
        assert torch.equal(compiled(x), model(x))
