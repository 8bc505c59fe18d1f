"""Experts of vLLM's mixture-of-experts layers: chosen by vLLM's oracles, run by its modular kernel, against float64."""

from __future__ import annotations

import pytest
import torch

vllm = pytest.importorskip("vllm")

import vllm.model_executor.layers.fused_moe.modular_kernel as mk  # noqa: E402
from minfer.integrations.vllm import experts as kernels  # noqa: E402
from vllm.model_executor.layers.fused_moe import config as moe_configs  # noqa: E402
from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # noqa: E402
from vllm.model_executor.layers.fused_moe.oracle import fp8, unquantized  # noqa: E402
from vllm.model_executor.layers.quantization.utils import quant_utils as keys  # noqa: E402

from .cases import EXPERTS, HIDDEN, INTER, TOP_K, ffn, layer_config, routed  # noqa: E402

FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def registered(config, adapter):
    adapter.register_experts()
    adapter.register_experts()


def run(kind, config, quant, x, w13, w2, weights, ids, expert_map=None, hook=None, **more):
    from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize

    prepare = maybe_make_prepare_finalize(moe=config, quant_config=quant, allow_new_interface=True)
    experts = kind(moe_config=config, quant_config=quant)
    if hook is not None:
        experts.post_gemm2_hook = hook
    kernel = mk.FusedMoEKernel(prepare, experts)
    given = dict(activation=config.activation, global_num_experts=EXPERTS, expert_map=expert_map, apply_router_weight_on_input=False)
    return kernel.apply(hidden_states=x, w1=w13, w2=w2, topk_weights=weights, topk_ids=ids, **(given | more))


@pytest.mark.parametrize("case", ["silu", "swigluoai with biases", "experts of another rank", "weights on the input"])
def test_16_bits(case):
    torch.manual_seed(0)
    activation = MoEActivation.SWIGLUOAI if case.startswith("swigluoai") else MoEActivation.SILU
    biased = activation == MoEActivation.SWIGLUOAI
    config = layer_config(activation, has_bias=biased)
    w13, w2 = (torch.randn(EXPERTS, *shape).bfloat16() / 12 for shape in ((2 * INTER, HIDDEN), (HIDDEN, INTER)))
    biases = [(torch.randn(EXPERTS, n) / 4).bfloat16() for n in (2 * INTER, HIDDEN)] if biased else [None, None]
    quant = moe_configs.biased_moe_quant_config(*biases) if biased else moe_configs.FusedMoEQuantConfig.make()
    x, (weights, ids) = torch.randn(11, HIDDEN).bfloat16(), routed(11)
    more, here, factors = {}, ids, weights
    if case.startswith("experts of"):
        mapped = torch.full((EXPERTS,), -1, dtype=torch.int32)
        mapped[2:6] = torch.arange(4, dtype=torch.int32)
        more, here, w13, w2 = {"expert_map": mapped}, mapped[ids], w13[2:6], w2[2:6]
    if case.startswith("weights on"):
        more, factors = {"apply_router_weight_on_input": True}, torch.ones_like(weights)
        ids, weights = ids[:, :1], torch.ones(11, 1)
        here, factors = ids, weights
    have = run(kernels.MinferExperts, config, quant, x, w13, w2, weights, ids, **more).double()
    want = ffn(x, w13, w2, factors, here, activation, *biases)
    error = (have - want).norm() / want.norm()
    assert have.isfinite().all() and error < 8e-3, error


