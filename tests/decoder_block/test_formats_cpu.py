"""What decoder blocks of all formats have in common on the CPU: errors, devices, meta tensors, torch.compile."""

import itertools

import minfer
import pytest
import torch

from tests.decoder_block import cases, dense_cases, fp8_cases
from tests.decoder_block.cases import WEIGHTS, Case
from tests.decoder_block.dense_cases import DenseCase
from tests.decoder_block.fp8_cases import Fp8Case

FORMATS = {
    "w4a16_decoder_block": (cases, ("qweight", "scales")),
    "fp8_decoder_block": (fp8_cases, ("weight", "scale")),
    "decoder_block": (dense_cases, ("weight",)),
}


@pytest.mark.parametrize(
    "op, change, message",
    [(op, *bad) for op, (module, _) in FORMATS.items() for bad in module.bad("cpu")],
    ids=lambda x: x[:60] if isinstance(x, str) else "",
)
def test_errors(op, change, message):
    """Each names the operator and the argument, and the residual is as it was."""
    call = FORMATS[op][0].good("cpu") | change
    before = call["residual"].clone()
    with pytest.raises(RuntimeError, match=f"^minfer::{op}: {message}"):
        getattr(minfer, op)(**call)
    assert torch.equal(call["residual"], before)


@pytest.mark.parametrize("op", FORMATS)
def test_what_is_right(op):
    for change in ({}, dict(kernel="one_launch"), dict(kernel="separate"), dict(constant_weights=True)):
        assert getattr(minfer, op)(**(FORMATS[op][0].good("cpu") | change)).shape == (3, 40)


@pytest.mark.parametrize("kind", [Case, Fp8Case, DenseCase])
def test_without_a_product_behind(kind):
    """The last layer's: D has no columns, and the residual is that of a call with a product."""
    more = {"group_size": 32} if kind is Case else {}
    t = kind(3, 64, 128, 72, 40, **more).make()
    t.call()
    args = t.arguments()
    for name in ("qweight", "scales", "weight", "scale"):
        if f"next_{name}" in args:
            x = args[f"next_{name}"]
            args[f"next_{name}"] = x[:, :0] if name == "scales" else x[:0]
    op = {Case: minfer.w4a16_decoder_block, Fp8Case: minfer.fp8_decoder_block, DenseCase: minfer.decoder_block}[kind]
    own = t.before.clone()
    assert op(**(args | {"residual": own})).shape == (3, 0) and torch.equal(own, t.residual)


@pytest.mark.parametrize("kind", [Fp8Case, DenseCase])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic, kind):
    torch._dynamo.reset()
    t = kind(3, 64, 128, 72, 40).make()

    def step(a, residual):
        return t.again(a=a, residual=residual) * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for m in (3, 2):
        own, traced = t.before[:m].clone(), t.before[:m].clone()
        want = step(t.a[:m], own)
        assert torch.equal(compiled(t.a[:m], traced), want) and torch.equal(traced, own)


@pytest.mark.parametrize("op", FORMATS)
def test_meta_is_like_cpu(op):
    call = FORMATS[op][0].good("cpu")
    meta = {name: x.to("meta") if torch.is_tensor(x) else x for name, x in call.items()}
    fake, real = getattr(minfer, op)(**meta), getattr(minfer, op)(**call)
    assert (fake.shape, fake.dtype, fake.stride(), fake.device.type) == (real.shape, real.dtype, real.stride(), "meta")


@pytest.mark.parametrize(
    "op, name",
    [
        (op, name)
        for op, (_, parts) in FORMATS.items()
        for name in ("residual", "mlp_norm", "next_norm", *(f"{weight}_{part}" for weight, part in itertools.product(WEIGHTS, parts)))
    ],
)
def test_devices(op, name):
    call = FORMATS[op][0].good("cpu")
    call[name] = call[name].to("meta")
    with pytest.raises(RuntimeError, match=f"minfer::{op}: {name} must be on "):
        getattr(minfer, op)(**call)
