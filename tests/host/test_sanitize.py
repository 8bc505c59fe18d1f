"""What tests/sanitize.py makes of a tool's report: no error passes because its words are unknown."""

import pytest

from tests.sanitize import Report

CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
CLEAN_OF_RACES = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
ONE = "========= ERROR SUMMARY: 1 error\n"
NAME = "minfer::attention::decode_sm90_kernel<minfer::attention::attention_sm90_bf16_d64_int4_decode>"
DECODE = f"void {NAME}(minfer::attention::DecodeParams)"
INVALID = f"""========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at {DECODE}+0x1f0
=========     by thread (96,0,0) in block (3,0,0)
=========     Address 0x7f0 is out of bounds
{{separator}}
========= ERROR SUMMARY: 1 error
"""
API = """========= COMPUTE-SANITIZER
========= Program hit CUDA_ERROR_INVALID_VALUE (error 1) due to "invalid argument" on CUDA API call to cuLaunchKernelEx.
=========
========= ERROR SUMMARY: 1 error
"""
RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at {kernel}+0x2a0
=========     and Read access at {kernel}+0x310 [96 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def test_nothing_found():
    assert Report.of(CLEAN).passes("memcheck") and Report.of(CLEAN_OF_RACES).passes("racecheck")


@pytest.mark.parametrize("separator", ["=========", "========= "])
def test_a_kernel_is_named(separator):
    report = Report.of(INVALID.format(separator=separator))
    assert report.errors == 1 and not report.passes("memcheck")
    assert list(report.found) == [NAME]


@pytest.mark.parametrize(
    "text",
    [
        API,
        "========= Uninitialized __global__ memory read of size 4 bytes\n=========     at sort_kernel(int)+0x10\n" + ONE,
        "========= Barrier error detected. Divergent thread(s) in block.\n=========     at void f<1>()+0x10\n" + ONE,
        CLEAN.replace("0", "3"),  # counted, not printed
        "========= COMPUTE-SANITIZER\n",  # it did not end
        "",
    ],
)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_errors_of_any_words(text, tool):
    assert not Report.of(text).passes(tool)


def test_races_of_pipelines_alone_are_excused():
    of_pipeline = RACE.format(kernel=DECODE)
    assert Report.of(of_pipeline).passes("racecheck") and not Report.of(of_pipeline).passes("memcheck")
    portable = RACE.format(kernel=DECODE.replace("sm90", "sm80"))
    assert not Report.of(portable).passes("racecheck")
    assert not Report.of(of_pipeline + portable).passes("racecheck")


def test_looks_for_tagged_words_are_excused():
    assert Report.of(RACE.format(kernel=DECODE)).passes("initcheck")
    assert Report.of(RACE.format(kernel=DECODE.replace("sm90", "sm80"))).passes("initcheck")
    assert not Report.of(RACE.format(kernel=DECODE.replace("decode", "prefill"))).passes("initcheck")
    grouped = "void minfer::moe::grouped_w4a16_sm90_kernel<minfer::moe_w4a16::k>(minfer::moe::Params)"
    assert not Report.of(RACE.format(kernel=grouped)).passes("initcheck")


def test_first_message_of_a_kernel():
    report = Report.of(RACE.format(kernel=DECODE) * 2)
    assert report.first.keys() == report.found.keys() and all(report.first.values())