@pytest.mark.skipif(not hasattr(mk.FusedMoEExperts, "post_gemm2_hook"), reason="vLLM 0.32 has no such hook")
@pytest.mark.parametrize("part", [False, True], ids=["all experts", "experts of another rank"])
def test_a_model_that_sums_up_experts_itself(part):
    torch.manual_seed(3)
    config, quant = layer_config(), moe_configs.FusedMoEQuantConfig.make()
    w13, w2 = (torch.randn(EXPERTS, *shape).bfloat16() / 12 for shape in ((2 * INTER, HIDDEN), (HIDDEN, INTER)))
    x, (weights, ids) = torch.randn(7, HIDDEN).bfloat16(), routed(7)
    more, here = {}, ids
    if part:
        mapped = torch.full((EXPERTS,), -1, dtype=torch.int32)
        mapped[2:6] = torch.arange(4, dtype=torch.int32)
        more, here, w13, w2 = {"expert_map": mapped}, mapped[ids], w13[2:6], w2[2:6]
    calls = []

    def hook(rows, output):
        """The sum of the experts' squares, which no sum of theirs has."""
        calls.append(rows)
        places = rows.expanded_idx_to_permuted_idx
        assert rows.route_major and torch.equal(places < 0, here < 0)
        of_pairs = rows.gemm2_permuted[places.clamp(min=0)].double().square().masked_fill((places < 0)[..., None], 0)
        output.copy_((of_pairs * rows.expert_weights.double()[..., None]).sum(1))

    have = run(kernels.MinferExperts, config, quant, x, w13, w2, weights, ids, hook=hook, **more).double()
    want = torch.zeros(x.shape, dtype=torch.float64)
    for slot in range(TOP_K):
        alone = ffn(x, w13, w2, torch.ones(7, 1), here[:, slot : slot + 1], config.activation)
        want += weights[:, slot : slot + 1].double() * alone.square()
    assert len(calls) == 1 and (have - want).norm() / want.norm() < 2e-2
    with pytest.raises(ValueError, match="sums up experts itself"):
        more |= {"apply_router_weight_on_input": True}
        run(kernels.MinferExperts, config, quant, x, w13, w2, weights[:, :1], ids[:, :1], hook=hook, **more)


@pytest.mark.parametrize("mode", ["blocks", "channels"])
def test_fp8(mode):
    torch.manual_seed(1)
    config = layer_config()
    w13, w2 = (torch.randn(EXPERTS, *shape).to(FP8) for shape in ((2 * INTER, HIDDEN), (HIDDEN, INTER)))

    def scale_of(weight):
        e, n, k = weight.shape
        shape = (e, n // 128, k // 128) if mode == "blocks" else (e, n, 1)
        return (0.5 + torch.rand(shape)) / 12

    scales = [scale_of(w13), scale_of(w2)]
    blocks = {"block_shape": [128, 128]} if mode == "blocks" else {"per_act_token_quant": True, "per_out_ch_quant": True}
    quant = moe_configs.fp8_w8a8_moe_quant_config(w1_scale=scales[0], w2_scale=scales[1], **blocks)
    x, (weights, ids) = torch.randn(9, HIDDEN).bfloat16(), routed(9)
    have = run(kernels.MinferFp8Experts, config, quant, x, w13, w2, weights, ids).double()
    spread = [s.double().repeat_interleave(128, 1).repeat_interleave(128, 2) if mode == "blocks" else s.double() for s in scales]
    want = ffn(x, w13.double() * spread[0], w2.double() * spread[1], weights, ids, MoEActivation.SILU)
    error = (have - want).norm() / want.norm()
    assert have.isfinite().all() and error < 5e-2, error  # of e4m3's roundings of the activations


def test_oracles_ask_them_first():
    format = mk.FusedMoEActivationFormat.Standard
    assert unquantized.backend_to_kernel_cls(unquantized.UnquantizedMoeBackend.TRITON)[0] is kernels.MinferExperts
    own = fp8.backend_to_kernel_cls(fp8.Fp8MoeBackend.TRITON)
    assert own[0] is kernels.MinferFp8Experts and own.count(kernels.MinferFp8Experts) == 1
    block = (keys.kFp8Static128BlockSym, keys.kFp8Dynamic128Sym)
    chosen = fp8.select_fp8_moe_backend(layer_config(), *block)
    assert chosen == (fp8.Fp8MoeBackend.TRITON, kernels.MinferFp8Experts)

    def answer(kind, config, *scheme):
        return kind.is_supported_config(kind, config, *(scheme or (None, None)), format)

    assert answer(kernels.MinferExperts, layer_config()) == (True, None)
    for reason, kind, config, *scheme in (
        ("activation", kernels.MinferExperts, layer_config(MoEActivation.RELU2)),
        ("swiglu_limit", kernels.MinferExperts, layer_config(swiglu_limit=10.0)),
        ("swiglu_alpha", kernels.MinferExperts, layer_config(MoEActivation.SWIGLUOAI, swiglu_alpha=1.0)),
        ("quantization scheme", kernels.MinferExperts, layer_config(), *block),
        ("quantization scheme", kernels.MinferFp8Experts, layer_config(), keys.kFp8StaticTensorSym, keys.kFp8StaticTensorSym),
        ("quantization scheme", kernels.MinferFp8Experts, layer_config()),
    ):
        able, why = answer(kind, config, *scheme)
        assert not able and reason in why, (reason, why)
