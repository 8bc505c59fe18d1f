"""Calibration of the cost model: measurements' files, the fit, and that plans use its table."""

from __future__ import annotations

import dataclasses
import math

import minfer
import pytest
import torch
from minfer.cli.main import app
from minfer.measure import random_problems
from minfer.planning import calibrate, tuned
from minfer.planning.calibrate import (
    Candidate,
    CostModel,
    Data,
    FitOptions,
    Measured,
    table_name,
)
from minfer.planning.plan import Problem, ScaledProblem, W4A8Problem, W4Problem, enumerate_plans, plan_problem
from typer.testing import CliRunner

H200 = -1


@pytest.fixture(autouse=True)
def none_stays():
    yield
    torch.ops.minfer._load_model("", H200)


def scaled(model: CostModel, rates: dict[str, float], kernels: dict[str, tuple[float, ...]]) -> CostModel:
    """The model with rates, and factors of kernels, multiplied."""
    factors = {name: tuple(a * b for a, b in zip(model.kernels[name], by, strict=True)) for name, by in kernels.items()}
    return CostModel({name: value * rates.get(name, 1.0) for name, value in model.rates.items()}, {**model.kernels, **factors})


def candidates(problem: Problem, us: float = 1.0, most: int = 40) -> Measured:
    plans = calibrate.choose(enumerate_plans(problem, device=H200), 3.0, most)
    return Measured(problem, tuple(Candidate.of(plan, us) for plan in plans))


def timed_by(model: CostModel, problems: list[Problem]) -> list[Measured]:
    """Measurements of a device on which this model is right."""
    blank = [candidates(problem) for problem in problems]
    times = iter(calibrate.predict([model], Data(blank))[0].tolist())
    return [Measured(m.problem, tuple(dataclasses.replace(c, us=next(times)) for c in m.candidates)) for m in blank]


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    generator = random_problems.calibration(7)
    return [next(generator) for _ in range(140)]


# ---- predictions ----------------------------------------------------------------------------------------------------------------


def test_predictions_are_the_plans(problems):
    """A plan's predicted time is the model's, or the floor where that is more."""
    plans = {p: enumerate_plans(p, device=H200, limit=20) for p in problems[:10]}
    measured = [Measured(p, tuple(Candidate.of(plan, 1.0) for plan in of_p)) for p, of_p in plans.items()]
    predicted = calibrate.predict([CostModel.of_device(H200)], Data(measured))[0]
    flat = [plan for of_p in plans.values() for plan in of_p]
    expected = [max(us, plan.floor_us) for us, plan in zip(predicted.tolist(), flat, strict=True)]
    assert [plan.predicted_us for plan in flat] == pytest.approx(expected, rel=1e-4)


def test_models_are_evaluated_side_by_side(problems):
    model, data = CostModel.of_device(H200), Data([candidates(p) for p in problems[:4]])
    slow = scaled(model, {"start": 3.0}, {})
    both = calibrate.predict([model, slow], data)
    assert torch.equal(both[1], calibrate.predict([slow], data)[0])
    assert (both[1] > both[0]).all()


def test_the_table_in_use_can_be_loaded():
    """The table of the model in use, loaded, plans as that model does."""
    text = torch.ops.minfer._gemm_model(H200)
    before = plan_problem(Problem(200, 5120, 5120), use_tuned=False, device=H200)
    torch.ops.minfer._load_model(text, H200)
    after = plan_problem(Problem(200, 5120, 5120), use_tuned=False, device=H200)
    assert after.override == before.override
    assert after.predicted_us == pytest.approx(before.predicted_us, rel=1e-5)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1 2 3", "expected 15 cells"),
        ("8 64 64 1 bf16 bf16 k k 16 16 0 16 2 0 x", "must be 0 or 1"),
        ("8 64 64 1 bf17 bf16 k k 16 16 0 16 0 0 x", "ab_type"),
        ("8 64 64 bf16 int5 128 0 0 0 x", "must be one of int4"),
        ("8 64 64 bf16 int4 128 0 0 2 x", "must be 0 or 1"),
    ],
)
def test_bad_candidates_are_refused(line, message):
    with pytest.raises(RuntimeError, match=message):
        torch.ops.minfer._predict_gemm(CostModel.of_device(H200).text(9), line, H200, torch.empty(1, 1, dtype=torch.float64))


def test_results_must_fit():
    line = "8 64 64 1 bf16 bf16 k k 16 16 0 16 0 0 no_such_kernel"
    text = CostModel.of_device(H200).text(9)
    with pytest.raises(RuntimeError, match=r"float64 CPU tensor of \[1, 1\]"):
        torch.ops.minfer._predict_gemm(text, line, H200, torch.empty(1, 2, dtype=torch.float64))
    us = torch.zeros(1, 1, dtype=torch.float64)
    torch.ops.minfer._predict_gemm(text, line, H200, us)
    assert math.isnan(us.item())  # this build has no such kernel


# ---- measurements' files ----------------------------------------------------------------------------------------------------------


