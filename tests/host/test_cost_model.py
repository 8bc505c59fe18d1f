"""The analytic GEMM model: tables of its constants can be loaded for a device, and what they say decides the plans."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from minfer.planning.plan import Problem, enumerate_plans, plan_problem

SHIPPED = (Path(__file__).resolve().parents[2] / "cpp" / "configs" / "models" / "nvidia-h200.csv").read_text()
PROBLEM = Problem(200, 5120, 5120)


def scaled(kind: str, name: str, factor: float) -> str:
    """The shipped table with the numbers of one line multiplied."""
    lines = []
    for line in SHIPPED.splitlines():
        if line.startswith(f"{kind},{name},"):
            line = ",".join([kind, name, *(f"{float(cell) * factor:.6g}" for cell in line.split(",")[2:])])
        lines.append(line)
    assert "\n".join(lines) != SHIPPED.rstrip("\n")
    return "\n".join(lines)


@pytest.fixture(autouse=True)
def none_stays():
    yield
    torch.ops.minfer._load_model("", -1)


def analytic(problem: Problem = PROBLEM):
    return plan_problem(problem, use_tuned=False, device=-1)


def test_the_table_that_ships_is_the_model():
    before = analytic()
    torch.ops.minfer._load_model(SHIPPED, -1)
    assert analytic() == before


def test_rates_and_factors_decide():
    before = analytic()
    torch.ops.minfer._load_model(scaled("rate", "start", 2.0), -1)
    assert analytic().predicted_us > before.predicted_us + 1
    slow = before.kernel.removeprefix("gemm_").replace("bf16_", "").replace("f16_", "")
    torch.ops.minfer._load_model(scaled("kernel", slow, 3.0), -1)
    assert analytic().kernel != before.kernel
    torch.ops.minfer._load_model("", -1)
    assert analytic() == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rate,start,1\n", "1 rates of"),
        ("rate,speed,1\n", "line 1: no rate is named 'speed'"),
        ("rate,start,1\nrate,start,1\n", "line 2: repeats start"),
        ("rate,start\n", "line 1: expected rate,name,value"),
        ("# comment\nrate,start,0\n", "line 2: start"),
        ("kernel,sm90_x,1,2,3\n", "line 1: expected"),
    ],
)
def test_bad_tables_are_refused_and_change_nothing(text, message):
    before = analytic()
    with pytest.raises(RuntimeError, match=message):
        torch.ops.minfer._load_model(text, -1)
    assert analytic() == before


@pytest.mark.parametrize("mnk", [(1, 4096, 4096), (200, 2816, 3072), (3000, 27648, 5120)])
def test_the_plan_is_the_best_prediction(mnk):
    """Kernels whose bound is above the best so far are left out: the choice must not change by it."""
    problem = Problem(*mnk)
    best = min(plan.predicted_us for plan in enumerate_plans(problem, device=-1))
    assert analytic(problem).predicted_us == pytest.approx(best)


@pytest.mark.parametrize("mnk", [(5000, 4096, 2048), (1500, 28672, 1024), (333, 2304, 9000)])
def test_the_chosen_order_of_tiles_comes_first(mnk):
    """The tuner takes a kernel's first candidate of equal prediction for its order of tiles."""
    problem = Problem(*mnk)
    plan = analytic(problem)
    first = next(
        x
        for x in enumerate_plans(problem, device=-1)
        if (x.kernel, x.decomposition, x.splits, x.columns) == (plan.kernel, plan.decomposition, plan.splits, plan.columns)
    )
    assert (first.raster, first.swizzle) == (plan.raster, plan.swizzle)
