"""Models that are divided among processes, over gloo, against one process."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

import minfer  # noqa: E402
from minfer.distributed import TensorParallel  # noqa: E402
from minfer.distributed.tensor_parallel import borders  # noqa: E402
from minfer.formats.weight_layout import MULTIPLE  # noqa: E402
from minfer.integrations.decoder.shard import owned, part_of_columns, part_of_rows  # noqa: E402
from minfer.integrations.decoder.weights import Dense  # noqa: E402
from minfer.integrations.transformers import optimize  # noqa: E402
from minfer.quantize import quantize_fp8_weight, quantize_int8_weight, quantize_w4, quantize_w8  # noqa: E402

from ..integrations.tiny_models import CONFIGS, tiny_model  # noqa: E402
from .cases import (  # noqa: E402
    architectures,
    architectures_with_sums_left,
    invariant_requests,
    norms_of_sums,
    quantised,
    run_ranks,
    sampled,
    sums_in_order,
)

pytestmark = pytest.mark.filterwarnings("ignore")
_SIZES = dict(hidden_size=256, intermediate_size=512, moe_intermediate_size=128, head_dim=64)


def test_every_architecture(tmp_path):
    first, second = run_ranks(2, "cpu", tmp_path, architectures, list(CONFIGS), {})
    assert first == second and set(first) == set(CONFIGS)


def test_more_ranks_than_heads_of_keys(tmp_path):
    found = run_ranks(4, "cpu", tmp_path, architectures, ["llama", "phi3", "gpt_oss"], {})
    assert all(other == found[0] for other in found[1:])


def test_uneven_parts(tmp_path):
    """Seven heads of keys, 88 columns and five experts among three ranks."""
    changes = dict(num_attention_heads=14, num_key_value_heads=7, head_dim=32, intermediate_size=88, num_local_experts=5)
    found = run_ranks(3, "cpu", tmp_path, architectures, ["mistral", "gpt_oss"], changes)
    assert all(other == found[0] for other in found[1:])


def test_quantised_weights(tmp_path):
    schemes = {"w4a16": ("w4a16", 128), "nf4": ("nf4", None), "mxfp4": ("mxfp4", None), "w8a16": ("w8a16", None)}
    schemes |= {"fp8": ("fp8", None), "fp8 rows": ("fp8", -1), "int8": ("int8", None)}
    found = run_ranks(2, "cpu", tmp_path, quantised, ["llama"], schemes, _SIZES)
    assert found[0] == found[1] and len(found[0]) == 7
    for name, (one, all_ranks, apart) in found[0].items():
        assert all_ranks <= 1.25 * one + 0.01, name
        # The others have scales of whole rows, or of blocks that k and v of a part share.
        assert apart < 0.04 or "16" not in name or "w8" in name, name


def test_quantised_experts(tmp_path):
    schemes = {"w4a16": ("w4a16", 64), "fp8": ("fp8", None)}
    found = run_ranks(2, "cpu", tmp_path, quantised, ["qwen3_moe"], schemes, _SIZES | {"mlp_only_layers": []})
    assert found[0] == found[1]
    assert all(all_ranks <= 1.25 * one + 0.01 for one, all_ranks, _ in found[0].values()), found[0]


def test_draws(tmp_path):
    first, second = run_ranks(2, "cpu", tmp_path, sampled)
    assert first == second and all(len(tokens) == 20 for tokens in first)


@pytest.mark.parametrize("ranks", [2, 3])
def test_batch_invariant_sums(tmp_path, ranks):
    assert run_ranks(ranks, "cpu", tmp_path, sums_in_order) == [[]] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_norms_of_sums(tmp_path, ranks):
    found = run_ranks(ranks, "cpu", tmp_path, norms_of_sums)
    assert not found[0]["wrong"] and found == [found[0]] * ranks


def test_sums_that_are_left_to_norms(tmp_path):
    """RMS norms of all kinds of layers make the sums behind them, the last one of the model included; layer norms and norms of outputs
    leave them alone."""
    names = ["llama", "qwen3_moe", "gemma3", "gpt2"]
    first, second = run_ranks(2, "cpu", tmp_path, architectures_with_sums_left, names)
    assert first == second
    assert first["llama, sums"]["with a residual"] > 0 and first["qwen3_moe, sums"]["with a residual"] > 0
    assert first["gemma3, sums"] == first["gpt2, sums"] == {}


def test_batch_invariant_requests(tmp_path):
    assert run_ranks(2, "cpu", tmp_path, invariant_requests, ["llama", "qwen3_moe"]) == [[], []]


# ---- parts of weights ------------------------------------------------------------------------------------------------------------


def _weights() -> dict[str, object]:
    w = torch.randn(192, 384, generator=torch.Generator().manual_seed(0)).bfloat16()
    bias = torch.randn(192, generator=torch.Generator().manual_seed(1)).bfloat16()
    return {
        "dense": Dense(w, bias),
        "w4, groups of 128": quantize_w4(w, 128, bias=bias),
        "w4 with zero points": quantize_w4(w, 64, False, bias=bias),
        "w4, one group": quantize_w4(w, -1, bias=bias),
        "mxfp4": quantize_w4(w, 32, True, "mxfp4", bias=bias),
        "w8": quantize_w8(w, -1, bias=bias),
        "fp8, blocks": quantize_fp8_weight(w, "block128", bias=bias),
        "fp8, rows": quantize_fp8_weight(w, "channel", bias=bias),
        "int8": quantize_int8_weight(w, bias=bias),
        "int8, one scale": quantize_int8_weight(w, "tensor", bias=bias),
    }


def _numbers(weight) -> torch.Tensor:
    return weight.weight if isinstance(weight, Dense) else weight.dequantize()


@pytest.mark.parametrize("name", _weights())
@pytest.mark.parametrize("begin, end", [(0, 128), (128, 192), (64, 192), (72, 136), (5, 7)])
def test_parts_have_the_numbers_of_the_whole(name, begin, end):
    whole = _weights()[name]
    rows = part_of_rows(whole, (begin, end), torch.bfloat16)
    assert torch.equal(_numbers(rows), _numbers(whole)[begin:end]) and torch.equal(rows.bias, whole.bias[begin:end])
    for with_bias in (True, False):
        columns = part_of_columns(whole, (begin, end), torch.bfloat16, with_bias)
        assert torch.equal(_numbers(columns), _numbers(whole)[:, begin:end])
        assert columns.bias is (whole.bias if with_bias else None)
    for part in (rows, columns):
        own, places = (
            owned(part, torch.device("cpu")),
            {x.untyped_storage().data_ptr() for x in vars(whole).values() if isinstance(x, torch.Tensor)},
        )
        assert torch.equal(_numbers(own), _numbers(part))
        assert not places & {x.untyped_storage().data_ptr() for x in vars(own).values() if isinstance(x, torch.Tensor)}
    borders_fit = {"mxfp4": 32, "fp8, blocks": 128}.get(name, 32 if name.startswith("w4,") and "one" not in name else 1)
    kept = begin % borders_fit == 0 and ((end - begin) % MULTIPLE == 0 or "8" in name and not name.startswith("w"))
    if name == "w4 with zero points":
        kept = begin % 32 == 0 and (end - begin) % MULTIPLE == 0
    assert (type(columns) is type(whole)) == (kept or name == "dense")


def test_act_order_becomes_dense():
    w = torch.randn(64, 128).bfloat16()
    perm = torch.randperm(128).to(torch.int32)
    weight = quantize_w4(w, 64)
    weight = type(weight)(**(vars(weight) | {"perm": perm}))
    part = part_of_columns(weight, (64, 128), torch.bfloat16, True)
    assert isinstance(part, Dense) and torch.equal(part.weight, weight.dequantize()[:, 64:])


@pytest.mark.parametrize(
    "count, ranks, unit, expected", [(8, 2, 1, [0, 4, 8]), (7, 3, 1, [0, 2, 4, 7]), (96, 2, 64, [0, 64, 96]), (5, 8, 1, None)]
)
def test_borders(count, ranks, unit, expected):
    found = borders(count, ranks, unit)
    assert found[0] == 0 and found[-1] == count and found == sorted(found) and len(found) == ranks + 1
    assert expected is None or found == expected


def test_bad_arguments():
    with pytest.raises(RuntimeError, match="a process group must be initialised first"):
        TensorParallel()
    assert minfer.distributed.TensorParallel is TensorParallel


def _alone(rank: int, ranks: int, device: torch.device) -> list[str]:
    """Errors in the main process would need a group there."""
    said = []
    parallel = TensorParallel()
    for changes, options in (({}, {"fuse": False}), ({"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}, {})):
        model = tiny_model("mistral", **changes)
        try:
            handle = optimize(model, parallel=parallel, **options)
            said.append(str(handle))
        except ValueError as error:
            said.append(str(error))
    return said


def test_what_cannot_be_divided(tmp_path):
    for fuse, heads in run_ranks(3, "cpu", tmp_path, _alone):
        assert "parallel needs fuse" in fuse
        assert "its 6 heads and 2 of keys cannot be divided among 3 ranks" in heads
