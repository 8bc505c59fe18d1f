"""Experts of 4-bit weights by vLLM's own quantisation methods: chosen, loaded in the form of the checkpoint, run by vLLM's modular kernel,
against float64."""

from __future__ import annotations

import pytest
import torch

vllm = pytest.importorskip("vllm")

from compressed_tensors.quantization import QuantizationArgs  # noqa: E402
from minfer.integrations.vllm import packed_experts as kernels  # noqa: E402
from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # noqa: E402
from vllm.model_executor.layers.fused_moe.oracle import int_wna16 as oracle  # noqa: E402
from vllm.model_executor.layers.quantization import auto_awq, auto_gptq  # noqa: E402
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (  # noqa: E402
    compressed_tensors_moe_wna16 as compressed,
)

from .cases import EXPERTS, HIDDEN, INTER, ffn, layer_config, packed, routed  # noqa: E402

AWQ_ORDER = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # nibble i of a word holds its column order[i]


@pytest.fixture(autouse=True)
def registered(config, adapter):
    adapter.register_experts()
    adapter.register_experts()


class Layer(torch.nn.Module):
    """What vLLM's methods read of a layer."""

    expert_map, apply_router_weight_on_input, input_dtype = None, False, None
    global_num_experts, _loaded_expert_biases = EXPERTS, frozenset()

    def __init__(self, config):
        super().__init__()
        self.moe_config, self.activation = config, config.activation
        self.intermediate_size_per_partition = config.intermediate_size_per_partition

    def _expert_routing_tables(self):
        return None


def codes_of(experts: int, n: int, k: int, group: int, zeros: bool):
    """Codes [experts, n, k], scales and zero points [experts, n, groups], and what they stand for in float64."""
    groups = k // group
    codes = torch.randint(0, 16, (experts, n, k))
    scales = ((0.5 + torch.rand(experts, n, groups)) * 0.03).bfloat16()
    points = torch.randint(0, 16, (experts, n, groups)) if zeros else torch.full((experts, n, groups), 8)
    spread = [x.double().repeat_interleave(group, 2) for x in (scales, points)]
    return codes, scales, points, (codes.double() - spread[1]) * spread[0]


def compressed_tensors(config, group, zeros, **more):
    given = dict(num_bits=4, type="int", symmetric=not zeros, strategy="group", group_size=group) | more
    return compressed.CompressedTensorsWNA16MoEMethod(QuantizationArgs(**given), None, config)


def gptq(config, group, **more):
    given = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": True} | more
    return auto_gptq.AutoGPTQMoEMethod(auto_gptq.AutoGPTQConfig.from_config(given), config)


def awq(config, group, zeros):
    given = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": zeros, "lm_head": False}
    return auto_awq.AutoAWQMoEMethod(auto_awq.AutoAWQConfig.from_config(given), config)


def load(form: str, layer: Layer, name: str, codes, scales, points) -> None:
    """One of the two weights, as a checkpoint of the form has it."""
    by_column = [x.transpose(1, 2) for x in (codes, scales, points)]
    if form == "compressed-tensors":
        getattr(layer, f"{name}_weight_packed").data.copy_(packed(codes, 4, 2))
        getattr(layer, f"{name}_weight_scale").data.copy_(scales)
        if hasattr(layer, f"{name}_weight_zero_point"):
            getattr(layer, f"{name}_weight_zero_point").data.copy_(packed(points, 4, 1))
        return
    if form == "gptq":
        words, zeros = packed(by_column[0], 4, 1), torch.zeros_like(packed(by_column[2], 4, 2))  # which symmetric weights do not need
    else:
        words, zeros = (packed(x.unflatten(2, (-1, 8))[..., AWQ_ORDER].flatten(2), 4, 2) for x in (by_column[0], by_column[2]))
    getattr(layer, f"{name}_qweight").data.copy_(words)
    getattr(layer, f"{name}_scales").data.copy_(by_column[1])
    getattr(layer, f"{name}_qzeros").data.copy_(zeros)


CASES = {
    "compressed-tensors": (128, False),
    "compressed-tensors, groups of 32": (32, False),
    "compressed-tensors, zero points": (64, True),
    "gptq": (128, False),
    "gptq, biases": (64, False),
    "awq": (128, True),
    "awq, symmetric": (128, False),
    "compressed-tensors, experts of another rank": (128, False),
    "compressed-tensors, one group of w13": (256, False),
}


