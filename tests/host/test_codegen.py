"""The kernel generator: names, legality, shared-memory budget, shards, registry, tuned tables. Needs neither torch nor a GPU."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "cpp"), str(ROOT / "third_party")]

from codegen import (
    configs,
    cost_models,
    format_files,
    formats,
    generate,
    registry,
    shards,
    tuned,
    wgmma_headers,
)
from codegen.families.attention import AttentionKernel
from codegen.families.fused import OPERATIONS, FusedKernel
from codegen.families.gemm import GemmKernel
from codegen.families.grouped_scaled_gemm import GroupedScaledGemmKernel
from codegen.families.norm_gemm import NormGemmKernel
from codegen.families.quantized_gemm import QuantizedGemmKernel
from codegen.families.scaled_gemm import ScaledGemmKernel
from codegen.hardware import SM80_SMEM_LIMIT, SM90_SMEM_LIMIT
from codegen.row import Row
from codegen.toml import ConfigError
from locate import locate

SM90 = {
    "arch": "sm90",
    "elements": ["f16", "bf16"],
    "layouts": ["tn", "tt"],
    "tile": [128, 256, 64],
    "cluster": [2, 1, 1],
    "schedule": "cooperative",
    "note": 'says "why"',
}
SM80 = {
    "arch": "sm80",
    "elements": ["f16"],
    "layouts": ["tn", "nt"],
    "tile": [128, 128, 32],
    "warps": [2, 2],
    "stages": 4,
    "schedule": "multistage",
}

COLUMNS = {**SM90, "layouts": ["tn"], "tile": [256, 160, 64], "swap": True, "column_step": 16}

W4A16_SM90 = {
    "arch": "sm90",
    "elements": ["f16"],
    "formats": ["int4"],
    "tile": [128, 16, 128],
    "cluster": [1, 1, 1],
    "warpgroups": 2,
    "ctas_per_sm": 2,
    "scaling": "accumulators",
}
W4A16_SM80 = {
    "arch": "sm80",
    "elements": ["f16", "bf16"],
    "formats": ["int4"],
    "tile": [128, 64, 64],
    "warpgroups": 1,
    "stages": 3,
}


VECTOR = {"vector": True, "tile": [1, 16, 1024], "warps": [1, 16], "stages": None, "layouts": ["nn"]}  # changes of SM80


def expand(base: dict, **changes) -> list:
    row = {**base, **changes}
    family = QuantizedGemmKernel if "formats" in base else GemmKernel
    return family.expand(Row({key: value for key, value in row.items() if value is not None}, "gemm.toml: kernel row 7"))


def expand_attention(fields: dict) -> list:
    return AttentionKernel.expand(Row(fields, "row 1"))


def table_text(*rows: dict) -> str:
    """One group, a line for each row."""
    lines = ("  { " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in row.items()) + " },\n" for row in rows)
    return '[family]\nname = "gemm"\n\n[[group]]\nkernels = [\n' + "".join(lines) + "]\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configs folder with one sm90 and one sm80 row."""
    (tmp_path / "configs" / "tuned").mkdir(parents=True)
    (tmp_path / "configs" / "gemm.toml").write_text(table_text(SM90, SM80))
    shutil.copytree(ROOT / "cpp" / "configs" / "models", tmp_path / "configs" / "models")
    return tmp_path / "configs"


# ---- names and fields ---------------------------------------------------------------------------------------------------------


def test_names_are_derived_from_the_row():
    assert [kernel.name for kernel in expand(SM90)] == [
        "gemm_sm90_f16_tn_128x256x64_2x1x1_cooperative",
        "gemm_sm90_f16_tt_128x256x64_2x1x1_cooperative",
        "gemm_sm90_bf16_tn_128x256x64_2x1x1_cooperative",
        "gemm_sm90_bf16_tt_128x256x64_2x1x1_cooperative",
    ]
    swapped = expand(SM90, tile=[64, 16, 128], cluster=[1, 1, 1], schedule="pingpong", swap=True, elements=["f16"], layouts=["tn"])
    assert swapped[0].name == "gemm_sm90_f16_tn_64x16x128_1x1x1_pingpong_swap"
    unaligned = expand(SM80, unaligned=True, tile=[32, 64, 64], warps=[2, 2])
    assert unaligned[1].name == "gemm_sm80_f16_nt_32x64x64_1x1x1_multistage_unaligned"
    vector = expand(SM80, **VECTOR)
    assert vector[0].name == "gemm_sm80_f16_nn_1x16x1024_1x1x1_multistage_vector"
    assert [kernel.name for kernel in expand(W4A16_SM80)] == [
        "w4a16_sm80_f16_int4_128x64x64_1x1x1_w1_multistage",
        "w4a16_sm80_bf16_int4_128x64x64_1x1x1_w1_multistage",
    ]
    assert expand(W4A16_SM90)[0].name == "w4a16_sm90_f16_int4_128x16x128_1x1x1_w2x2_acc"
    in_order = expand({**W4A16_SM90, "scaling": "fragments", "in_order": True})[0]
    assert (in_order.name, in_order.sums) == ("w4a16_sm90_f16_int4_128x16x128_1x1x1_w2x2_frag_sync", "wgmma16")
    two_sums = expand({**W4A16_SM90, "tile": [128, 8, 128], "scaling": "fragments"})[0]
    assert two_sums.sums == "mma16_frag"  # mma.sync that adds k blocks to two sums by turns


def test_layout_letters_are_majors_of_the_callers_operands():
    majors = {k.layout: (k.a_major, k.b_major) for k in expand(SM80, layouts=["tn", "tt", "nn", "nt"])}
    assert majors == {"tn": ("k", "k"), "tt": ("k", "mn"), "nn": ("mn", "k"), "nt": ("mn", "mn")}


def test_alignment_and_threads():
    assert (expand(SM90)[0].alignment, expand(SM90)[0].threads) == (16, 384)
    assert (expand(SM80)[0].alignment, expand(SM80)[0].threads) == (16, 128)
    assert expand(SM80, unaligned=True, tile=[64, 64, 64], warps=[2, 2])[0].alignment == 2
    vector = expand(SM80, **VECTOR)[0]
    assert (vector.alignment, vector.threads, vector.smem_bytes) == (2, 512, 4 * 16 * 16 + 16)
    assert (expand(W4A16_SM80)[0].alignment, expand(W4A16_SM80)[0].threads) == (16, 128)
    assert expand(W4A16_SM80, tile=[128, 128, 64], warpgroups=2)[0].threads == 256


FUSED = {"operation": "activation", "elements": ["f16", "f32"], "vectors": [1, 4]}


def test_fused_rows():
    """Operators on rows: names, and what a row of the table must not say."""
    kernels = FusedKernel.expand(Row(FUSED, "row 1"))
    names = [f"fused_sm80_{element}_activation_x{8 * vectors}" for element in ("f16", "f32") for vectors in (1, 4)]
    assert [kernel.name for kernel in kernels] == names and {kernel.schedule for kernel in kernels} == {"rows"}
    whole = {"operation": "rms_norm", "elements": ["bf16"], "quantized": True, "whole": True, "vectors": [2]}
    assert [kernel.name for kernel in FusedKernel.expand(Row(whole, "row 1"))] == ["fused_sm80_bf16_rms_norm_quantized_rows_x16"]
    ring = {"operation": "softmax", "elements": ["bf16", "f32"], "whole": True, "ring": True}
    kernels = FusedKernel.expand(Row(ring, "row 1"))
    assert [kernel.name for kernel in kernels] == ["fused_sm90_bf16_softmax_rows_ring_x128", "fused_sm90_f32_softmax_rows_ring_x64"]
    assert all(kernel.targets == "sm90a" and 190 << 10 < kernel.smem_bytes <= SM90_SMEM_LIMIT for kernel in kernels)
    wrong = (
        ({"operation": "relu"}, "operation"),
        (ring | {"vectors": [2]}, "vectors"),
        (ring | {"vectors": None, "threads": 256}, "threads"),
        (ring | {"whole": False}, "softmax takes whole rows"),
        ({"ring": True, "vectors": None}, "holds whole rows"),
        ({"operation": "quantize", "quantized": True}, "elements"),  # not of float32
        ({"quantized": True}, "results of activation are not quantised"),
        ({"operation": "quantize", "elements": ["f16"]}, "quantize has codes as results"),
        ({"operation": "softmax"}, "softmax takes whole rows"),
        ({"whole": True}, "activation takes elements"),
        ({"operation": "gated_activation", "elements": ["f16"], "whole": True}, "takes whole rows only for their scales"),
        ({"vectors": [9]}, "vectors"),
        ({"vectors": [1, 1]}, "vectors"),
        ({"threads": 100}, "threads"),
        ({"tile": [1, 8, 1]}, "tile"),
    )
    for change, message in wrong:
        with pytest.raises(ConfigError, match=message):
            FusedKernel.expand(Row(FUSED | change, "row 1"))