def test_measurements_round_trip(tmp_path, problems):
    written = [candidates(p, us=3.5) for p in problems[:30]]
    assert {m.problem.gated for m in written} == {True, False}
    assert torch.float32 in {m.problem.out_dtype for m in written}
    assert {"int4", "nf4"} <= {m.problem.w4_format for m in written if isinstance(m.problem, W4Problem)}
    path = tmp_path / "measured.jsonl"
    path.write_text("".join(m.line() + "\n" for m in written))
    assert calibrate.read_measurements([path]) == written
    path.write_text(path.read_text() + '{"m": 1}\n')
    with pytest.raises(ValueError, match=f"line {len(written) + 1}: KeyError"):
        calibrate.read_measurements([path])


def test_unknown_kernels_are_ignored(problems):
    known = candidates(problems[0])
    unknown = dataclasses.replace(known.candidates[0], kernel="gemm_sm90_bf16_tn_8x8x8_1x1x1_new", us=0.001)
    data = Data([Measured(problems[0], (unknown, *known.candidates))])
    assert len(data.us) == len(known.candidates)
    assert calibrate.quality(CostModel.of_device(H200), data).worst == 0.0  # all took 1 us
    with pytest.raises(ValueError, match="no candidate"):
        Data([Measured(problems[0], (unknown,))])


def test_rarely_timed_kernels_join():
    plans = enumerate_plans(Problem(200, 5120, 5120), device=H200)
    near = calibrate.choose(plans, 1.2, 8)
    assert len(near) <= 8
    assert all(plan.predicted_us < 1.2 * plans[0].predicted_us for plan in near)
    seen = {calibrate.table_name(plan.kernel): 5 for plan in plans}
    rare = next(plan for plan in plans if 2 * plans[0].predicted_us < plan.predicted_us < 3 * plans[0].predicted_us)
    del seen[calibrate.table_name(rare.kernel)]
    chosen = calibrate.choose(plans, 1.2, 8, seen, 2)
    assert chosen[: len(near)] == near
    assert rare.kernel in {plan.kernel for plan in chosen[len(near) :]}


def test_regret_is_that_of_the_pick():
    problem = Problem(200, 5120, 5120)
    blank = candidates(problem)
    times = [5.0, 4.0, *[8.0] * (len(blank.candidates) - 2)]
    data = Data([Measured(problem, tuple(dataclasses.replace(c, us=t) for c, t in zip(blank.candidates, times, strict=True)))])
    predicted = torch.arange(1.0, len(times) + 1, dtype=torch.float64)
    assert calibrate.regrets(predicted, data).tolist() == pytest.approx([0.25])
    predicted[1] = 0.5
    assert calibrate.regrets(predicted, data).tolist() == [0.0]


# ---- the fit ----------------------------------------------------------------------------------------------------------------------


def test_planted_constants_are_found(problems):
    """A device with other rates and one slow kernel: the fit to its times finds them."""
    prior = CostModel.of_device(H200)
    # Without those of 8-bit operands, whose times are also a matter of the rates of scales, and of few kernels.
    problems = [p for p in problems if not isinstance(p, (ScaledProblem, W4A8Problem))][:96]
    of_kernel = [name for p in problems for name in {calibrate.table_name(c.kernel) for c in candidates(p).candidates}]
    often = max(sorted(set(of_kernel)), key=of_kernel.count)
    truth = scaled(prior, {"start": 1.4, "bandwidth": 0.7, "gpu_rate": 0.8, "epilogue": 0.75}, {often: (1.25, 1, 1, 1, 1, 1)})
    measured = timed_by(truth, problems)
    train, test = Data(measured[::2]), Data(measured[1::2])
    before = calibrate.quality(prior, test)
    model = calibrate.fit(train, prior, FitOptions(shared=0.0, steps=15))
    after = calibrate.quality(model, test)
    assert before.error > 0.1
    assert after.error < 0.01
    assert after.mean < 0.2 * before.mean + 1e-3
    for name in ("start", "bandwidth", "gpu_rate", "epilogue"):
        assert model.rates[name] == pytest.approx(truth.rates[name], rel=0.06), name
    assert model.kernels[often][0] == pytest.approx(truth.kernels[often][0], rel=0.05)


def test_outliers_do_not_move_the_fit(problems):
    """A time in twenty is three times what it should be."""
    prior = CostModel.of_device(H200)
    measured = timed_by(scaled(prior, {"start": 1.3}, {}), problems)
    spoilt = [
        Measured(m.problem, tuple(dataclasses.replace(c, us=3 * c.us) if j % 20 == i % 20 else c for j, c in enumerate(m.candidates)))
        for i, m in enumerate(measured)
    ]
    model = calibrate.fit(Data(spoilt), prior, FitOptions(shared=0.0, steps=15))
    assert model.rates["start"] == pytest.approx(1.3 * prior.rates["start"], rel=0.06)


