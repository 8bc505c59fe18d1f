"""The planners' cost models of grouped GEMM and of attention from Python: predictions, and the fit to measurements of a made-up device."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
import torch
from minfer.measure import random_problems
from minfer.planning.plan import DTYPE_NAMES, NARROW_NAMES

from bench import fit_plans
from bench.suites import regret_attention, regret_grouped

SUITES = {
    "grouped": (random_problems.grouped, regret_grouped),
    "grouped_scaled": (random_problems.grouped_scaled, regret_grouped),
    "attention": (random_problems.attention, regret_attention),
}


def family_of(suite):
    return fit_plans.families()[suite.partition("_")[0]]


def blank(name, count, seed=2000):
    """Problems as files of measurements have them, with the plans' predictions for times."""
    generator, suite = SUITES[name]
    found = []
    for i in range(count):
        problem = generator(seed, i)
        own, choices = suite.choices_of(problem)
        facts = dataclasses.asdict(problem) | {"dtype": (DTYPE_NAMES | NARROW_NAMES)[problem.dtype]}
        plans = [[c.kernel, c.launch, c.predicted_us, c.predicted_us] for c in choices]
        found.append({"op": problem.op, "seed": seed, "index": i, **facts, "own": 1.0, "pick": [own.kernel, own.launch], "plans": plans})
    return [problem for problem in found if len(problem["plans"]) > 1]


def timed(name, model, count, seed=2000):
    """The same, with times of a device on which this model is right."""
    problems = blank(name, count, seed)
    times = iter(fit_plans.Data(family_of(name), problems).raw([model])[0].tolist())
    for problem in problems:
        problem["plans"] = [[kernel, launch, predicted, next(times)] for kernel, launch, predicted, _ in problem["plans"]]
    return problems


@pytest.mark.parametrize("name", SUITES)
def test_predictions_are_the_plans(name):
    """A plan's predicted time is the model's first expectation, or the floor where that is more; and its pick is the least, whatever the
    floor."""
    family, problems = family_of(name), blank(name, 40)
    data = fit_plans.Data(family, problems)
    model = fit_plans.default_model(family)
    expected = [us for found in problems for *_, us in found["plans"]]
    first = dataclasses.replace(family, lines=lambda *plan: family.lines(*plan)[1:])
    predicted = torch.maximum(fit_plans.Data(first, problems).raw([model])[0], data.floor_us)
    assert predicted.tolist() == pytest.approx(expected, rel=1e-5)  # plans are printed with six digits
    assert torch.equal(data.raw([{}]), data.raw([model]))  # the defaults' text has all their bits
    picks = fit_plans.regrets(data.picked([model]), data)[0]
    for found, regret in zip(problems, picks.tolist(), strict=True):
        own = next((us for kernel, launch, us, _ in found["plans"] if [kernel, launch] == found["pick"]), None)
        if own is None:  # divided keys are the plan's alone, and the fit chooses among the others
            assert name == "attention" and found["pick"][1].startswith("split_count=")
            continue
        assert regret == pytest.approx(own / min(us for *_, us in found["plans"]) - 1)


@pytest.mark.parametrize("name", SUITES)
def test_models_are_evaluated_side_by_side(name):
    data = fit_plans.Data(family_of(name), blank(name, 12))
    start = fit_plans.default_model(data.family)
    slow = start | {constant: 3 * value for constant, value in start.items() if constant.endswith("start_us")}
    both = data.raw([start, slow])
    assert torch.equal(both[0], data.raw([start])[0]) and torch.equal(both[1], data.raw([slow])[0])
    assert (both[1] > both[0]).all()