def test_norm_gemm_rows():
    """Norm and GEMM in one launch: names, shared memory, and what a row of the table must not say."""
    row = {"elements": ["f16", "bf16"], "tokens": 8, "warps": 16, "ahead": 4}
    kernels = NormGemmKernel.expand(Row(row, "row 1"))
    assert [kernel.name for kernel in kernels] == [f"norm_gemm_sm80_{element}_8x16x32_warps16_ahead4" for element in ("f16", "bf16")]
    sums = 4 * (2 * 16 * 8 * 20 + 8 * 16 + 8)
    assert {(kernel.threads, kernel.smem_bytes, kernel.ctas_per_sm) for kernel in kernels} == {(512, sums, 1)}
    assert kernels[0].shard_group == kernels[1].shard_group and kernels[0].targets == "portable"
    wrong = (
        ({"tokens": 12}, "tokens"),
        ({"tokens": None}, "tokens"),
        ({"warps": 4}, "warps"),
        ({"ahead": 1}, "ahead"),
        ({"ahead": 9}, "ahead"),
        ({"ctas_per_sm": 2}, "4 units take 32 of the 64 registers"),
        ({"tokens": 16, "warps": 32, "ahead": 2}, "of the 64 registers"),
        ({"elements": ["f32"]}, "elements"),
        ({"tile": [8, 16, 32]}, "tile"),
    )
    for change, message in wrong:
        with pytest.raises(ConfigError, match=message):
            NormGemmKernel.expand(Row(row | change, "row 1"))


def test_the_projects_own_table():
    kernels = configs.read_tables(ROOT / "cpp" / "configs")
    names = [kernel.name for kernel in kernels]
    assert len(set(names)) == len(names)
    for kernel in kernels:
        assert kernel.smem_bytes <= (SM90_SMEM_LIMIT if kernel.arch == 90 else SM80_SMEM_LIMIT)
        if kernel.FAMILY == "attention":
            decode, prefill = (
                r"(_fp8_e4m3|_int8|_int4)?_decode",
                r"(x\d+)?(_codes|_fp8_e4m3|_int8|_int4)?_\d+x\d+_prefill(_invariant|_divided)?",
            )
            what = decode if kernel.schedule == "split_kv" else prefill
            assert re.fullmatch(rf"attention_sm(80|90)_b?f16_d\d+{what}", kernel.name)
            continue
        if kernel.FAMILY == "fused":
            place = r"90_(b?f16|f32)_{}_rows_ring" if kernel.ring else r"80_(b?f16|f32)_{}(_quantized)?(_rows)?"
            assert re.fullmatch(rf"fused_sm{place.format(kernel.operation)}_x\d+", kernel.name)
            continue
        if kernel.FAMILY == "norm_gemm":
            assert re.fullmatch(r"norm_gemm_sm80_b?f16_(8|16)x16x32_warps\d+_ahead\d", kernel.name)
            continue
        quantised = kernel.b_format != "dense"
        grouped = "moe_" if kernel.FAMILY == "moe_w4a16" else ""
        start, what = (
            (f"{grouped}w[48]a16", f"({'|'.join(formats.project_formats().weights)})") if quantised else (kernel.FAMILY, "[tn]{2}")
        )
        if kernel.FAMILY == "w4a8":
            start, what = "w4a8", "int4"
        assert re.fullmatch(rf"{start}_sm(80|90)_{kernel.element}_{what}_\d+x\d+x\d+_\dx\dx1_[a-z0-9_]+", kernel.name)
    # "Any shape, one answer": each element type and layout has a kernel that takes any pointer and stride on any GPU.
    for element in ("f16", "bf16"):
        for layout in ("tn", "tt", "nn", "nt"):
            assert any(
                isinstance(k, GemmKernel) and k.unaligned and not k.vector and (k.element, k.layout) == (element, layout) for k in kernels
            )
        # and 4-bit weights one that takes every group size on any GPU.
        assert any(k.FAMILY == "w4a16" and k.arch == 80 and (k.element, k.group_multiple) == (element, 32) for k in kernels)
    # Operators on rows: each is there for both 16-bit types, and those that torch also has of float32 for that.
    rows = {(k.operation, k.element, k.quantized) for k in kernels if k.FAMILY == "fused"}
    for operation, (_, float32, quantizable, _) in OPERATIONS.items():
        for element in ("f16", "bf16", *(["f32"] if float32 else [])):
            assert operation == "quantize" or (operation, element, False) in rows
            assert not quantizable or (operation, element, True) in rows
    # At most 44 kernels of attention in a wheel for sm_90a, and 26 of its batch-invariant mode.
    own = [k for k in configs.buildable(kernels, ["90a"]) if k.FAMILY == "attention"]
    assert sum(not k.invariant for k in own) <= 44 and sum(k.invariant for k in own) <= 26
    # Portable ones read every cache, and compute what sm_90's do.
    attention_kernels = [k for k in kernels if k.FAMILY == "attention"]
    for element, cache in itertools.product(("f16", "bf16"), ("dense", "fp8_e4m3", "int8", "int4")):
        own = [k for k in attention_kernels if (k.arch, k.element, k.b_format, k.schedule) == (80, element, cache, "split_kv")]
        assert max(k.tile[2] for k in own) == 256
    tuned.read_folder(ROOT / "cpp" / "configs" / "tuned", kernels)


DECODE = dict(arch="sm90", elements=["f16"], variant="decode", head_dim=128, caches=["dense", "int4"], slices=[32, 64])


@pytest.mark.parametrize(
    ("changes", "field", "rule"),
    [
        ({"arch": "sm70"}, "arch", "must be sm90 or sm80"),
        ({"variant": "verify"}, "variant", "must be one of prefill, decode"),
        ({"tile": [64, 64]}, "tile", "no such field for decode"),
        ({"head_dim": 96}, "head_dim", "must be 64, 128, 192 or 256"),
        ({"caches": ["dense", "nf4"]}, "caches", "different values from dense, fp8_e4m3, int8, int4"),
        ({"caches": []}, "caches", "different values"),
        ({"slices": [32]}, "slices", "must be keys for each cache"),
        ({"slices": [16, 64]}, "slices", "a multiple of the 32"),
        ({"slices": [32, 128]}, "slices", "up to 64"),
    ],
)
def test_decode_rows_that_cannot_be_right(changes, field, rule):
    with pytest.raises(ConfigError, match=f"row 1, {field} = .*{rule}"):
        expand_attention(DECODE | changes)


def test_decode_rows():
    dense, int4 = expand_attention(DECODE)
    assert (dense.name, int4.name) == ("attention_sm90_f16_d128_decode", "attention_sm90_f16_d128_int4_decode")
    assert (dense.tile, int4.tile) == ((16, 32, 128), (8, 64, 128))
    for kernel in (dense, int4):  # the ring fills what a block may have
        assert SM90_SMEM_LIMIT - 33000 < kernel.smem_bytes <= SM90_SMEM_LIMIT


PORTABLE_DECODE = DECODE | dict(arch="sm80", slices=[16, 32], warps=[4, 2])
PORTABLE_PREFILL = dict(arch="sm80", elements=["bf16"], variant="prefill", head_dim=128, tile=[128, 64])