def test_kernels_that_the_prior_lacks_have_a_deviation_of_their_own(problems):
    prior = CostModel.of_device(H200)
    measured = timed_by(prior, problems)
    names = [table_name(candidate.kernel) for m in measured for candidate in m.candidates]
    name = max(set(names), key=names.count)
    data = Data(timed_by(scaled(prior, {}, {name: (3.0,) * len(prior.kernels[name])}), problems))
    lacking = CostModel(prior.rates, {known: factors for known, factors in prior.kernels.items() if known != name})
    stiff, free = (calibrate.fit(data, lacking, FitOptions(new_deviation=deviation, steps=8)) for deviation in (1e-4, 0.5))
    assert stiff.kernels[name] == pytest.approx((1.0,) * len(prior.kernels[name]), rel=0.05)
    assert max(free.kernels[name]) > 2.0


def test_what_was_not_measured_keeps_the_prior(problems):
    prior = CostModel.of_device(H200)
    plain = [m for m in timed_by(scaled(prior, {"start": 1.3}, {}), problems) if not m.problem.c]
    data = Data(plain)
    model = calibrate.fit(data, prior, FitOptions(steps=4))
    assert model.rates["c_start"] == pytest.approx(prior.rates["c_start"], rel=1e-6)
    for name in set(prior.kernels) - set(data.names):
        assert model.kernels[name] == prior.kernels[name]


def test_the_gradient_of_the_expected_regret(problems):
    prior = CostModel.of_device(H200)
    data = Data(timed_by(scaled(prior, {"start": 1.5, "tile": 0.5}, {}), problems[:6]))
    search = calibrate._Fit(data, prior, FitOptions(), H200)
    residuals = search.residuals(search.prior)
    value, gradient, curvature = search.expected_regret(residuals)
    assert value > 0
    assert (curvature >= 0).all()
    for row in (0, len(residuals) // 2, len(residuals) - 1):
        moved = residuals.clone()
        moved[row] += 1e-6
        slope = (search.expected_regret(moved)[0] - value) / 1e-6
        assert slope.item() == pytest.approx(gradient[row].item(), rel=1e-3, abs=1e-6)


# ---- the table --------------------------------------------------------------------------------------------------------------------


def test_a_calibrated_table_decides_plans(tmp_path, monkeypatch):
    """From the file in the user's folder, for its own device alone, to the planner."""
    monkeypatch.setenv("MINFER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H300")
    problem = Problem(200, 5120, 5120)
    before = plan_problem(problem, use_tuned=False, device=H200)
    model = scaled(CostModel.of_device(H200), {"start": 4.0}, {})
    path = tuned.write_user_model("NVIDIA H300", "# comment\n" + model.text())
    assert path == tuned.user_model("NVIDIA H300")
    assert CostModel.parse(path.read_text()).text() == model.text()
    assert tuned.load_user_model(H200)
    after = plan_problem(problem, use_tuned=False, device=H200)
    assert after.predicted_us > before.predicted_us + 2
    assert CostModel.of_device(H200).rates["start"] == pytest.approx(model.rates["start"], rel=1e-4)
    assert enumerate_plans(problem, device=H200, limit=1)[0].predicted_us == pytest.approx(after.predicted_us)
    path.write_text("rate,start,1\n")
    with pytest.raises(ValueError, match=f"{path.name}: .*1 rates of"):
        tuned.load_user_model(H200)
    assert plan_problem(problem, use_tuned=False, device=H200) == before
    path.unlink()
    assert not tuned.load_user_model(H200)


def test_tables_are_read_when_cuda_is_first_used(tmp_path, monkeypatch):
    """Where there is a table of any kind; one that cannot be used is a warning."""
    deferred = []
    monkeypatch.setenv("MINFER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuned, "when_cuda_is_first_used", deferred.append)
    monkeypatch.setattr(tuned, "build_info", lambda: minfer.build_info() | {"cuda": True})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=0: "NVIDIA H300")
    tuned.load_at_first_use()
    assert deferred == []
    path = tuned.write_user_model("NVIDIA H300", CostModel.of_device(H200).text())
    tuned.load_at_first_use()
    deferred[0]()
    path.write_text("rate,speed,1\n")
    with pytest.warns(UserWarning, match=f"a cost model of device 0 was not loaded: .*{path.name}: .*no rate is named 'speed'"):
        deferred[0]()


def test_table_names_are_the_librarys():
    names = {calibrate.table_name(plan.kernel) for plan in enumerate_plans(Problem(200, 5120, 5120), device=H200)}
    assert names <= set(CostModel.of_device(H200).kernels)


def test_the_command_fits_to_files(tmp_path, problems):
    prior = CostModel.of_device(H200)
    measurements, table = tmp_path / "measured.jsonl", tmp_path / "model.csv"
    measurements.write_text("".join(m.line() + "\n" for m in timed_by(scaled(prior, {"start": 1.4}, {}), problems[:24])))
    done = CliRunner().invoke(app, ["tune", "--device", "--from-measurements", str(measurements), "--export", str(table)])
    assert done.exit_code == 0, done.output
    assert "24 problems" in done.output
    assert CostModel.parse(table.read_text()).rates["start"] > 1.2 * prior.rates["start"]
    torch.ops.minfer._load_model(table.read_text(), H200)
    assert CliRunner().invoke(app, ["tune", "--device", "gemm"]).exit_code == 1
