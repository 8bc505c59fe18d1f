"""The demo: its rule of errors, its cases on a CPU, and with made-up timers what it does on a GPU."""

import dataclasses
import math

import pytest
import torch
from minfer.cli import main as cli
from minfer.cli.demo import case as demo_case, families, picture, runner, sizes, table
from minfer.cli.demo.case import Case, Outcome, Peer, Work
from minfer.measure import benchmarking
from rich.console import Console
from typer.testing import CliRunner

CASES = {f"{case.family}: {case.name}, {case.shape}": case for case in families.cases(sizes.CPU)}


def small_case(name="sum", **changes) -> Case:
    """x + 1 of one row of 16 numbers."""
    case = Case(
        family="test",
        name=name,
        shape="16",
        make=lambda: {"x": torch.randn(1, 16).bfloat16()},
        ours=lambda s: s["x"] + 1,
        truth=lambda s: s["x"].double() + 1,
        peers=(Peer("add", lambda s: s["x"] + 1),),
        work=lambda s: Work(64.0, 16.0),
    )
    return dataclasses.replace(case, **changes)


def rendered(item) -> str:
    console = Console(width=140)
    with console.capture() as text:
        console.print(item)
    return text.get()


def raises(s):
    raise NotImplementedError("not in this torch\nand more")


# ---- errors ----------------------------------------------------------------------------------------------------------------------


def test_worst_row_error():
    truth = torch.tensor([[[3.0, 4.0], [6.0, 8.0]], [[0.0, 0.0], [30.0, 40.0]]], dtype=torch.float64)
    assert demo_case.worst_row_error(truth.float(), truth) == 0
    off = truth.clone()
    off[0, 0, 1] += 0.5
    assert demo_case.worst_row_error(off, truth) == pytest.approx(0.1)
    off[1, 0, 0] = 0.25  # a row of zeros has no relative error
    assert demo_case.worst_row_error(off, truth) == pytest.approx(0.25)
    off[1, 1, 1] = math.nan
    assert demo_case.worst_row_error(off, truth) == math.inf
    assert demo_case.worst_row_error(torch.full_like(truth, math.inf), truth) == math.inf
    assert demo_case.worst_row_error(truth[:1], truth) == math.inf, "a result of another shape is wrong"
    assert demo_case.worst_row_error(truth[:0], truth[:0]) == 0


def test_rule():
    outcome = Outcome(small_case(), error=0.01, yardstick_error=0.004)
    assert outcome.allowed == pytest.approx(0.008 + 2**-8) and outcome.verified
    assert not dataclasses.replace(outcome, error=0.012).verified
    assert not dataclasses.replace(outcome, error=math.nan).verified
    assert not dataclasses.replace(outcome, error=math.inf).verified


@pytest.mark.parametrize("name", CASES)
def test_cases_see_a_wrong_row(name):
    """Every case is right as it is, and wrong when one row of its result has another sign, is shifted by an element or is NaN."""
    case = CASES[name]
    torch.manual_seed(0)
    operands = case.make()
    outcome, truth = runner.verify(case, operands)
    assert outcome.verified, (outcome.error, outcome.allowed)
    assert truth.dtype == torch.float64
    right = case.read(operands, case.ours(operands))
    for wrong in (-right, right.roll(1, -1), torch.full_like(right, math.nan)):
        spoilt = right.flatten(0, -2).clone()
        spoilt[-1] = wrong.flatten(0, -2)[-1]
        assert not demo_case.worst_row_error(spoilt.view(right.shape), truth) <= outcome.allowed


def test_cases_cover_the_package():
    names = " ".join(CASES)
    for word in ("SwiGLU", "gelu", "odd shape", "int4 weight", "mxfp4", "int8 weight", "fp8_e4m3 weight", "16-bit experts", "int4 experts"):
        assert word in names
    for kv_format in ("16bit", "fp8_e4m3", "int8", "int4"):
        assert f"decode, {kv_format} cache" in names and f"append, {kv_format}," in names
    assert "causal" in names