def test_portable_attention_rows():
    dense, int4 = expand_attention(PORTABLE_DECODE)
    assert (dense.name, int4.name) == ("attention_sm80_f16_d128_decode", "attention_sm80_f16_d128_int4_decode")
    assert (dense.tile, dense.threads, int4.tile, int4.threads) == ((16, 16, 128), 128, (8, 32, 128), 64)
    for kernel in (dense, int4):  # two are resident on 8.0 and leave no room for a stage, unless there are as many as are of use
        stage = kernel.threads // 32 * 2 * kernel.tile[1] * 128 * (2 if kernel is dense else 0.5)
        assert kernel.ctas_per_sm == 2 and 2 * (kernel.smem_bytes + 1024) <= 164 * 1024
        assert kernel.stages == 8 or 2 * (kernel.smem_bytes + 1.3 * stage + 1024) > 164 * 1024
    (large,) = expand_attention(PORTABLE_DECODE | dict(head_dim=256, caches=["fp8_e4m3"], slices=[32], warps=[2]))
    assert large.stages >= 2 and large.smem_bytes <= SM80_SMEM_LIMIT
    (prefill,) = expand_attention(PORTABLE_PREFILL)
    assert prefill.name == "attention_sm80_bf16_d128_128x64_prefill"
    assert (prefill.threads, prefill.schedule, prefill.stages, prefill.ctas_per_sm) == (256, "multistage", 2, 1)
    assert "launch_prefill_sm80<attention_sm80_bf16_d128_128x64_prefill>" in prefill.definition()
    assert prefill.shard_group == "attention_sm80_prefill"
    assert '#include "attention/prefill/prefill_sm80.cuh"' in shards.shard_text([prefill])


@pytest.mark.parametrize(
    ("base", "changes", "field", "rule"),
    [
        (PORTABLE_DECODE, {"warps": [4]}, "warps", "must be 1, 2 or 4 for each cache"),
        (PORTABLE_DECODE, {"warps": [4, 8]}, "warps", "must be 1, 2 or 4 for each cache"),
        (PORTABLE_DECODE, {"slices": [64, 64]}, "slices", "64 keys of dense leave 0 stages"),
        (PORTABLE_DECODE, {"slices": [8, 64]}, "slices", "a multiple of the 16"),
        (PORTABLE_DECODE, {"tile": [64, 64]}, "tile", "no such field for decode on sm80"),
        (PORTABLE_PREFILL, {"schedule": "pingpong"}, "schedule", "no such field for prefill on sm80"),
        (PORTABLE_PREFILL, {"tile": [192, 64]}, "tile", "must be 64 or 128 queries"),
        (PORTABLE_PREFILL, {"head_dim": 256}, "tile", "bytes of shared memory, the limit is 101376"),
    ],
)
def test_portable_attention_rows_that_cannot_be_right(base, changes, field, rule):
    with pytest.raises(ConfigError, match=f"row 1, {field} = .*{rule}"):
        expand_attention(base | changes)


def test_portable_attention_is_not_built_for_90a():
    kernels = [*expand_attention(PORTABLE_PREFILL), *expand_attention(DECODE), *expand(SM80)]
    portable, native = kernels[0], kernels[1]
    assert portable not in configs.buildable(kernels, ["90a"]) and native in configs.buildable(kernels, ["90a"])
    assert portable in configs.buildable(kernels, ["90"]) and native not in configs.buildable(kernels, ["90"])
    assert {portable, native} <= set(configs.buildable(kernels, ["80", "90a"]))
    listing = shards.write_list(shards.assign(kernels), "generated")
    lists = {block.split("\n")[0]: block for block in listing.split("set(")[1:]}
    assert list(lists) == ["MINFER_SM90A_SHARDS", "MINFER_PORTABLE_SHARDS", "MINFER_NOT_SM90A_SHARDS"]
    assert "attention_sm90" in lists["MINFER_SM90A_SHARDS"] and "gemm_sm80" in lists["MINFER_PORTABLE_SHARDS"]
    assert "attention_sm80" in lists["MINFER_NOT_SM90A_SHARDS"] and listing.count("attention_sm80") == 1


OVER_CODES = dict(arch="sm90", elements=["bf16"], variant="prefill", head_dim=128, tile=[128, 128], schedule="pingpong", cache="codes")


@pytest.mark.parametrize("changes", [{"head_dim": 64}, {"head_dim_v": 64}, {"tile": [192, 64]}, {"tile": [128, 96]}, {"cache": "int4"}])
def test_rows_over_codes_that_cannot_be_right(changes):
    rule = "must be codes or int8" if "cache" in changes else "is for equal head dimensions of 128 or 256"
    with pytest.raises(ConfigError, match=f"row 1, cache = .*{rule}"):
        expand_attention(OVER_CODES | changes)


def test_rows_over_codes():
    ((codes,), (int8,), (dense,)) = (expand_attention(OVER_CODES | dict(cache=value)) for value in ("codes", "int8", "dense"))
    assert (int8.name, int8.b_format) == ("attention_sm90_bf16_d128_int8_128x128_prefill", "int8")
    assert (codes.name, codes.b_format) == ("attention_sm90_bf16_d128_codes_128x128_prefill", "codes")
    assert (dense.name, dense.b_format) == ("attention_sm90_bf16_d128_128x128_prefill", "dense")
    assert "WeightFormat::kCodes" in codes.definition() and "WeightFormat::kDense" in dense.definition()
    assert codes.shard_group != dense.shard_group


def test_rows_that_divide_keys():
    (divided,) = expand_attention(OVER_CODES | dict(cache="dense", divides=True))
    assert divided.name == "attention_sm90_bf16_d128_128x128_prefill_divided" and divided.operation == "attention_divided"
    assert "kInvariant = true" in divided.definition() and "kDivides = true" in divided.definition()
    for changes in (dict(invariant=True), dict(head_dim=256, tile=[128, 64])):
        with pytest.raises(ConfigError, match="row 1, divides = .*up to 192 and no kernel of the mode"):
            expand_attention(OVER_CODES | dict(divides=True) | changes)


