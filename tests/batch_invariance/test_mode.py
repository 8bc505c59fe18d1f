"""The mode itself: who sets it for whom, and what sees it."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import minfer
import pytest
import torch
from minfer.planning.plan import Problem, plan_problem

OPS = torch.ops.minfer
H200 = -1


@pytest.fixture(autouse=True)
def outside():
    """Every test begins and ends outside of the mode."""
    before = minfer.is_batch_invariant()
    minfer.set_batch_invariant(False)
    yield
    minfer.set_batch_invariant(before)


def both() -> bool:
    """The mode, as Python and the library know it."""
    assert minfer.is_batch_invariant() == OPS._batch_invariant()
    return minfer.is_batch_invariant()


def test_a_block():
    assert not both()
    with minfer.batch_invariant():
        assert both()
        with minfer.batch_invariant(False):
            assert not both()
            with minfer.batch_invariant():
                assert both()
            assert not both()
        assert both()
    assert not both()


def test_a_block_that_fails():
    with pytest.raises(ZeroDivisionError), minfer.batch_invariant():
        assert both()
        raise ZeroDivisionError
    assert not both()


def test_one_object_is_entered_again():
    mode = minfer.batch_invariant()
    with mode, mode:
        assert both()
    assert not both()


def test_the_process():
    minfer.set_batch_invariant()
    assert both()
    with minfer.batch_invariant(False):
        assert not both()
        minfer.set_batch_invariant(False)
        minfer.set_batch_invariant(True)
        assert not both()
    assert both()
    minfer.set_batch_invariant(False)
    assert not both()


def in_thread(call):
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def test_a_block_is_the_thread_s():
    with minfer.batch_invariant():
        assert not in_thread(both)
    minfer.set_batch_invariant()
    assert in_thread(both)
    with minfer.batch_invariant(False):
        assert in_thread(both) and not both()


def test_threads_at_once():
    inside, done = threading.Barrier(2), threading.Barrier(2)

    def other():
        with minfer.batch_invariant():
            inside.wait()
            found = both()
            done.wait()
        return found

    seen = []
    thread = threading.Thread(target=lambda: seen.append(other()))
    thread.start()
    inside.wait()
    seen.append(both())
    done.wait()
    thread.join()
    assert sorted(seen) == [False, True]


def test_a_decorator():
    @minfer.batch_invariant()
    def inner(depth):
        return both() and (depth == 0 or inner(depth - 1))

    assert inner(2) and in_thread(lambda: inner(1)) and not both()


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_enabled_is_a_bool(value):
    with pytest.raises(TypeError, match="enabled must be a bool"):
        minfer.batch_invariant(value)
    with pytest.raises(TypeError, match="enabled must be a bool"):
        minfer.set_batch_invariant(value)


@pytest.mark.parametrize("value, said", [("1", "True True"), ("0", "False False"), ("", "False False"), ("yes", "must be 0 or 1")])
def test_the_environment(value, said):
    paths = [str(Path(path).resolve()) for path in sys.path if path]
    script = (
        f"import sys; sys.path = {paths!r}; import torch, minfer; print(minfer.is_batch_invariant(), torch.ops.minfer._batch_invariant())"
    )
    environment = os.environ | {"MINFER_BATCH_INVARIANT": value}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert said in done.stdout + done.stderr


def test_plans_follow_the_mode():
    problem = Problem(4096, 512, 7168)
    default, invariant = (plan_problem(problem, device=H200, batch_invariant=mode) for mode in (False, True))
    assert (default.splits, default.kernel) != (invariant.splits, invariant.kernel)
    assert plan_problem(problem, device=H200) == default
    with minfer.batch_invariant():
        assert plan_problem(problem, device=H200) == invariant
        assert plan_problem(problem, device=H200, batch_invariant=False) == default


def test_plan_says_what_the_mode_costs():
    arguments = dict(m=16, n=4096, k=4096, device=H200)
    default, invariant = (minfer.plan("gemm", batch_invariant=mode, **arguments) for mode in (False, True))
    assert (default.batch_invariant, default.cost, "mode" in str(default)) == (False, 1.0, False)
    assert invariant.batch_invariant and invariant.default_us == default.predicted_us
    assert invariant.cost == invariant.predicted_us / default.predicted_us
    assert f"batch-invariant: {invariant.cost:.2f} times the {default.predicted_us:.2f} us outside of it" in str(invariant)
    assert "add up k by wgmma16 in 1 range" in str(invariant)
    with minfer.batch_invariant():
        assert minfer.plan("gemm", **arguments) == invariant


def test_plan_of_a_norm():
    arguments = dict(m=1, n=6144, k=4096, device=H200)
    assert minfer.plan("rms_norm_gemm", **arguments).launches == 1
    invariant = minfer.plan("rms_norm_gemm", batch_invariant=True, **arguments)
    assert invariant.launches == 2 and invariant.product.batch_invariant and "batch invariant" in str(invariant)
    with minfer.batch_invariant():
        assert minfer.plan("rms_norm_gemm", **arguments) == invariant
        assert minfer.plan("rms_norm_gemm", batch_invariant=False, **arguments).launches == 1


# ---- torch.compile -----------------------------------------------------------------------------------------------------------------


class Counted:
    """A backend that counts the graphs it is given."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, module, inputs):
        self.graphs += 1
        return module.forward


