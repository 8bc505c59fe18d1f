"""Quantised models through from_pretrained and save_pretrained, and the checkpoints of other tools."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from minfer import quantize  # noqa: E402
from minfer.formats.weight_formats import NF4  # noqa: E402
from minfer.integrations.decoder.scheme import KINDS, WeightScheme  # noqa: E402
from minfer.integrations.transformers import MinferConfig, load_quantized, optimize  # noqa: E402
from minfer.integrations.transformers.quantized_experts import QuantizedExperts  # noqa: E402
from minfer.nn import Fp8Linear, Int8Linear, W4Linear, W8Linear  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from ..quantize.test_formats import fp4_bytes, json_tensor  # noqa: E402
from ..quantize.test_quantize import compressed, gptq_tensors, words_along  # noqa: E402
from .tiny_models import CONFIGS, MOE, assert_as_good, errors, exact_model, random_tokens, tiny_model  # noqa: E402

_SIZES = dict(hidden_size=128, intermediate_size=256)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of tiny models, by name."""
    folders: dict[str, Path] = {}

    def folder_of(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            sizes = {} if name == "gpt2" else _SIZES | ({"moe_intermediate_size": 64} if name == "qwen3_moe" else {})
            tiny_model(name, **sizes).save_pretrained(folders[name])
        return folders[name]

    return folder_of


def loaded(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).eval()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("weights", [*KINDS, WeightScheme("fp8", -1)], ids=str)
def test_quantised_while_loading(name, weights, saved, tmp_path):
    """The weights of optimize(weights=..), saved and loaded bit by bit, and taken over by optimize as they are."""
    ids, plain = random_tokens(2, 10), loaded(saved(name))
    with optimize(plain, weights=weights):
        wanted = plain(ids).logits
    kind, size = (weights, None) if isinstance(weights, str) else (weights.kind, weights.group_size)
    limit = {"fp8": 0.4, "int8": 0.2}.get(kind, 0.1)  # activations' codes may be one apart
    model = loaded(saved(name), quantization_config=MinferConfig(kind, group_size=size))
    logits = model(ids).logits
    assert errors(logits, wanted).median() <= limit
    linears = [module for module in model.modules() if isinstance(module, (W4Linear, W8Linear, Fp8Linear, Int8Linear))]
    assert len(linears) >= 12 and isinstance(model.get_output_embeddings(), torch.nn.Linear)
    if name in MOE and kind != "w8a16":
        assert any(isinstance(module, QuantizedExperts) for module in model.modules())
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"] == "minfer"
    again = loaded(tmp_path)
    assert torch.equal(again(ids).logits, logits)
    assert all(torch.equal(x, again.state_dict()[key]) for key, x in model.state_dict().items())
    with optimize(again) as handle:
        assert errors(again(ids).logits, wanted).median() <= limit
        assert not handle.left, handle
    assert torch.equal(again(ids).logits, logits)


def test_parts_and_modules_to_keep(saved):
    model = loaded(saved("gpt_oss"), quantization_config=MinferConfig("mxfp4", parts="experts"))
    names = model.config.quantization_config.modules
    assert len(names) == 3 and {type(model.get_submodule(name)) for name in names} == {QuantizedExperts}
    config = MinferConfig("w4a16", group_size=32, modules_to_not_convert=["down_proj"])
    model = loaded(saved("llama"), quantization_config=config)
    assert type(model.model.layers[0].mlp.down_proj) is torch.nn.Linear
    assert model.model.layers[0].mlp.up_proj.group_size == 32
    back = model.dequantize()
    assert type(back.model.layers[0].mlp.up_proj) is torch.nn.Linear


def test_errors(saved, tmp_path):
    with pytest.raises(ValueError, match="weights must be one of"):
        MinferConfig("w3")
    with pytest.raises(ValueError, match="group_size must be None for int8, got 64"):
        MinferConfig("int8", group_size=64)
    with pytest.raises(ValueError, match="group_size must be 128 or -1 for fp8, got 64"):
        MinferConfig("fp8", group_size=64)
    with pytest.raises(ValueError, match="parts must be one of all, experts, got 'some'"):
        MinferConfig("w4a16", parts="some")
    with pytest.raises(ValueError, match="no module that could be quantised"):
        loaded(saved("llama"), quantization_config=MinferConfig("w4a16", parts="experts"))
    foreign(saved("llama"), tmp_path, {"quant_method": "hqq"}, lambda n, k: None)
    with pytest.raises(ValueError, match="quant_method must be one of gptq, awq, .*, got 'hqq'"):
        load_quantized(tmp_path, device="cpu")


# ---- other tools -------------------------------------------------------------------------------------------------------------------------


def random_codes(n: int, k: int, groups: int):
    codes = torch.randint(0, 16, (n, k))
    return codes, (torch.rand(groups, n) * 0.02 + 0.02).bfloat16(), torch.randint(4, 12, (groups, n))


def gptq(n, k):
    codes, scales, zeros = random_codes(n, k, k // 64)
    tensors = gptq_tensors(codes, scales, zeros, torch.arange(k) // 64)
    return tensors, quantize.from_gptq(tensors, group_size=64).dequantize()


def gptq_act_order(n, k):
    codes, scales, zeros = random_codes(n, k, k // 64)
    tensors = gptq_tensors(codes, scales, zeros, (torch.arange(k) // 64)[torch.randperm(k)])
    return tensors, quantize.from_gptq(tensors, group_size=64).dequantize()


def awq(n, k):
    codes, scales, zeros = random_codes(n, k, k // 64)
    tensors = {"qweight": words_along(codes.t(), 1, _AWQ_ORDER), "qzeros": words_along(zeros, 1, _AWQ_ORDER), "scales": scales}
    return tensors, quantize.from_awq(tensors, group_size=64).dequantize()


def pack_quantized(n, k):
    codes, scales, _ = random_codes(n, k, k // 64)
    tensors = compressed(codes - 8, scales)
    return tensors, quantize.from_compressed_tensors(tensors).dequantize()


def nvfp4(n, k):
    tensors = {
        "weight_packed": torch.randint(0, 256, (n, k // 2), dtype=torch.uint8),
        "weight_scale": (torch.rand(n, k // 16) * 8 + 1).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([250.0]),
    }
    return tensors, quantize.from_compressed_tensors(tensors, format="nvfp4-pack-quantized", dtype=torch.bfloat16).dequantize()


def fp8_channels(n, k):
    tensors = {"weight": torch.randn(n, k).to(torch.float8_e4m3fn), "weight_scale": torch.rand(n, 1) * 0.1 + 0.05}
    return tensors, quantize.from_fp8(tensors).dequantize()


def fp8_blocks(n, k):
    tensors = {"weight": torch.randn(n, k).to(torch.float8_e4m3fn), "weight_scale_inv": torch.rand(-(-n // 128), -(-k // 128)) * 0.1 + 0.05}
    return tensors, quantize.from_fp8(tensors).dequantize()


def int8_channels(n, k):
    tensors = {"weight": torch.randint(-127, 128, (n, k), dtype=torch.int8), "weight_scale": torch.rand(n, 1) * 0.002 + 0.001}
    return tensors, quantize.from_int8(tensors).dequantize()


def nf4(n, k):
    codes, absmax = torch.randint(0, 16, (n, k)), torch.rand(n * k // 64) * 0.1 + 0.1
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [n, k]}
    tensors = {
        "weight": fp4_bytes(codes.flatten(), high_first=True)[:, None],
        "weight.quant_map": torch.tensor(NF4),
        "weight.absmax": absmax,
        "weight.quant_state.bitsandbytes__nf4": json_tensor(state),
    }
    return tensors, quantize.from_bitsandbytes(tensors).dequantize()


_DYNAMIC = {"config_groups": {"group_0": {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8, "dynamic": True}}}}
_W4 = {"config_groups": {"group_0": {"weights": {"num_bits": 4}, "input_activations": None}}}
_SOURCES = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "desc_act": False}, W4Linear),
    "gptq act-order": (gptq_act_order, {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "desc_act": True}, W4Linear),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}, W4Linear),
    "pack-quantized": (pack_quantized, {"quant_method": "compressed-tensors", "format": "pack-quantized", **_W4}, W4Linear),
    "nvfp4": (nvfp4, {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", **_W4}, W4Linear),
    "float-quantized": (fp8_channels, {"quant_method": "compressed-tensors", "format": "float-quantized", **_DYNAMIC}, Fp8Linear),
    "int-quantized": (int8_channels, {"quant_method": "compressed-tensors", "format": "int-quantized", **_DYNAMIC}, Int8Linear),
    "fp8": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}, Fp8Linear),
    "bitsandbytes": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, W4Linear),
}


def foreign(folder: Path, target: Path, source: dict, layer) -> dict[str, torch.Tensor]:
    """A copy of a saved model with another tool's layers, and the weights that these stand for."""
    torch.manual_seed(7)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": source}
    (target / "config.json").write_text(json.dumps(config))
    state, dense = load_file(folder / "model.safetensors"), {}
    for key in list(state):
        linear = key.removesuffix(".weight")
        if not linear.endswith("_proj") or layer(8, 64) is None:
            continue
        tensors, weight = layer(*state[key].shape)
        del state[key]
        state |= {f"{linear}.{name}": x.contiguous() for name, x in tensors.items()}
        dense[key] = weight
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    return dense


@pytest.mark.parametrize("source", _SOURCES)
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_other_tools(name, source, saved, tmp_path):
    layer, config, kind = _SOURCES[source]
    dense, ids = foreign(saved(name), tmp_path, config, layer), random_tokens(2, 12)
    plain = loaded(saved(name))
    for key, weight in dense.items():
        plain.get_parameter(key).copy_(weight)
    truth, theirs = exact_model(plain)(ids).logits, plain(ids).logits
    model = load_quantized(str(tmp_path), device="cpu")
    assert len(dense) == 21 and all(type(model.get_submodule(key.removesuffix(".weight"))) is kind for key in dense)

    def check(logits) -> None:
        if kind in (W4Linear, W8Linear):
            assert_as_good(logits, theirs, truth)
        else:  # activations are quantised
            assert errors(logits, truth).median() < 0.5

    check(model(ids).logits)
    with optimize(model) as handle:
        assert not handle.left, handle
        check(model(ids).logits)
        assert any("3 products" in text for text in handle.done) == (
            source in ("gptq act-order", "fp8")
        )  # fp8: of so few rows that blocks would cross
    model.save_pretrained(tmp_path / "own")
    logits = model(ids).logits
    assert torch.equal(loaded(tmp_path / "own")(ids).logits, logits)


def expert_names(name: str) -> tuple[str, str, str]:
    return ("gate_proj", "up_proj", "down_proj") if name == "qwen3_moe" else ("w1", "w3", "w2")


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("source", ["gptq", "fp8"])
def test_experts_of_other_tools(name, source, saved, tmp_path):
    """Experts that a file has one by one, under the names of their checkpoints."""
    layer, config, _ = _SOURCES[source]
    ids, plain = random_tokens(2, 12), loaded(saved(name))
    reference, state = copy.deepcopy(plain), {}
    for key, x in plain.state_dict().items():
        module, _, tensor = key.rpartition(".")
        if tensor not in ("gate_up_proj", "down_proj"):
            state[key.replace("mlp.", "block_sparse_moe.") if name == "mixtral" and ".mlp.gate" in key else key] = x
            continue
        target = reference.get_parameter(key)
        place = module.replace("mlp.", "block_sparse_moe.") if name == "mixtral" else module
        gate, up, down = expert_names(name)
        for expert in range(x.shape[0]):
            parts = (
                ((gate, slice(None, x.shape[1] // 2)), (up, slice(x.shape[1] // 2, None)))
                if tensor == "gate_up_proj"
                else ((down, slice(None)),)
            )
            for own, rows in parts:
                tensors, dense = layer(*x[expert, rows].shape)
                state |= {f"{place}.{expert}.{own}.{n}": t.contiguous() for n, t in tensors.items()}
                target[expert, rows] = dense
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((saved(name) / "config.json").read_text()) | {"quantization_config": config})
    )
    save_file({key: x.contiguous() for key, x in state.items()}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load_quantized(str(tmp_path), device="cpu")
    assert sum(isinstance(module, QuantizedExperts) for module in model.modules()) == (2 if name == "qwen3_moe" else 3)
    truth = exact_model(reference)(ids).logits
    assert errors(model(ids).logits, truth).median() < (0.05 if source == "gptq" else 0.4)
    with optimize(model) as handle:
        assert not handle.left, handle
        assert errors(model(ids).logits, truth).median() < (0.05 if source == "gptq" else 0.4)


def test_gpt_oss(saved, tmp_path):
    ids, plain = random_tokens(2, 12), loaded(saved("gpt_oss"))
    state, reference = {}, copy.deepcopy(plain)
    for key, x in plain.state_dict().items():
        module, _, tensor = key.rpartition(".")
        if tensor not in ("gate_up_proj", "down_proj"):
            state[key] = x
            continue
        experts, k, n = x.shape
        blocks = torch.randint(0, 256, (experts, n, k // 32, 16), dtype=torch.uint8)
        scales = torch.randint(121, 124, (experts, n, k // 32), dtype=torch.uint8)
        state |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        codes = torch.stack([blocks & 15, blocks >> 4], -1).long().flatten(-2)
        dense = (values[codes] * torch.exp2(scales.float() - 127)[..., None]).flatten(-2)  # [experts, n, k]
        reference.get_parameter(key).copy_(dense.mT)
    config = json.loads((saved("gpt_oss") / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({key: x.contiguous() for key, x in state.items()}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load_quantized(str(tmp_path), device="cpu")
    assert sum(isinstance(module, QuantizedExperts) for module in model.modules()) == 3
    truth, theirs = exact_model(reference)(ids).logits, reference(ids).logits
    with optimize(model) as handle:
        assert not handle.left, handle
        assert_as_good(model(ids).logits, theirs, truth)


def test_a_plain_checkpoint_and_one_of_minfer(saved, tmp_path):
    ids = random_tokens(1, 6)
    assert torch.equal(load_quantized(str(saved("llama")), device="cpu")(ids).logits, loaded(saved("llama"))(ids).logits)
    model = loaded(saved("llama"), quantization_config=MinferConfig("w4a16"))
    model.save_pretrained(tmp_path)
    assert torch.equal(load_quantized(str(tmp_path), device="cpu")(ids).logits, model(ids).logits)