def test_what_cannot_be_predicted():
    ops, line = torch.ops.minfer, "64 8 512 512 bf16 0 0 dense 0 0 zipf 2 moe_sm90_bf16_tn_128x128x64_1x1x1_pingpong_swap"
    us, floor = torch.empty(1, 1, dtype=torch.float64), torch.empty(1, dtype=torch.float64)
    ops._predict_grouped("start_us,2\n", line, -1, us, floor)
    assert us.item() > floor.item() > 0
    ops._predict_grouped("start_us,2\n", line + "x", -1, us, floor)
    assert us.isnan().item()  # there is no such kernel
    for models, candidates, message in (
        ("start,2\n", line, "the model has no constant 'start'"),
        ("start_us,two\n", line, "start_us must be a number, got 'two'"),
        ("start_us\n", line, "start_us must be a number, got ''"),
        ("start_us,2\n", line.replace(" zipf 2 moe", " zipf moe"), "expected 13 cells"),
        ("start_us,2\n", line.replace("zipf", "any"), "the routing must be uniform, zipf or one_hot, got 'any'"),
        ("start_us,2\n\nstart_us,3\n", line, "us must be a contiguous float64 CPU tensor"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops._predict_grouped(models, candidates, -1, us, floor)
    with pytest.raises(RuntimeError, match="expected 15 cells"):
        ops._predict_attention("start_us,2\n", line, -1, us, floor)


@pytest.mark.parametrize("name", SUITES)
def test_a_fit_finds_a_device(name):
    """Times of constants that are off by 20 percent: predictions become right, also of problems that are held out, and regret goes."""
    family = family_of(name)
    start, rng = fit_plans.default_model(family), random.Random(1)
    truth = {constant: value * rng.lognormvariate(0.0, 0.2) for constant, value in start.items()}
    data, out = (fit_plans.Data(family, timed(name, truth, 60, seed)) for seed in (2000, 2001))
    fit = fit_plans.Fit(data, start, fit_plans.FitOptions(searches=10), frozen=["tail"])
    assert "tail" not in fit.names and not any("portable" in constant for constant in fit.names)
    before = fit.goal(torch.zeros(1, len(fit.names), dtype=torch.float64))
    theta = fit.least_squares(lambda text: None)
    found = fit.search(theta, lambda text: None)
    assert fit.goal(found[None]) <= fit.goal(theta[None]) < before
    error = lambda model, of: (of.raw([model])[0] / of.us).log().abs().median().item()  # noqa: E731
    for of, most in ((data, 0.02), (out, 0.04)):
        assert error(fit.model(theta), of) < most < error(start, of)
    mean = lambda model: fit_plans.regrets(data.picked([model]), data).nanmean().item()  # noqa: E731
    if mean(start) > mean(truth):
        assert mean(fit.model(theta)) < max(0.6 * mean(start), 1.1 * mean(truth))
    else:  # plans do not know the routing, and the truth's may by chance lose more: then the search alone has something to gain
        assert mean(fit.model(found)) < mean(start)


def test_the_command(tmp_path, capsys):
    family = fit_plans.families()["grouped"]
    path = tmp_path / "measured.jsonl"
    problems = timed("grouped", fit_plans.default_model(family) | {"start_us": 3.0}, 20)
    path.write_text("".join(json.dumps(problem) + "\n" for problem in [*problems, *problems[:3]]))
    assert len(fit_plans.read([path, path], family)) == 20  # no problem twice
    assert fit_plans.main(["grouped", str(path), "--searches", "0"]) == 0
    text = capsys.readouterr().out
    assert "today: fitted to: error" in text and "held out: error" in text and "\nstart_us" in text
    with pytest.raises(SystemExit):
        fit_plans.main(["attention", str(path)])
    assert "there are no problems of attention" in capsys.readouterr().err


def test_only_some_constants():
    """Names are chosen by their beginnings, with patterns; the others stay as they are."""
    names = ["start_us", "scaled_share", "scaled_tile_64x16_us", "stage_64x16_us", "stage_8_us", "stage_nvfp4", "unscaled_x"]
    assert fit_plans.frozen_but("scaled_,stage_*x", names) == ["start_us", "stage_8_us", "stage_nvfp4", "unscaled_x"]
    with pytest.raises(ValueError, match="no constant's name begins with 'column_'"):
        fit_plans.frozen_but("scaled_,column_", names)


def test_the_command_with_some_constants(tmp_path, capsys):
    """Of 16 and of 8 bits: only constants that may move are printed, and measurements from before there were 8 bits are still read."""
    family = fit_plans.families()["grouped"]
    model = fit_plans.default_model(family)
    truth = {constant: value * (1.5 if constant.endswith("start_us") else 1.0) for constant, value in model.items()}
    problems = [*timed("grouped", truth, 12), *timed("grouped_scaled", truth, 24)]
    for problem in problems[:12]:
        del problem["a_group"]
    path = tmp_path / "measured.jsonl"
    path.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    assert len(fit_plans.read([path], family)) == 36
    only = next(constant for constant in model if constant.startswith("scaled_") and constant.endswith("start_us"))[:-3]
    assert fit_plans.main(["grouped", str(path), "--searches", "0", "--worst", "0", "--only", only]) == 0
    table = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert [line.split()[0] for line in table] == [only + "_us"]
    before, after = map(float, table[0].split()[1:])
    assert after == pytest.approx(1.5 * before, rel=0.1)
    with pytest.raises(SystemExit):
        fit_plans.main(["grouped", str(path), "--only", "unknown_"])
    assert "no constant's name begins with 'unknown_'" in capsys.readouterr().err