def test_a_wrong_value_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "console", cli.Console(highlight=False, soft_wrap=True, width=200))
    monkeypatch.setattr(runner, "runs_here", lambda: False)
    wrong = small_case("wrong sum", ours=lambda s: s["x"] + 1.1)
    monkeypatch.setattr(families, "cases", lambda sizes: [small_case("right sum"), wrong])
    result = CliRunner().invoke(cli.app, ["demo", "--out", str(tmp_path / "demo.png")])
    assert result.exit_code == 1
    assert "error: a result is wrong: test: wrong sum, 16\n" in result.output and "right sum," not in result.output
    assert "NO" in result.output


def test_a_new_case_changes_no_other_numbers(monkeypatch, tmp_path):
    """Every case draws from the seed, whatever ran before it."""
    monkeypatch.setattr(runner, "runs_here", lambda: False)
    drawn = []

    def record(s):
        drawn.append(s["x"].clone())
        return s["x"] + 1

    monkeypatch.setattr(families, "cases", lambda sizes: [small_case(ours=record), small_case(ours=record)])
    runner.run(tmp_path / "demo.png", lambda text: None)
    assert torch.equal(*drawn)


# ---- times, with made-up timers ----------------------------------------------------------------------------------------------------


class FakeTimer:
    """Calls the function once with each set; a replay takes 2 us for the operator, 3 us for the first peer, 4 us for the next."""

    made: list = []

    def __init__(self, fn, sets, *, estimate_us):
        assert estimate_us == 5.0
        for operands in sets:
            fn(operands)
        self.sets, self.us = sets, 2.0 + len(FakeTimer.made)
        FakeTimer.made.append(self)

    def replay_us(self):
        return self.us


@pytest.fixture
def fake_gpu(monkeypatch):
    FakeTimer.made = []
    monkeypatch.setattr(benchmarking, "GraphTimer", FakeTimer)
    monkeypatch.setattr(benchmarking, "estimate_us", lambda fn, sets: 5.0)
    monkeypatch.setattr(benchmarking, "rotation", lambda make: [make(), make()])
    monkeypatch.setattr(runner, "_can_compile", lambda: True)
    monkeypatch.setattr(torch, "compile", lambda fn, **options: lambda s: fn(s))


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_timed(fake_gpu, name):
    """Its PyTorch expressions compute the same; cuDNN, which a CPU does not have, is left out and named."""
    case, notes = CASES[name], []
    torch.manual_seed(0)
    with torch.inference_mode():
        outcome = runner.run_case(case, timed=True, rounds=3, say=notes.append)
    expected = [peer.name + ending for peer in case.peers for ending in ("", ", compiled") if not ending or peer.compiled]
    left_out = [name for name in expected if "cuDNN" in name]
    assert list(outcome.peers_us) == [name for name in expected if name not in left_out]
    assert len(notes) == len(left_out) and all(f"{name} is left out" in note for name, note in zip(left_out, notes, strict=True)), notes
    assert outcome.us == 2.0 and outcome.best_peer == case.peers[0].name and outcome.speed_up == 1.5
    assert 0 < outcome.floor_us < 10, "a few hundred thousand bytes"


def test_operands_of_peers(fake_gpu):
    """Sets of their own where they take others, made of the operator's in turn; the same sets where they do not."""
    case = CASES["quantised weights: int4 weight, 4 x 1792 x 512"]
    runner.run_case(case, timed=True, rounds=3)
    ours, peer = (timer.sets for timer in FakeTimer.made)
    assert [set(s) for s in (*ours, *peer)] == [{"x", "weight"}] * 2 + [{"x", "w"}] * 2
    assert all(mine["x"] is theirs["x"] for mine, theirs in zip(ours, peer, strict=True)) and peer[0]["x"] is not peer[1]["x"]
    assert peer[0]["w"].dtype == torch.bfloat16 and not torch.equal(peer[0]["w"], peer[1]["w"])
    FakeTimer.made = []
    runner.run_case(small_case(), timed=True, rounds=3)
    assert FakeTimer.made[0].sets is FakeTimer.made[1].sets