# ---- legality -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "changes", "field", "rule"),
    [
        (SM90, {"arch": "sm70"}, "arch", "must be one of sm90, sm80"),
        (SM90, {"warps": [2, 2]}, "warps", "no such field for sm90"),
        (SM80, {"cluster": [1, 1, 1]}, "cluster", "no such field for sm80"),
        (SM90, {"elements": ["f16", "f32"]}, "elements", "different values from f16, bf16"),
        (SM90, {"elements": ["f16", "f16"]}, "elements", "different values"),
        (SM90, {"layouts": []}, "layouts", "different values from tn, tt, nn, nt"),
        (SM90, {"tile": [128, 256]}, "tile", "3 positive integers"),
        (SM90, {"tile": None}, "tile", "3 positive integers"),
        (SM90, {"tile": [128, 256, 32]}, "tile", "a multiple of 64"),
        (SM90, {"tile": [64, 128, 64]}, "tile", "cooperative takes tile_m 128 or 256"),
        (SM90, {"tile": [256, 128, 64], "schedule": "pingpong"}, "tile", "pingpong takes tile_m 64 or 128"),
        (SM90, {"tile": [128, 100, 64]}, "tile", "multiple of 8 from 8 to 256"),
        (SM90, {"tile": [128, 264, 64]}, "tile", "multiple of 8 from 8 to 256"),
        (SM90, {"tile": [256, 256, 64]}, "tile", "256 accumulators per consumer thread"),
        (SM90, {"tile": [128, 256, 64], "schedule": "pingpong"}, "tile", "256 accumulators per consumer thread"),
        (SM90, {"tile": [128, 256, 128]}, "tile", "at least 3 are needed"),
        (SM90, {"schedule": "multistage"}, "schedule", "sm90 has cooperative and pingpong"),
        (SM90, {"cluster": [3, 1, 1]}, "cluster", "1|2|4"),
        (SM90, {"cluster": [1, 1, 2]}, "cluster", "1|2|4"),
        (SM90, {"cluster": [4, 4, 1]}, "cluster", "at most 8 CTAs"),
        (SM90, {"tile": [128, 8, 64]}, "cluster", "multiples of 8 rows"),
        (SM90, {"stages": 5}, "stages", "4 stages of 49152 bytes each"),
        (SM90, {"stages": 2}, "stages", "stages of 49152 bytes each"),
        (SM90, {"stages": "4"}, "stages", "a positive integer"),
        (SM90, {"epilogue_chunks": 5}, "epilogue_chunks", "has 4 boxes"),
        (COLUMNS, {"swap": False}, "column_step", "must be 32 or 64"),
        (COLUMNS, {"column_step": 12}, "column_step", "multiple of 8"),
        (COLUMNS, {"column_step": 48}, "column_step", "divides tile_n"),
        (COLUMNS, {"tile": [256, 144, 64]}, "column_step", "whole groups of boxes"),
        (COLUMNS, {"tile": [128, 64, 128]}, "tile", "tile_k must be 64"),
        (COLUMNS, {"epilogue_chunks": 1}, "epilogue_chunks", "2 of them in use together"),
        (SM90, {"swap": 1}, "swap", "true or false"),
        (SM90, {"note": 3}, "note", "a string"),
        (SM80, {"schedule": "pingpong"}, "schedule", "sm80 has multistage"),
        (SM80, {"stages": None}, "stages", "must be given"),
        (SM80, {"stages": 7}, "stages", "114688 bytes of shared memory, the limit is 101376"),
        (SM80, {"warps": [4, 4]}, "warps", "at most 8 warps"),
        (SM80, {"warps": [1, 1]}, "tile", "512 accumulators per thread"),
        (SM80, {"tile": [128, 128, 24]}, "tile", "16 x 8 x 16"),
        (SM80, VECTOR | {"tile": [16, 16, 1024]}, "tile", "one row or one column"),
        (SM80, VECTOR | {"layouts": ["tn", "tt"]}, "tile", "16 outputs where the matrix is contiguous along k, else 32"),
        (SM80, VECTOR | {"tile": [1, 16, 512]}, "tile", "two for each thread"),
        (SM80, VECTOR | {"stages": 4}, "stages", "not for vector"),
        (SM80, VECTOR | {"tile": [1, 16, 2048], "warps": [1, 32]}, "warps", "at most 16 warps"),
        (W4A16_SM90, {"arch": "sm70"}, "arch", "must be one of sm90, sm80"),
        (W4A16_SM90, {"tile": [128, 16, 64]}, "tile", "tile_k must be 128"),
        (W4A16_SM90, {"in_order": True}, "in_order", "takes 8 or 16 tokens, fragments or fine scaling"),
        (W4A16_SM90, {"in_order": True, "scaling": "fine", "tile": [128, 32, 128]}, "in_order", "takes 8 or 16 tokens"),
        (W4A16_SM90, {"ctas_per_sm": 4}, "ctas_per_sm", "must be one of 1, 2, 3"),
        (W4A16_SM80, {"scaling": "fine"}, "scaling", "no such field for sm80"),
        (W4A16_SM80, {"ctas_per_sm": 2}, "ctas_per_sm", "no such field for sm80"),
        (W4A16_SM80, {"formats": ["dense"]}, "formats", "different values from int4"),
        (W4A16_SM80, {"tile": [256, 64, 64]}, "tile", "tile_m must be 64 or 128"),
        (W4A16_SM80, {"tile": [128, 24, 64]}, "tile", "tile_n must be 8, 16, 32, 64 or 128"),
        (W4A16_SM80, {"tile": [128, 64, 32]}, "tile", "tile_k must be 64 or 128"),
        (W4A16_SM80, {"tile": [128, 128, 64]}, "tile", "128 accumulators per thread"),
        (W4A16_SM80, {"tile": [128, 16, 64], "warpgroups": 2}, "tile", "the epilogue needs a stage of 8448 bytes, this one has 7168"),
        (W4A16_SM80, {"warpgroups": 4}, "warpgroups", "must be one of 1, 2"),
        (W4A16_SM80, {"tile": [128, 8, 128], "warpgroups": 2}, "warpgroups", "shares of the tokens"),
        (W4A16_SM80, {"stages": None}, "stages", "must be given"),
        (W4A16_SM80, {"stages": 8}, "stages", "8 stages need 106496 bytes of shared memory, the limit is 101376"),
    ],
)
def test_an_illegal_row_is_named_with_its_field_and_value(base, changes, field, rule):
    with pytest.raises(ConfigError) as error:
        expand(base, **changes)
    message = str(error.value)
    value = {**base, **changes}.get(field)
    assert message.startswith(f"gemm.toml: kernel row 7, {field} = {value!r}: ")
    assert rule in message


def test_a_repeated_kernel_names_both_rows(folder):
    (folder / "gemm.toml").write_text(table_text(SM90, SM80, {**SM90, "elements": ["bf16"]}))
    with pytest.raises(ConfigError, match="row 3 repeats gemm_sm90_bf16_tn_128x256x64_2x1x1_cooperative of row 1"):
        configs.read_tables(folder)


def test_bad_tables(folder):
    (folder / "gemm.toml").write_text("[[group]\n")
    with pytest.raises(ConfigError, match=r"^gemm\.toml: "):
        configs.read_tables(folder)
    (folder / "gemm.toml").write_text('[family]\nname = "conv"\n')
    with pytest.raises(ConfigError, match="name = 'conv': must be one of attention, fused, gemm"):
        configs.read_tables(folder)
    (folder / "gemm.toml").unlink()
    with pytest.raises(ConfigError, match="holds no kernel table"):
        configs.read_tables(folder)


# ---- shared-memory budget -----------------------------------------------------------------------------------------------------


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def test_budget_of_a_large_cooperative_tile():
    """128 x 256 x 64: 48 KiB a stage; D streams through two 128 x 64 chunks instead of being staged whole (64 KiB, a stage and more)."""
    kernel = expand(SM90)[0]
    assert (kernel.stages, kernel.epilogue_chunks) == (4, 2)
    bias_and_barriers = 2 * 4 * 256 + 512  # fp32 bias of each consumer warpgroup's columns
    assert kernel.smem_bytes == 4 * (128 + 256) * 64 * 2 + 2 * 128 * 64 * 2 + round_up(bias_and_barriers, 1024) <= 232448


def test_budget_of_a_pingpong_tile_stages_both_tiles():
    kernel = expand(SM90, tile=[128, 128, 64], schedule="pingpong")[0]
    assert (kernel.stages, kernel.epilogue_chunks) == (5, 4)
    assert kernel.smem_bytes == 5 * 256 * 64 * 2 + 2 * (2 * 128 * 64 * 2) + round_up(2 * 4 * 128 + 512, 1024)


def test_budget_of_a_tile_of_chosen_columns():
    """D leaves through the buffers of two groups of boxes, 16 tokens by 64 rows each; the stages have all that is left."""
    wide = expand(COLUMNS)[0]  # 160 accumulators a thread: 32 tokens a group
    assert (wide.stages, wide.epilogue_chunks) == (4, 4)
    assert wide.ring_bytes == 232448 - 2 * (4 * 16 * 128 + 4 * 128) - 512 - 512 >= 4 * (256 + 160) * 64 * 2
    assert wide.name.endswith("_256x160x64_2x1x1_cooperative_swap_columns16")
    flat = expand(COLUMNS, tile=[64, 192, 64], cluster=[4, 1, 1], schedule="pingpong")[0]  # 96: 64 tokens a group
    assert (flat.stages, flat.epilogue_chunks) == (6, 8)


def test_a_row_may_choose_fewer_stages():
    deep, shallow = expand(SM90)[0], expand(SM90, stages=3)[0]
    assert shallow.stages == 3
    assert deep.smem_bytes - shallow.smem_bytes == (128 + 256) * 64 * 2


def test_a_small_tile_is_capped_at_sixteen_stages():
    assert expand(SM90, tile=[64, 8, 64], cluster=[1, 1, 1], schedule="pingpong", swap=True)[0].stages == 16


