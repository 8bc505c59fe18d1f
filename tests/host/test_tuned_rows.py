"""The library's user rows: of one device or of all, numbers within their ranges, nothing changed by a text that cannot be right."""

import dataclasses

import minfer
import pytest
import torch
from minfer.planning import tuned
from minfer.planning.plan import Problem, enumerate_plans, plan_problem
from minfer.planning.tuned import TunedRow, format_rows

H200 = -1
PROBLEM = Problem(160, 1736, 1048)  # that no table of layers has
load = torch.ops.minfer._load_tuned


@pytest.fixture(autouse=True)
def no_user_rows():
    yield
    load("")


def rows_of(*changes, device=H200):
    """Rows for plans that the analytic model does not choose, the last ones first."""
    plans = enumerate_plans(PROBLEM, device=device)
    return [dataclasses.replace(TunedRow.of(plan, 10.0), **change) for plan, change in zip(reversed(plans), changes, strict=False)]


def planned(device=H200):
    return plan_problem(PROBLEM, device=device)


def test_rows_of_all_devices_are_added_to():
    first, second = rows_of({}, {"m": 150})
    assert load(format_rows([first])) == 1 and planned().source == "tuned"
    assert load(format_rows([second])) == 1 and planned().kernel == first.kernel, "a table is added to those before"
    assert load("") == 0 and planned().source == "analytic"


def test_rows_of_one_device_are_no_other_ones():
    (row,) = rows_of({})
    assert load(format_rows([row]), 3) == 1
    assert planned().source == "analytic", "an H200 that is not here is no device of this machine"
    load(format_rows([row]))
    load("", 3)
    assert planned().source == "tuned", "forgetting one device's rows leaves those of all"
    load("")
    load(format_rows([row]), 3)
    load("")
    assert planned().source == "analytic"
    with pytest.raises(RuntimeError, match="_load_tuned: device must be an index, or -1 for all devices, got -2"):
        load("", -2)


@pytest.mark.gpu
def test_rows_of_a_device_are_used_there():
    analytic = planned(device=0)
    own, everyones = rows_of({}, {}, device=0)
    load(format_rows([everyones]))
    load(format_rows([own]), 0)
    assert planned(device=0).override == plan_of(own), "its own before everyone's"
    assert planned().override == plan_of(everyones)
    load("", 0)
    assert planned(device=0).override == plan_of(everyones)
    load("")
    load(format_rows([own]), 1)
    assert planned(device=0).override == analytic.override
    # An operator's remembered plan follows too.
    a, b = torch.randn(160, 1048, device="cuda:0").half(), torch.randn(1736, 1048, device="cuda:0").half().t()
    before = minfer.gemm(a, b)
    load(format_rows([own]), 0)
    torch.testing.assert_close(minfer.gemm(a, b), before, rtol=2e-3, atol=2e-2)


def plan_of(row):
    return next(p.override for p in enumerate_plans(PROBLEM) if (p.kernel, p.decomposition, p.splits, p.swizzle, p.raster) == fields(row))


def fields(row):
    return row.kernel, row.decomposition, row.splits, row.swizzle, row.raster


BAD = {
    "m of 64 bits": ({"m": 2**32 + 160}, "m must be 0 to 2147483647, got 4294967456"),
    "n of 64 bits": ({"n": 2**40}, "n must be 0 to 2147483647, got 1099511627776"),
    "k negative": ({"k": -8}, "k must be 0 to 2147483647, got -8"),
    "more than 64 bits": ({"batch": 2**70}, f"batch must be 0 to 2147483647, got {2**70}"),
    "splits of 32 bits and one": ({"splits": 2**32 + 1}, "splits must be 1 to 4096, got 4294967297"),
    "no splits": ({"splits": 0}, "splits must be 1 to 4096, got 0"),
    "swizzle": ({"swizzle": 2**31}, "swizzle must be 1 to 4096, got 2147483648"),
    "no number": ({"swizzle": "2x"}, "swizzle must be an integer, got '2x'"),
    "a flag": ({"has_c": 2}, "has_c must be 0 or 1, got '2'"),
    "no time": ({"us": 0.0}, "us must be a positive number, got '0.00'"),
    "nan": ({"us": float("nan")}, "us must be a positive number, got 'nan'"),
    "text for a time": ({"us": "fast"}, "us must be a positive number, got 'fast'"),
    "major": ({"a_major": "row"}, "a_major must be k or mn, got 'row'"),
}


@pytest.mark.parametrize("case", BAD)
def test_numbers_out_of_range(case):
    change, message = BAD[case]
    good, bad = rows_of({}, change)
    load(format_rows([good]))
    with pytest.raises(RuntimeError, match="minfer::_load_tuned: line 2: " + message):
        load(format_rows([bad]))
    assert planned().source == "tuned", "the rows before stay"
    assert tuned.COLUMNS[0] == "op"


def test_line_is_named():
    rows = rows_of({"m": 150}, {"m": 160, "splits": -3})
    text = "# measured on a machine\n\n" + format_rows(rows)
    with pytest.raises(RuntimeError, match="line 5: splits must be 1 to 4096, got -3"):
        load(text)


def test_widest_swizzle_is_planned():
    (row,) = rows_of({"swizzle": 4096, "splits": 4096})
    load(format_rows([row]))
    assert planned().swizzle == 4096