def test_expressions_that_are_left_out(fake_gpu):
    """Those that raise and those that compute something else; an error of the operator is raised, a wrong value is not timed."""
    good, missing, other = (Peer(n, f) for n, f in (("add", lambda s: s["x"] + 1), ("missing", raises), ("other", lambda s: s["x"] + 2)))
    notes = []
    outcome = runner.run_case(small_case(peers=(good, missing, other)), timed=True, rounds=3, say=notes.append)
    assert list(outcome.peers_us) == ["add"]
    assert notes[0] == "test: sum, 16: missing is left out: NotImplementedError: not in this torch"
    assert notes[1].startswith("test: sum, 16: other is left out: ArithmeticError: its values are off by")
    none = runner.run_case(small_case(peers=(missing,), yardstick=good.call), timed=True, rounds=3)
    assert none.us is not None and none.speed_up is None and none.best_peer is None
    wrong = runner.run_case(small_case(ours=lambda s: s["x"] + 2), timed=True, rounds=3)
    assert not wrong.verified and wrong.us is None
    with pytest.raises(NotImplementedError):
        runner.run_case(small_case(ours=raises), timed=True, rounds=3)


def test_shown(monkeypatch, tmp_path):
    """The table and the picture of times: every case in a line of 140 columns; without a time where there is none."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    outcomes = [
        Outcome(case, 1e-3, 1e-3, 1234.5, {p.name + ", compiled" * p.compiled: 1234.5 * (0.8 + 0.1 * i) for p in case.peers}, 617.25)
        for i, case in enumerate(families.cases(sizes.GPU))
    ]
    text = rendered(table.table(outcomes, "NVIDIA H200"))
    lines = text.splitlines()
    assert lines[0].rstrip() == "torch.ops.minfer on NVIDIA H200" and "…" not in text
    shown = dict.fromkeys(o.case.family for o in outcomes)
    assert len(lines) == 2 + len(outcomes) + len(shown), text
    for o, line in zip(outcomes, (line for line in lines[2:] if line.strip() not in shown), strict=True):
        assert line.startswith(f"  {o.case.name} ") and o.case.shape in line and f"{o.speed_up:.2f}x" in line and "50 %" in line
    legend = "\n".join(table.legend(outcomes))
    mean = benchmarking.geomean([o.speed_up for o in outcomes])
    assert f"geometric mean of {len(outcomes)} cases: {mean:.2f}x" in legend
    lonely = Outcome(small_case(), 1e-3, 1e-3, 10.0, {}, 5.0)
    assert "- -" in " ".join(rendered(table.table([lonely], "NVIDIA H200")).split())
    pytest.importorskip("matplotlib")
    assert picture.draw([*outcomes, lonely], tmp_path / "folder" / "demo.png")
    assert (tmp_path / "folder" / "demo.png").stat().st_size > 10_000


@pytest.mark.gpu
def test_demo_on_gpu(tmp_path):
    """Every case is right, and timed beside one PyTorch expression or more."""
    outcomes = runner.run(tmp_path / "demo.png", lambda text: None)
    wrong = [(o.label, o.error, o.allowed) for o in outcomes if not o.verified]
    assert not wrong
    assert all(o.us > 0 and o.speed_up is not None for o in outcomes), [o.label for o in outcomes if o.speed_up is None]


def test_floor():
    device = {"read_bandwidth": 4e6, "matrix_rate": 8e8}
    assert Work(8e6).floor_us(device) == 2.0
    assert Work(8e6, 4e9).floor_us(device) == 5.0
