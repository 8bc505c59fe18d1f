"""minfer.nn's modules over rows: against the operators, torch's modules and their state dicts."""

import minfer
import pytest
import torch

from tests.gemm.cases import DTYPES, name_of


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_rms_norm(dtype):
    x, residual = torch.randn(5, 64).to(dtype), torch.randn(5, 64).to(dtype)
    module = minfer.nn.RMSNorm(64, eps=1e-5, dtype=dtype)
    torch.testing.assert_close(module(x), torch.nn.RMSNorm(64, eps=1e-5, dtype=dtype)(x))
    module.load_state_dict({"weight": torch.randn(64).to(dtype)})
    assert module.variance_epsilon == 1e-5
    total = x + residual
    assert torch.equal(module(x, residual), module(total)) and torch.equal(residual, total)
    norm = torch.empty_like(x)
    q, scales = module(x, quant="fp8_token", norm=norm)
    assert torch.equal(norm, module(x)) and scales.shape == (5, 1) and q.dtype == torch.float8_e4m3fn
    gemma = minfer.nn.RMSNorm(64, weight_offset=1.0, dtype=dtype)
    assert gemma.weight.eq(0).all() and torch.equal(gemma(x), minfer.rms_norm(x))
    assert "weight_offset=1.0" in repr(gemma) and "weight_offset" not in repr(module)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_layer_norm(dtype):
    x = torch.randn(5, 64).to(dtype)
    for bias in (True, False):
        theirs = torch.nn.LayerNorm(64, bias=bias, dtype=dtype)
        for parameter in theirs.parameters():
            torch.nn.init.normal_(parameter)
        own = minfer.nn.LayerNorm(64, bias=bias, dtype=dtype)
        own.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(own(x), theirs(x).detach())


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding(interleaved):
    """Whatever it is converted to, the table stays float32; it is not saved."""
    module = minfer.nn.RotaryEmbedding(32, 128, 5e5, {"rope_type": "linear", "factor": 2.0}, interleaved=interleaved)
    table = minfer.rope_cache(5e5, 32, 128, {"rope_type": "linear", "factor": 2.0})
    assert torch.equal(module.half().cos_sin, table) and not module.state_dict()
    assert module.to("meta").cos_sin.device.type == "meta"
    module = minfer.nn.RotaryEmbedding(32, 128, 5e5, {"rope_type": "linear", "factor": 2.0}, interleaved=interleaved).bfloat16()
    q, k = torch.randn(2, 3, 4, 48).bfloat16(), torch.randn(2, 3, 1, 48).bfloat16()
    positions = torch.tensor([[0, 1, 2], [70, 71, 127]])
    want_q, want_k = q.view(6, 4, 48).clone(), k.view(6, 1, 48).clone()
    minfer.rope(want_q, want_k, table, positions.view(-1), interleaved=interleaved)
    have_q, have_k = module(q, k, positions)
    assert have_q is q and have_k is k and torch.equal(q.view(6, 4, 48), want_q) and torch.equal(k.view(6, 1, 48), want_k)
    assert module(q, None, positions)[1] is None


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_gates(dtype):
    x = torch.randn(5, 64).to(dtype)
    assert torch.equal(minfer.nn.SwiGLU()(x), minfer.silu_and_mul(x))
    for approximate in ("none", "tanh"):
        assert torch.equal(minfer.nn.GeGLU(approximate)(x), minfer.gelu_and_mul(x, approximate))
    q, scales = minfer.nn.SwiGLU()(x, quant="fp8_tensor", scale=(scale := torch.ones(1)))
    assert scales is scale and q.shape == (5, 32)
    with pytest.raises(ValueError, match="GeGLU: approximate must be none or tanh, got 'erf'"):
        minfer.nn.GeGLU("erf")


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float32), ids=name_of)
def test_embedding(dtype):
    theirs, ids = torch.nn.Embedding(20, 16, dtype=dtype), torch.randint(0, 20, (2, 5))
    own = minfer.nn.Embedding(20, 16, dtype=dtype)
    own.load_state_dict(theirs.state_dict())
    assert torch.equal(own(ids), theirs(ids))
    scaled = minfer.nn.Embedding(20, 16, scale=4.0, dtype=dtype)
    assert torch.equal(scaled(ids), scaled.weight[ids] * 4) and "scale=4.0" in repr(scaled)


def test_parameters_need_no_gradients():
    """These operators have no backward: a model of these modules runs without no_grad()."""
    for module in (minfer.nn.RMSNorm(8), minfer.nn.LayerNorm(8), minfer.nn.Embedding(4, 8)):
        assert not any(parameter.requires_grad for parameter in module.parameters())
    block = torch.nn.Sequential(
        minfer.nn.Embedding(4, 32, dtype=torch.float16), minfer.nn.RMSNorm(32, dtype=torch.float16), minfer.nn.SwiGLU()
    )
    assert block(torch.tensor([1, 2])).shape == (2, 16)


def test_compile():
    torch._dynamo.reset()
    norm, gate, rotary = minfer.nn.RMSNorm(64, dtype=torch.bfloat16), minfer.nn.SwiGLU(), minfer.nn.RotaryEmbedding(16, 32)

    def block(x, residual, positions):
        y = norm(x, residual)
        q, _ = rotary(y.view(-1, 4, 16).clone(), None, positions)
        return gate(q.flatten(1)), norm(residual, quant="int8_token")[0]

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    x, residual, positions = torch.randn(3, 64).bfloat16(), torch.randn(3, 64).bfloat16(), torch.arange(3)
    with torch.no_grad():
        for have, want in zip(compiled(x, residual.clone(), positions), block(x, residual.clone(), positions), strict=True):
            assert torch.equal(have, want)
