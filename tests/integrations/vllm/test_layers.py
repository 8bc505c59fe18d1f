"""vLLM's custom ops, made by vLLM's own classes, whose work minfer does."""

from __future__ import annotations

import pytest
import torch

vllm = pytest.importorskip("vllm")

from minfer.integrations.vllm import layers  # noqa: E402
from vllm.model_executor.layers.activation import SiluAndMul  # noqa: E402
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm  # noqa: E402
from vllm.model_executor.layers.rotary_embedding import get_rope  # noqa: E402


@pytest.fixture(autouse=True)
def registered(config, adapter):
    adapter.register_layers()
    adapter.register_layers()


@pytest.mark.parametrize("kind, usual", [(RMSNorm, 1.0), (GemmaRMSNorm, 0.0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_norms(kind, usual, dtype):
    torch.manual_seed(0)
    norm = kind(256, eps=1e-5).to(dtype)
    assert type(norm) is layers.LAYERS[kind.__name__] and norm.enabled()
    norm.weight.data.normal_(usual, 0.1)
    x, residual = torch.randn(7, 256).to(dtype), torch.randn(7, 256).to(dtype)
    weight = norm.weight.double() + 1.0 - usual
    want = torch.nn.functional.rms_norm(x.double(), (256,), weight, 1e-5)
    torch.testing.assert_close(norm.forward_cuda(x).double(), want, rtol=1e-2, atol=1e-2)
    total = (x.double() + residual.double()).to(dtype)
    have, kept = norm.forward_cuda(x.clone(), residual)
    assert kept is residual and torch.equal(residual, total)
    torch.testing.assert_close(have.double(), torch.nn.functional.rms_norm(total.double(), (256,), weight, 1e-5), rtol=1e-2, atol=1e-2)


def test_weights_of_another_type_stay_vllms():
    norm = RMSNorm(64, dtype=torch.float32)
    x = torch.randn(3, 64).bfloat16()
    assert torch.equal(norm.forward_cuda(x), norm.forward_native(x))


def test_silu_and_mul():
    torch.manual_seed(1)
    layer, x = SiluAndMul(), torch.randn(5, 192).bfloat16()
    assert type(layer) is layers.MinferSiluAndMul
    torch.testing.assert_close(layer.forward_cuda(x), layer.forward_native(x.float()).bfloat16(), rtol=1e-2, atol=1e-2)


LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=256)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=256)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(
    "kind, rotary, parameters",
    [("Rotary", 64, {}), ("Rotary", 32, {}), ("Llama3Rotary", 64, LLAMA3), ("YaRNScalingRotary", 64, YARN)],
)
def test_rotary_embedding(neox, kind, rotary, parameters):
    torch.manual_seed(2)
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": rotary / 64} | parameters
    layer = get_rope(64, 512, neox, parameters, torch.float32)
    assert type(layer) is layers.LAYERS[f"{kind}Embedding"] and layer.rotary_dim == rotary
    positions, q, k = torch.randint(0, 512, (6,)), torch.randn(6, 4 * 64).bfloat16(), torch.randn(6, 2 * 64).bfloat16()
    want = layer.forward_native(positions, q.float(), k.float())
    have = layer.forward_cuda(positions, q, k)
    assert have[0] is q and have[1] is k
    for x, y in zip(have, want, strict=True):
        torch.testing.assert_close(x.float(), y, rtol=1e-2, atol=1e-2)
    alone = torch.randn(6, 4 * 64).bfloat16()
    want = layer.forward_native(positions, alone.float(), None)[0]
    torch.testing.assert_close(layer.forward_cuda(positions, alone, None)[0].float(), want, rtol=1e-2, atol=1e-2)
