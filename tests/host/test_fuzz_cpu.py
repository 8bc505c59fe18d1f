"""The random tests themselves: they find injected bugs, find nothing without one, say how to repeat a case, and survive their worker."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.contracts import operator_cases
from tests.fuzz import late_writer, supervisor
from tests.fuzz.draw import CPU, Data, Draw
from tests.fuzz.families import FAMILIES
from tests.fuzz.injected import BUGS, injected
from tests.fuzz.runner import case_of, run_case
from tests.fuzz.worker import Plan

DEVICE = torch.device("cpu")
ENOUGH = 250  # cases within which an injected bug must be found


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors: threads of torch's would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.operator}-{bug.name}")
def test_finds(bug):
    with injected(bug):
        for index in range(ENOUGH):
            result = run_case(f"{bug.operator}:{index}", 1, DEVICE)
            if any(bug.raises or "raised " not in failure for failure in result.failures):
                return
    pytest.fail(f"{ENOUGH} cases passed")


@pytest.mark.parametrize("name", FAMILIES)
def test_finds_nothing_in_what_is_right(name):
    for index in range(12):
        result = run_case(f"{name}:{index}", 2, DEVICE)
        assert not result.failures, (result.name, result.parameters, result.failures)
        assert result.comparisons > 0


def test_bugs_are_many():
    assert len(BUGS) >= 20 and len({bug.name for bug in BUGS}) == len(BUGS)
    assert {bug.operator for bug in BUGS} <= FAMILIES.keys()


def test_every_operator_has_a_family():
    assert operator_cases.names() <= FAMILIES.keys()


def test_a_case_is_its_name():
    """Seed and name decide on everything."""
    name = case_of(7, 3)
    assert name == case_of(7, 3) and name.endswith(":3")
    first, second = (run_case("attention_paged:5", 7, DEVICE) for _ in range(2))
    assert first.parameters == second.parameters and first.comparisons == second.comparisons
    assert run_case("attention_paged:6", 7, DEVICE).parameters != first.parameters


def test_command_line(tmp_path):
    root, report = Path(__file__).parents[2], tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.fuzz", "--cases", "6", "--seed", "2", "--family", "moe_sort", "--json", str(report)]
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(command, cwd=root, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(report.read_text())["families"]["moe_sort"]["cases"] == 6 and "moe_sort" in done.stdout


def test_a_crash_or_a_hang_costs_one_case(monkeypatch):
    """The worker is started again behind the case that was its last."""
    monkeypatch.setenv("MINFER_FUZZ_FATE", "die:moe_sort:1 hang:moe_sort:2")
    results = []
    plan = Plan(seed=2, device="cpu", families=("moe_sort",))
    tallies = supervisor.run(plan, seconds=None, cases=4, patience=15.0, report=results.append)
    assert [result["name"] for result in results] == [f"moe_sort:{i}" for i in range(4)]
    assert [bool(result["failures"]) for result in results] == [False, True, True, False]
    assert "ended the process" in results[1]["failures"][0] and "no answer within" in results[2]["failures"][0]
    assert tallies["moe_sort"].failures == 2


# ---- operands written late -------------------------------------------------------------------------------------------------------------


def test_every_operand_has_a_late_writer():
    """The tests of late writers know all tensors that the families pass."""
    for name, family in FAMILIES.items():
        if not family.traced:  # no operator of its own
            continue
        found = set()
        for index in range(60):
            draw = Draw(f"{name}/{index}")
            found |= {key for key, x in family.fill(family.draw(draw, CPU), draw, Data(DEVICE, index)).tensors.items() if x is not None}
        if name == "merge_attention_states":
            found = {key for key in found if key[3:] in ("0", "1")}
        assert found == set(late_writer.OPERANDS[name]), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.uint8, torch.int8])
def test_the_late_writer_writes_every_bit(dtype):
    content = torch.randint(0, 256, (5, 7, 16), dtype=torch.uint8).view(dtype)
    late = late_writer.Late(content, DEVICE, depth=256)
    assert (late.content.view(torch.uint8) != content.view(torch.uint8)).float().mean() < 0.06
    late.write()
    assert torch.equal(late.view.view(torch.uint8), late.content.view(torch.uint8))


@pytest.mark.parametrize("name", late_writer.OPERANDS)
def test_calls_of_the_late_writer_tests(name):
    """Without a GPU nothing is late, but the same calls are made."""
    for operand in late_writer.OPERANDS[name][:2]:
        draw = Draw(f"{name}/{operand}")
        case = late_writer.draw_case(FAMILIES[name], operand, draw, Data(DEVICE, draw.getrandbits(62)))
        assert late_writer.check(case, operand, DEVICE, depth=256) in (None, "blind")