@pytest.fixture
def compiled():
    torch.compiler.reset()
    yield Counted()
    torch.compiler.reset()


X, WEIGHT = torch.ones(3, 16, dtype=torch.bfloat16), torch.ones(8, 16, dtype=torch.bfloat16)


@pytest.mark.parametrize("operator", ["wrapper", "torch.ops", "out"])
def test_each_mode_is_traced_once(compiled, operator):
    out = torch.empty(3, 8, dtype=torch.bfloat16)
    calls = {
        "wrapper": lambda x: minfer.gemm(x, WEIGHT.t()),
        "torch.ops": lambda x: OPS.gemm(x, WEIGHT.t()),
        "out": lambda x: minfer.gemm(x, WEIGHT.t(), out=out),
    }
    function = torch.compile(calls[operator], backend=compiled, fullgraph=True)
    for expected in (1, 1):
        function(X)
        assert compiled.graphs == expected
    with minfer.batch_invariant():
        for expected in (2, 2):
            function(X)
            assert compiled.graphs == expected
    function(X)
    assert compiled.graphs == 2
    minfer.set_batch_invariant()
    function(X)
    assert compiled.graphs == 2


def test_a_branch_on_the_mode_is_traced_in_both(compiled):
    @torch.compile(backend=compiled, fullgraph=True)
    def function(x):
        return x + 1 if minfer.is_batch_invariant() else x - 1

    assert function(torch.zeros(1)).item() == -1
    with minfer.batch_invariant():
        assert function(torch.zeros(1)).item() == 1
    assert function(torch.zeros(1)).item() == -1 and compiled.graphs == 2


def test_what_has_no_operator_is_traced_once(compiled):
    function = torch.compile(lambda x: x + 1, backend=compiled, fullgraph=True)
    function(X)
    with minfer.batch_invariant():
        function(X)
    assert compiled.graphs == 1


def test_a_block_within_a_whole_graph_is_refused(compiled):
    @torch.compile(backend=compiled, fullgraph=True)
    def function(x):
        with minfer.batch_invariant():
            return minfer.gemm(x, WEIGHT.t())

    with pytest.raises(Exception, match="around the compiled function"):
        function(X)


def test_a_block_within_graphs_with_breaks(compiled):
    seen = []

    @torch.compiler.disable
    def look():
        seen.append(both())

    @torch.compile(backend=compiled)
    def function(x):
        x = x + 1
        with minfer.batch_invariant():
            look()
            x = minfer.gemm(x, WEIGHT.t())
        look()
        return x

    assert torch.equal(function(X), torch.full((3, 8), 32.0, dtype=torch.bfloat16))
    assert seen == [True, False] and not both()