def test_budget_of_a_portable_tile_of_4_bit_weights():
    """A stage: half a byte a weight, 2 a token's value, and room for a scale and a zero of each row for every 32 of k."""
    kernel = expand(W4A16_SM80)[0]
    assert kernel.smem_bytes == 3 * (128 * 64 // 2 + 64 * 64 * 2 + 2 * 2 * 128 * 2)
    # Kernels of 128 threads are planned as two to an SM, which from 8.6 on has 100 KiB or more; the system takes 1 KiB of each CTA's.
    for kernel in configs.read_table(ROOT / "cpp" / "configs" / "w4a16.toml"):
        assert kernel.arch == 90 or kernel.threads > 128 or 2 * (kernel.smem_bytes + 1024) <= 100 * 1024


def test_struct_carries_the_numbers():
    kernel = expand(SM90)[1]
    text = kernel.definition()
    for line in (
        f"struct {kernel.name} {{",
        "kType = DataType::kF16;",
        "kMajorA = Major::kK;",
        "kMajorB = Major::kMN;",
        "kTileM = 128, kTileN = 256, kTileK = 64;",
        "kClusterM = 2, kClusterN = 1;",
        "kStages = 4;",
        "kEpilogueChunks = 2;",
        f"kSmemBytes = {kernel.smem_bytes};",
        f"return launch_gemm_sm90<{kernel.name}>(arguments);",
    ):
        assert line in text
    assert "kWarpsM = 2, kWarpsN = 2;" in expand(SM80)[0].definition()
    fine, portable = (expand(row)[0].definition() for row in ({**W4A16_SM90, "scaling": "fine"}, W4A16_SM80))
    assert "kScaling = w4a16::Scaling::kFine;" in fine and "launch_w4a16_sm90<" in fine
    assert "kScaling" not in portable and "kEpilogueChunks" not in portable
    for line in ("kSwap = true;", "kThreads = 128;", "kStages = 3;", "kSchedule = Schedule::kMultistage;", "return launch_w4a16_sm80<"):
        assert line in portable


# ---- 8-bit operands ---------------------------------------------------------------------------------------------------------------


def expand_scaled(**changes) -> list:
    fields = E4M3 | changes
    return ScaledGemmKernel.expand(Row({name: value for name, value in fields.items() if value is not None}, "row 7"))


E4M3 = {**SM90, "elements": ["e4m3"], "layouts": ["tn"], "tile": [128, 160, 128], "swap": True, "column_step": 8}


def test_an_8_bit_operand_is_a_row():
    """A tile of 128 e4m3 is as many bytes as one of 64 f16; what is left of the ring are the scales of rows and columns."""
    narrow, wide = expand_scaled()[0], expand(E4M3, elements=["f16"], tile=[128, 160, 64])[0]
    assert narrow.name == "scaled_gemm_sm90_e4m3_tn_128x160x128_2x1x1_cooperative_swap_columns8"
    assert (narrow.stages, narrow.alignment) == (wide.stages, 16)
    assert 0 <= wide.ring_bytes - narrow.ring_bytes <= 2 * 1024 + 2 * 4 * (160 + 64)
    assert "kType = DataType::kE4M3;" in narrow.definition()
    assert expand_scaled(tile=[64, 128, 128], cluster=[1, 1, 1], schedule="pingpong")[0].info()["ab_type"] == "e4m3"
    assert narrow.shard_group == "scaled_gemm_sm90_cooperative_e4m3"
    assert expand_scaled(elements=["s8"], column_step=16)[0].info()["ab_type"] == "s8"


@pytest.mark.parametrize(
    ("changes", "field", "rule"),
    [
        ({"tile": [128, 160, 64]}, "tile", "a multiple of 128"),
        ({"layouts": ["tn", "tt"]}, "layouts", "must be tn"),
        ({"elements": ["e8m0"]}, "elements", "different values from e4m3, s8"),
        ({"column_step": None, "swap": None}, "column_step", "must be given where operands have 8 bits"),
    ],
)
def test_8_bit_rows_that_cannot_be_right(changes, field, rule):
    with pytest.raises(ConfigError, match=f"row 7, {field} = .*{rule}"):
        expand_scaled(**changes)


EXPERTS_SM90 = {"arch": "sm90", "elements": ["e4m3", "s8"], "schedule": "cooperative", "tile": [128, 128, 128], "token_step": 64}
EXPERTS_SM80 = {"arch": "sm80", "elements": ["e4m3", "s8"], "schedule": "multistage", "tile": [64, 32, 128], "stages": 4}


def expand_experts(base: dict, **changes) -> list:
    fields = base | changes
    return GroupedScaledGemmKernel.expand(Row({name: value for name, value in fields.items() if value is not None}, "row 7"))


def test_8_bit_experts_are_a_row():
    """The portable kernels have the sm_90 ones' layout of a tile: rows of the weight by tokens."""
    rows, portable = expand_experts(EXPERTS_SM90), expand_experts(EXPERTS_SM80)
    assert [kernel.name for kernel in rows] == [f"moe_scaled_sm90_{e}_tn_128x128x128_1x1x1_cooperative" for e in ("e4m3", "s8")]
    assert [kernel.name for kernel in portable] == [f"moe_scaled_sm80_{e}_tn_64x32x128_1x1x1_multistage_swap" for e in ("e4m3", "s8")]
    assert portable[0].smem_bytes <= SM80_SMEM_LIMIT and portable[0].info()["swap"] and not rows[0].info()["swap"]
    assert "launch_grouped_scaled_sm80<" in portable[0].definition() and "kLeastGroup = 32;" in portable[0].definition()


@pytest.mark.parametrize(
    ("base", "changes", "field", "rule"),
    [
        (EXPERTS_SM90, {"schedule": "multistage"}, "schedule", "cooperative"),
        (EXPERTS_SM90, {"token_step": 16}, "token_step", "64"),
        (EXPERTS_SM80, {"schedule": "cooperative"}, "schedule", "multistage"),
        (EXPERTS_SM80, {"stages": None}, "stages", "must be given"),
        (EXPERTS_SM80, {"stages": 12}, "stages", "the limit is"),
        (EXPERTS_SM80, {"tile": [64, 24, 128]}, "tile", "multiple of 16"),
        (EXPERTS_SM80, {"tile": [192, 32, 128]}, "tile", "share the scale"),
        (EXPERTS_SM80, {"tile": [128, 128, 128]}, "tile", "too few registers"),
        (EXPERTS_SM80, {"ctas_per_sm": 2}, "stages", "the limit is"),
    ],
)
def test_rows_of_8_bit_experts_that_cannot_be_right(base, changes, field, rule):
    with pytest.raises(ConfigError, match=f"row 7, {field} = .*{rule}"):
        expand_experts(base, **changes)


# ---- formats --------------------------------------------------------------------------------------------------------------------


def test_committed_files_are_what_formats_toml_says(monkeypatch, tmp_path):
    format_files.check(formats.project_formats())
    for name in ("HEADER", "PYTHON"):
        stale = ROOT / "build" / "stale"
        monkeypatch.setattr(format_files, name, stale)
        with pytest.raises(ConfigError, match="build/stale is not what .* run python cpp/codegen/generate.py --formats"):
            format_files.check(formats.project_formats())
        monkeypatch.undo()


FORMATS_TEXT = formats.FORMATS_FILE.read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'name = "nf4"\nenumerator = "kNf4"\nbits',
            'name = "int4"\nenumerator = "kNf4"\nbits',
            "format row 3, name = 'int4': is given twice",
        ),
        ('enumerator = "kMxFp4"', 'enumerator = "kInt4"', "format row 4, enumerator = 'kInt4': must be one of its own"),
        ('enumerator = "kMxFp4"', 'enumerator = "MxFp4"', "enumerator = 'MxFp4': must be one of its own"),
        ("bits = 4\nvalues", "bits = 5\nvalues", "format row 2, bits = 5: must be one of 4, 8"),
        ('bits = 4\nvalues = "nf4"', 'bits = 8\nvalues = "nf4"', "bits = 8: must be 4 where values are those of a table"),
        ('values = "nf4"', 'values = "nf5"', "values = 'nf5': must be one of integer, nf4, "),
        ('scales = "e8m0"', 'scales = "e9m0"', "scales = 'e9m0': must be one of operand, f16"),
        ("group = 32", "group = 24", "group = 24: must be a power of two from 16 on"),
        ("group = 32", "group = 32\nusual_group = 64", "usual_group = 64: is of formats that prescribe no group"),
        ('values = "nf4"', 'values = "nf4"\nzero = 8.0', "zero = 8.0: is of integers"),
        ("-0.6961928009986877", "-1.5", "values row 2, table = .*: of a book must rise from code to code"),
        ("  1.0,\n", "", "values row 2, table = .*: must be 16 floating-point numbers"),
        ("f16 = 0.6831", "f16 = 1.6831", "factor = .*: is of a book's element types, above 0 and at most 1"),
        ('storage = ["int8"]', 'stored = ["int8"]', "cache row 3, stored = .*: no such field for cache"),
        ("[[cache]]", "[[cash]]", "got cash"),
    ],
)
def test_formats_that_cannot_be_right(tmp_path, old, new, message):
    assert old in FORMATS_TEXT
    (tmp_path / "formats.toml").write_text(FORMATS_TEXT.replace(old, new, FORMATS_TEXT.count("[[cache]]") if "[[" in old else 1))
    with pytest.raises(ConfigError, match=message):
        formats.read_formats(tmp_path / "formats.toml")