@pytest.mark.parametrize("case", CASES)
def test_against_float64(case):
    torch.manual_seed(len(case))
    group, zeros = CASES[case]
    form, inter = case.partition(",")[0], 512 if group == 256 else INTER
    config = layer_config(has_bias="biases" in case, intermediate=inter)
    arguments = (config, group) if form == "gptq" else (config, group, zeros)
    method = {"compressed-tensors": compressed_tensors, "gptq": gptq, "awq": awq}[form](*arguments)
    assert method.experts_cls is kernels.MinferPackedExperts
    layer, experts = Layer(config), EXPERTS
    if case.endswith("of another rank"):
        experts = 4
        layer.expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
        layer.expert_map[2:6] = torch.arange(4, dtype=torch.int32)
    sizes = dict(num_experts=experts, hidden_size=HIDDEN, intermediate_size_per_partition=inter, params_dtype=torch.bfloat16)
    method.create_weights(layer, **sizes, weight_loader=lambda *_: None)
    made = [codes_of(experts, n, k, group, zeros) for n, k in ((2 * inter, HIDDEN), (HIDDEN, inter))]
    for name, (codes, scales, points, _) in zip(("w13", "w2"), made, strict=True):
        load(form, layer, name, codes, scales, points)
    biases = [None, None]
    if "biases" in case:
        biases = [torch.randn(experts, n).bfloat16() / 4 for n in (2 * inter, HIDDEN)]
        layer._loaded_expert_biases = {"w13_bias", "w2_bias"}
        for name, bias in zip(("w13_bias", "w2_bias"), biases, strict=True):
            getattr(layer, name).data.copy_(bias)
    method.process_weights_after_loading(layer)
    x, (weights, ids) = torch.randn(9, HIDDEN).bfloat16(), routed(9)
    have = method.apply(layer, x, weights, ids, None, None).double()
    here = ids if layer.expert_map is None else layer.expert_map[ids]
    want = ffn(x, made[0][3], made[1][3], weights, here, MoEActivation.SILU, *biases)
    error = (have - want).norm() / want.norm()
    assert have.shape == x.shape and have.isfinite().all() and error < 8e-3, error


def test_what_stays_vllms(monkeypatch):
    """The reason names what is in the way, and then vLLM's own choice is asked."""
    config = layer_config()
    key = compressed.QuantKey(compressed.WNA16_SUPPORTED_TYPES_MAP[4], compressed.kInt4StaticGroupScale)

    def reason(config=config, **more):
        given = dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=128) | more
        return kernels.why_not(config, key, QuantizationArgs(**given))

    assert reason() is None
    assert reason(group_size=48) == "groups of 48"
    assert "end within a group of 256" in reason(group_size=256)
    for more in (dict(num_bits=8), dict(strategy="channel", group_size=None), dict(actorder="group")):
        assert "QuantizationArgs" in reason(**more)
    assert reason(layer_config(moe_backend="marlin")) == "moe_backend is marlin"
    assert reason(layer_config(is_lora_enabled=True)) == "LoRA"
    with monkeypatch.context() as environment:
        environment.setenv("VLLM_MARLIN_INPUT_DTYPE", "int8")
        assert "asks Marlin for activations in int8" in reason()
    own = auto_gptq.AutoGPTQConfig.from_config({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True})
    assert kernels.why_not(config, key, own) is None
    own.desc_act = True
    assert "AutoGPTQConfig" in kernels.why_not(config, key, own)
    backend, experts = oracle.select_wna16_moe_backend(config, key, own, False, False)
    assert isinstance(backend, oracle.WNA16MoEBackend) and experts is not kernels.MinferPackedExperts


def test_every_importer_has_the_wrapped_functions():
    for name in ("select_wna16_moe_backend", "convert_to_wna16_moe_kernel_format", "make_wna16_moe_kernel"):
        assert {getattr(module, name) for module in (auto_awq, auto_gptq, compressed)} == {getattr(oracle, name)}
        assert not hasattr(getattr(oracle, name).__wrapped__, "__wrapped__")  # wrapped, and once