def test_a_further_format_is_a_row(tmp_path):
    """What C++ and Python are told of a made-up code book; nothing else of the two files changes."""
    book = ", ".join(str(3.0 * (code - 8)) for code in range(16))
    row = 'enumerator = "kOdd"\nbits = 4\nvalues = "odd"\nscales = "operand"\nusual_group = 64\n'
    values = f'\n[[values]]\nname = "odd"\nenumerator = "kOdd"\norder = "book"\ntable = [{book}]\n'
    (tmp_path / "formats.toml").write_text(f'{FORMATS_TEXT}{values}\n[[format]]\nname = "odd"\n{row}')
    more = format_files.texts(formats.read_formats(tmp_path / "formats.toml"))
    for path, text in format_files.texts(formats.project_formats()).items():
        new = [line for line in more[path].splitlines() if line not in text.splitlines()]
        assert new and not [line for line in text.splitlines() if line not in more[path].splitlines() and "values[" not in line]
    header, python = more[format_files.HEADER], more[format_files.PYTHON]
    own = formats.project_formats()
    books = sum(values.order == "book" for values in own.values.values())
    for line in (
        f"kOdd = {len(own.formats)},",
        "WeightFormat::kOdd,",
        'case WeightFormat::kOdd: return "odd";',
        "kOdd: return CodeOrder::kBook;",
    ):
        assert line in header
    assert f"float values[{books + 1}][16];" in header and f"case WeightFormat::kOdd: return {books};" in header
    assert "-24.0f, -21.0f, -18.0f, -15.0f," in header
    names: dict = {}
    exec(python, names)
    assert names["FORMATS"]["odd"]["values"] == "odd" and names["VALUES"]["odd"] == ("book", tuple(3.0 * (c - 8) for c in range(16)))


# ---- rows and groups ------------------------------------------------------------------------------------------------------------


def test_a_row_is_defaults_then_group_then_its_own(folder):
    text = """
[family]
name = "gemm"
[defaults]
elements = ["f16"]
layouts = ["tn"]
[[group]]
arch = "sm90"
cluster = [1, 1, 1]
schedule = "pingpong"
kernels = [
  { tile = [64, 128, 64] },
  { tile = [128, 128, 64], layouts = ["tt"], schedule = "cooperative" },
]
[[group]]
arch = "sm80"
elements = ["bf16"]
warps = [2, 2]
stages = 3
schedule = "multistage"
kernels = [{ tile = [64, 64, 32] }]
"""
    (folder / "gemm.toml").write_text(text)
    assert [kernel.name for kernel in configs.read_tables(folder)] == [
        "gemm_sm90_f16_tn_64x128x64_1x1x1_pingpong",
        "gemm_sm90_f16_tt_128x128x64_1x1x1_cooperative",
        "gemm_sm80_bf16_tn_64x64x32_1x1x1_multistage",
    ]
    (folder / "gemm.toml").write_text(text.replace("[64, 64, 32]", "[64, 64, 24]"))
    with pytest.raises(ConfigError, match="kernel row 3, tile = "):  # counted over the groups
        configs.read_tables(folder)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("kernels = [", "kernel = [", "group 1, kernels = None: must be a list of rows"),
        ("[[group]]", "[[kernel]]", "has .family., .defaults. and ..group.., got kernel"),
        ('name = "gemm"\n', 'name = "gemm"\n[[kernel]]\n', "got kernel"),
    ],
)
def test_groups_that_cannot_be_right(folder, old, new, message):
    text = (folder / "gemm.toml").read_text()
    (folder / "gemm.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        configs.read_tables(folder)


# ---- shards -------------------------------------------------------------------------------------------------------------------


def test_shards_hold_every_kernel_once_and_at_most_eight():
    kernels = configs.read_tables(ROOT / "cpp" / "configs")
    assigned = shards.assign(kernels)
    assert sorted(k.name for members in assigned.values() for k in members) == sorted(k.name for k in kernels)
    for name, members in assigned.items():
        assert 1 <= len(members) <= 8
        assert {k.shard_group for k in members} == {name.rpartition("_")[0]}


def test_a_new_row_rewrites_only_the_last_shard_of_its_group():
    rows = [expand(SM80, tile=[128, 32, 16 * i], stages=2, layouts=["tn"])[0] for i in range(1, 10)]
    before = {name: shards.shard_text(members) for name, members in shards.assign(rows).items()}
    after = shards.assign(rows + expand(SM80, tile=[128, 128, 16], layouts=["tn"]))
    changed = [name for name, members in after.items() if before.get(name) != shards.shard_text(members)]
    assert changed == ["gemm_sm80_multistage_tn_1.cu"]


def test_unchanged_output_is_not_written_and_stale_shards_go(folder, tmp_path):
    out = tmp_path / "out"
    first = generate.generate(folder, out, ["90a", "80"], "", "4.2.0")
    assert (first["kernels"], first["compiled"], first["deleted"]) == (6, 6, 0)
    stamps = {path: path.stat().st_mtime_ns for path in out.rglob("*.*")}
    again = generate.generate(folder, out, ["90a", "80"], "", "4.2.0")
    assert (again["written"], again["deleted"]) == (0, 0)
    assert stamps == {path: path.stat().st_mtime_ns for path in out.rglob("*.*")}

    sm90 = generate.generate(folder, out, ["90a"], "gemm_sm90_*", "4.2.0")
    assert (sm90["compiled"], sm90["shards"]) == (4, 2)
    assert sorted(path.name for path in (out / "kernels").iterdir()) == [
        "gemm_sm90_cooperative_mn_0.cu",
        "gemm_sm90_cooperative_tn_0.cu",
    ]
    assert all(path.stat().st_mtime_ns == stamps[path] for path in (out / "kernels").iterdir())
    listing = (out / "shards.cmake").read_text()
    assert listing.count(".cu") == 2 and "gemm_sm80" not in listing

    none = generate.generate(folder, out, [], "", "")
    assert (none["kernels"], none["compiled"], none["shards"], none["deleted"]) == (6, 0, 0, 2)


# ---- selection ----------------------------------------------------------------------------------------------------------------


def test_sm90_kernels_need_90a(folder):
    kernels = configs.read_tables(folder)
    assert {k.arch for k in configs.buildable(kernels, ["80"])} == {80}
    assert {k.arch for k in configs.buildable(kernels, ["120", "90a"])} == {80, 90}
    assert configs.buildable(kernels, []) == []


def test_kernel_globs(folder, tmp_path):
    kernels = configs.read_tables(folder)
    assert {k.arch for k in configs.select(kernels, "gemm_sm80_*; gemm_sm90_bf16_tn_*")} == {80, 90}
    assert len(configs.select(kernels, "")) == 6
    with pytest.raises(ConfigError, match=r"no kernel matches 'gemm_sm99_\*'.*--list"):
        configs.select(kernels, "gemm_sm80_*,gemm_sm99_*")
    with pytest.raises(ConfigError, match="leaves no kernel to compile; sm90 kernels need 90a"):
        generate.generate(folder, tmp_path / "out", ["80"], "gemm_sm90_*", "4.2.0")


def test_command_line(folder, tmp_path):
    script = [sys.executable, str(ROOT / "cpp" / "codegen" / "generate.py"), "--configs", str(folder)]
    listed = subprocess.run([*script, "--list", "--kernels", "gemm_sm80_*"], capture_output=True, text=True, check=True)
    assert listed.stdout.split() == [k.name for k in expand(SM80)]
    done = subprocess.run([*script, "--out", str(tmp_path / "out"), "--archs", "90a"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("6 kernels, 6 compiled in")
    failed = subprocess.run([*script, "--list", "--kernels", "nope"], capture_output=True, text=True)
    assert failed.returncode == 1 and failed.stderr.startswith("MINFER_KERNELS: no kernel matches 'nope'")


# ---- registry -----------------------------------------------------------------------------------------------------------------


def test_registry_lists_all_and_marks_what_is_compiled(folder):
    kernels = configs.read_tables(folder)
    text = registry.registry_text(kernels, {kernels[0].name}, ["90a"], "4.2.0")
    assert text.count(".name = ") == 6 and text.count(".launch = nullptr") == 5
    assert f"Status launch_{kernels[0].name}(gemm::GemmLaunchArguments const&);" in text
    assert f"launch_{kernels[1].name}" not in text
    assert r'.note = "says \"why\""' in text
    assert 'build_archs() { return "90a"; }' in text and 'build_cutlass_version() { return "4.2.0"; }' in text
    rows = json.loads(registry.kernels_json(kernels, {kernels[0].name}))
    assert [row["compiled"] for row in rows] == [True] + [False] * 5
    header = (ROOT / "cpp" / "include" / "minfer" / "registry.h").read_text()
    struct = header[header.index("struct KernelInfo {") : header.index("};", header.index("struct KernelInfo {"))]
    fields = re.findall(r"(\w+)(?=[,;])", re.sub(r"//.*", "", struct))
    assert [*rows[0], "launch"] == [*fields[: fields.index("launch")], "targets", "compiled", "launch"]


# ---- cost models --------------------------------------------------------------------------------------------------------------


def test_model_names_leave_out_the_family_and_the_element():
    names = {cost_models.model_name(kernel) for kernel in configs.read_tables(ROOT / "cpp" / "configs") if kernel.FAMILY == "gemm"}
    assert {"sm90_tn_64x8x128_1x1x1_pingpong_swap", "sm80_tn_128x128x32_1x1x1_multistage"} <= names


def test_shipped_models_have_every_kernel_of_the_table():
    """A kernel without factors of its own counts as an average one, which none is."""
    kernels = configs.read_tables(ROOT / "cpp" / "configs")
    families = {"dense": ("gemm", "scaled_gemm"), "quantized": ("w4a16", "w4a8")}
    names, quantized = ({cost_models.model_name(kernel) for kernel in kernels if kernel.FAMILY in of} for of in families.values())
    for device, model in cost_models.read_folder(ROOT / "cpp" / "configs" / "models").items():
        assert not set(model.kernels) - names - quantized, f"{device}: kernels that are gone"
        assert len(names - set(model.kernels)) <= 2, f"{device}: {sorted(names - set(model.kernels))}"


def test_rates_are_the_fields_of_the_library():
    text = (ROOT / "cpp" / "src" / "gemm" / "cost_model.h").read_text()
    assert tuple(re.findall(r"&GemmRates::(\w+)}", text)) == cost_models.RATES


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("rate,start,fast", "expected rate,name,value"),
        ("rate,start,-1", "positive numbers"),
        ("kernel,sm90_x,1,1,1", "expected rate,name,value or kernel,name,compute"),
        ("speed,start,1", "expected rate"),
        ("rate,start,1", "repeats start"),
        ("rate,speed,1", "the rates must be start, "),
    ],
)
def test_bad_models(tmp_path, line, message):
    good = (ROOT / "cpp" / "configs" / "models" / "nvidia-h200.csv").read_text()
    (tmp_path / "nvidia-h200.csv").write_text(good + line + "\n")
    with pytest.raises(ConfigError, match=message):
        cost_models.read_csv(tmp_path / "nvidia-h200.csv")


# ---- tuned tables -------------------------------------------------------------------------------------------------------------

HEADER = (
    "op,m,n,k,batch,ab_type,a_major,b_major,b_format,group_size,has_zeros,"
    "has_c,gated,kernel,decomposition,splits,swizzle,raster,columns,us\n"
)
ROW = "gemm,16,4096,4096,1,f16,k,k,dense,0,0,0,0,gemm_sm90_f16_tn_128x256x64_2x1x1_cooperative,stream_k,1,2,along_n,0,9.5\n"
SMALLER = "gemm,8,4096,4096,1,f16,k,mn,dense,0,0,1,0,gemm_sm90_f16_tt_128x256x64_2x1x1_cooperative,split_k,4,1,along_m,0,7\n"


def read(folder: Path, text: str, name: str = "nvidia-h200.csv"):
    (folder / "tuned" / name).write_text(text)
    return tuned.read_folder(folder / "tuned", configs.read_tables(folder))


def test_tuned_rows_are_sorted_by_problem(folder):
    rows = read(folder, HEADER + ROW + SMALLER)["nvidia-h200"]
    assert [row.m for row in rows] == [8, 16]
    assert rows[0] == tuned.TunedRow(
        8, 4096, 4096, 1, "f16", "k", "mn", "dense", 0, False, True, False, rows[0].kernel, "split_k", 4, 1, "along_m", 0, 7.0
    )
    text = tuned.tuned_text({"nvidia-h200": rows})
    assert "{8, 4096, 4096, 1, DataType::kF16, Major::kK, Major::kMN, WeightFormat::kDense, 0, false, true, false, " in text
    assert "{Decomposition::kSplitK, 4, 1, RasterOrder::kAlongM, 0}, 7.0f}," in text


def test_tuned_rows_of_operands_that_are_copied_first(folder):
    """A kernel for K-major operands may have measured fastest for other ones; a kernel for other ones reads no K-major operand."""
    (row,) = read(folder, HEADER + ROW.replace(",f16,k,k,", ",f16,mn,mn,"))["nvidia-h200"]
    assert (row.a_major, row.b_major) == ("mn", "mn") and "_tn_" in row.kernel
    with pytest.raises(ConfigError, match="computes .*'k', 'mn'.* the row's problem is .*'k', 'k'"):
        read(folder, HEADER + SMALLER.replace(",f16,k,mn,", ",f16,k,k,"))


def test_no_table_is_fine(folder):
    (folder / "tuned").rmdir()
    assert tuned.read_folder(folder / "tuned", configs.read_tables(folder)) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ROW, "the header must be op,m,n,k"),
        (HEADER + ROW.replace("2x1x1", "4x1x1"), "line 2: no kernel is named 'gemm_sm90_f16_tn_128x256x64_4x1x1_cooperative'"),
        (HEADER.replace("b_format,group_size,has_zeros,", "") + ROW, "the header must be op,.*,b_format,group_size,has_zeros,"),
        (HEADER + ROW.replace(",f16,k,k", ",bf16,k,k"), "computes .*'f16', 'k', 'k', 'dense'.*the row's problem is .*'bf16'"),
        (HEADER + ROW.replace("dense", "int4"), "b_format = 'int4': must be one of dense"),
        (HEADER + ROW.replace("dense,0", "dense,128"), "a dense B has group_size = 0 and has_zeros = 0, got '128' and '0'"),
        (HEADER + ROW + ROW.replace("9.5", "9.4"), "line 3: repeats the problem of an earlier line"),
        (HEADER + ROW.replace("gemm,16,", "gemm,0,"), "m = '0': must be a number >= 1"),
        (HEADER + ROW.replace("gemm,16,", "gemm,x,"), "m = 'x': must be a number >= 1"),
        (HEADER + ROW.replace("gemm,16,", "conv,16,"), "op = 'conv': must be one of gemm, w4a16_gemm"),
        (HEADER + ROW.replace("stream_k", "magic"), "decomposition = 'magic': must be one of persistent, stream_k, split_k"),
        (HEADER + ROW.replace("along_n", "up"), "raster = 'up': must be one of along_m, along_n"),
        (HEADER + ROW.replace(",1,2,along", ",1,17,along"), "swizzle = 17: must be 1 to 16"),
        (HEADER + ROW.replace(",0,0,gemm", ",0,yes,gemm"), "gated = 'yes': must be one of 0, 1"),
        (HEADER + ROW.replace(",9.5", ",nan"), "us = 'nan': must be a number"),
        (HEADER + ROW.replace(",9.5", ""), "must have 20 columns"),
        (HEADER + ROW.replace("9.5", "9.5,7"), "must have 20 columns"),
    ],
)
def test_bad_tuned_rows(folder, text, message):
    with pytest.raises(ConfigError, match=message):
        read(folder, text)


def w4_row(kernels, *, group_size=128, fine=False, **changes):
    """A row of quantised weights whose kernel takes groups of 32 (fine) or of 128."""
    kernel = next(k for k in kernels if k.FAMILY == "w4a16" and k.element == "f16" and (k.group_multiple == 32) == fine)
    cells = dict(
        op="w4a16_gemm", m=16, n=4096, k=4096, batch=1, ab_type="f16", a_major="k", b_major="k", b_format="int4", group_size=group_size,
        has_zeros=0, has_c=0, gated=0, kernel=kernel.name, decomposition="split_k", splits=2, swizzle=1, raster="along_m",
        columns=0, us=5.5,
    )  # fmt: skip
    return ",".join(str(value) for value in (cells | changes).values()) + "\n"


def read_w4(tmp_path, *rows):
    """Rows of the project's own kernels."""
    kernels = configs.read_tables(ROOT / "cpp" / "configs")
    path = tmp_path / "nvidia-h200.csv"
    path.write_text(HEADER + "".join(w4_row(kernels, **row) for row in rows))
    return tuned.read_csv(path, {kernel.name: kernel for kernel in kernels})


def test_tuned_rows_of_quantised_weights(tmp_path):
    """Group sizes, zero points and formats tell problems apart; all of k is -1 in the table and 0 in the library."""
    rows = read_w4(tmp_path, {}, {"has_zeros": 1}, {"group_size": 32, "fine": True}, {"group_size": -1}, {"group_size": 2048})
    assert [(row.b_format, row.group_size, row.has_zeros) for row in rows] == [
        ("int4", 0, False), ("int4", 32, False), ("int4", 128, False), ("int4", 128, True), ("int4", 2048, False),
    ]  # fmt: skip
    text = tuned.tuned_text({"nvidia-h200": rows})
    assert "Major::kK, Major::kK, WeightFormat::kInt4, 0, false, false, false, " in text
    assert "WeightFormat::kInt4, 128, true, false, false, " in text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"group_size": 0}, "group_size = '0': must be -1"),
        ({"group_size": 96}, "group_size = '96': must be -1 .*power of two from 32 on"),
        ({"b_format": "nvfp4", "group_size": 32}, "group_size = '32': must be 16 for nvfp4"),
        ({"group_size": 4096}, "group_size = '4096': .*less than k"),
        ({"group_size": 32}, "takes groups of 128, the row's are of 32"),
        ({"b_format": "dense"}, "b_format = 'dense': must be one of int4"),
        ({"has_zeros": 2}, "has_zeros = '2': must be one of 0, 1"),
        ({"batch": 2}, "batch = 2: must be 1"),
    ],
)
def test_bad_tuned_rows_of_quantised_weights(tmp_path, row, message):
    with pytest.raises(ConfigError, match=message):
        read_w4(tmp_path, row)


def test_a_table_is_named_after_its_device(folder):
    for name in ("NVIDIA H200", "nvidia-h200-", "nvidia--h200", "nvidia_h200"):
        with pytest.raises(ConfigError, match=f"tuned/{name}.csv: a table must be named .* such as nvidia-h200.csv"):
            read(folder, HEADER, f"{name}.csv")
        (folder / "tuned" / f"{name}.csv").unlink()


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_generated_tables_compile_and_answer(folder, tmp_path):
    """registry.cpp and tuned_table.cpp of a build without CUDA, called from C++: the device's name is normalised as in the file name."""
    read(folder, HEADER + ROW + SMALLER)
    out = tmp_path / "out"
    generate.generate(folder, out, [], "", "")
    (tmp_path / "main.cpp").write_text(r"""
#include <cstdio>
#include "minfer/gemm.h"
int main() {
  int64_t kernels = 0, rows = 0, none = -1;
  minfer::KernelInfo const* first = minfer::registry(&kernels);
  minfer::GemmTunedRow const* table = minfer::shipped_gemm_rows("NVIDIA H200", &rows);
  bool const unknown = minfer::shipped_gemm_rows("NVIDIA H200 NVL", &none) == nullptr && none == 0;
  std::printf("%lld %s %d %lld %lld %s %d '%s'\n", (long long)kernels, first->name, first->launch == nullptr, (long long)rows,
              (long long)table[1].m, table[1].kernel, unknown, minfer::build_archs());
}
""")
    own = ROOT / "cpp" / "src" / "common" / "device_file_name.cpp"
    sources = [str(path) for path in (tmp_path / "main.cpp", out / "registry.cpp", out / "tuned_table.cpp", own)]
    includes = [f"-I{ROOT / 'cpp' / 'include'}", f"-I{ROOT / 'cpp' / 'src'}"]
    program = str(tmp_path / "main")
    subprocess.run(["c++", "-std=c++20", "-Wall", "-Wextra", "-Werror", *includes, *sources, "-o", program], check=True)
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    name = "gemm_sm90_f16_tn_128x256x64_2x1x1_cooperative"
    assert printed == f"6 {name} 1 2 16 {name} 1 ''\n"


WGMMA_STRUCTS = """#pragma once
////////////////////////////////////////////////////////////////////////////////////////////////////

// GMMA 64x8x16 F32+=F16*F16
template <
  GMMA::Major tnspA
>
struct MMA_64x8x16_F32F16F16_SS
{
  void fma() { kept(); }
};

struct MMA_64x8x32_S32S8S8_SS_TN
{
  void fma() { kept(); }
};

struct MMA_64x8x32_S32S8S8_SS_TN_SATURATE
{
  void fma() { gone(); }
};

template <GMMA::Major tnspA>
using SM90_64x8x16_F16F16F16_SS = SM90::GMMA::MMA_64x8x16_F16F16F16_SS<tnspA>;

template <
  GMMA::Major tnspA
>
using SM90_64x8x16_F32F16F16_SS = SM90::GMMA::MMA_64x8x16_F32F16F16_SS<tnspA>;

template <GMMA::Major tnspA>
struct MMA_Traits<SM90_64x8x16_F16F16F16_SS<tnspA>>
{
  using ValTypeD = gone;
};

template <GMMA::Major tnspA>
struct MMA_Traits<SM90_64x8x16_F32F16F16_SS<tnspA>>
{
  using ValTypeD = kept();
};

using SM90_64x8x32_S32S8S8_SS_TN_SATURATE = SM90::GMMA::MMA_64x8x32_S32S8S8_SS_TN_SATURATE;

template <>
struct MMA_Traits<SM90_64x8x32_S32S8S8_SS_TN_SATURATE>
{
  using gone = int;
};
"""


def test_headers_without_unused_instructions():
    text = wgmma_headers.trim(WGMMA_STRUCTS, sparse=False)
    assert text.count("kept()") == 3 and "gone" not in text
    assert "struct MMA_64x8x32_S32S8S8_SS_TN_SATURATE {};" in text
    assert "using SM90_64x8x16_F32F16F16_SS = SM90::GMMA::MMA_64x8x16_F32F16F16_SS<tnspA>;" in text
    for unused in ("F16F16F16", "using SM90_64x8x32", "MMA_Traits<SM90_64x8x32"):
        assert unused not in text
    assert text.count("template <") == 3
    sparse = wgmma_headers.trim(WGMMA_STRUCTS, sparse=True)
    assert "kept" not in sparse and "MMA_Traits" not in sparse and "struct MMA_64x8x16_F32F16F16_SS {};" in sparse
    with pytest.raises(ConfigError, match="states its WGMMA instructions in another form"):
        wgmma_headers.trim("#pragma once\n", sparse=False)


def test_headers_of_cutlass(folder, tmp_path):
    """Of the real headers every instruction's name stays, and of each kept type as many instructions and traits as there are widths."""
    cutlass = Path(locate("cutlass_library/source")) / "include"
    if not (cutlass / wgmma_headers.HEADERS[0]).is_file():
        pytest.skip("needs the nvidia-cutlass wheel")
    generate.generate(folder, tmp_path, ["90a"], "", "4.2.0", cutlass)
    names = re.compile(r"^struct (?!MMA_Traits)[^\n;{]*?(?= \{\};$|$)", re.MULTILINE)
    for header in wgmma_headers.HEADERS:
        before, after = (cutlass / header).read_text(), (tmp_path / "cutlass" / header).read_text()
        assert names.findall(before) == names.findall(after) and len(after) < 0.5 * len(before)
    arch, _, traits, sparse_traits = (
        "".join((tmp_path / "cutlass" / header).read_text() for header in wgmma_headers.HEADERS[i : i + 2]) for i in range(0, 8, 2)
    )
    assert "struct MMA_Traits<" not in sparse_traits
    for types in wgmma_headers.KEPT:
        widths = 32 - 14 * (types == "S32S8S8")
        assert len(re.findall(rf"^struct MMA_64x\d+x\d+_{types}_SS(_TN)?\n\{{", arch, re.MULTILINE)) == widths
        assert len(re.findall(rf"^struct MMA_Traits<SM90_64x\d+x\d+_{types}_SS", traits, re.MULTILINE)) == widths
