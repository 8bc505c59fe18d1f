"""What minfer uses of torch's private interfaces is there and does what it is used for; in a torch that lacks it, the import says so."""

import re
import subprocess
import sys
from pathlib import Path

import minfer
import pytest
import torch
from minfer._core import torch_private as private

GEMM = torch.ops.minfer.gemm
SOURCES = Path(private.__file__).parents[1]


def test_overloads_and_schemas():
    functional, out = private.overloads_of(GEMM)
    assert (functional, out) == (GEMM.default, GEMM.out) and private.overloads_of(torch.ops.minfer.moe_sort)[1] is None
    assert private.schema_of(out).name == "minfer::gemm" and private.schema_of(out).overload_name == "out"
    assert [private.is_written(x) for x in private.schema_of(out).arguments][-2:] == [False, True]


def test_versions_count_writes():
    x = torch.zeros(3)
    before = private.version_of(x)
    x.add_(1)
    assert private.version_of(x) == before + 1


def test_transforms_and_forward_mode():
    seen = []

    def look(x):
        seen.append((private.transforms_are_active(), private.forward_mode_is_active()))
        return x.sum()

    look(torch.ones(2))
    torch.func.grad(look)(torch.ones(2))
    torch.func.jvp(look, (torch.ones(2),), (torch.ones(2),))
    assert seen == [(False, False), (True, False), (True, True)]


def test_dispatch_modes():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    assert not private.dispatch_modes_are_active()
    with Mode():
        assert private.dispatch_modes_are_active()


def test_mode_of_functionalization():
    from torch._subclasses.functional_tensor import FunctionalTensorMode, PythonFunctionalizeAPI

    mode = FunctionalTensorMode()
    assert private.mode_of(PythonFunctionalizeAPI(mode)) is mode


def test_certainty_of_sizes():
    assert private.is_certain(1 == 1) and not private.is_certain(1 == 2)
    known = []

    @torch.compile(backend="eager", dynamic=True, fullgraph=True)
    def unknown(x):
        size = x.nonzero().shape[0]
        known.append(private.is_certain(size == 1))
        return x

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        unknown(torch.ones(4))
    assert known and not any(known)


def test_guards():
    """One for all operators of a function, and what it was traced for runs where it holds."""
    state, graphs, seen = [False], [], []

    def value() -> bool:
        return state[0]

    @torch._dynamo.assume_constant_result
    def look() -> bool:
        for _ in range(3):
            private.guard_on(value, "state")
        guards = torch._guards.TracingContext.get().guards_context.dynamo_guards
        seen.append(sum(guard.create_fn is private._guard_of(value, value(), "state") for guard in guards))
        return value()

    def backend(module, inputs):
        graphs.append(module)
        return module.forward

    function = torch.compile(lambda x: x + 1 if look() else x - 1, backend=backend, fullgraph=True)
    for state[0] in (False, True, False, True):
        assert function(torch.zeros(1)).item() == (1 if state[0] else -1)
    assert len(graphs) == 2 and set(seen) == {1}
    private.guard_on(value, "state")  # nothing is traced: nothing to do


def test_without_torch_functions():
    class Refuses(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    with Refuses(), private.without_torch_functions():
        assert torch.add(torch.ones(2, device="meta"), 1).shape == (2,)


def test_all_private_names_are_in_one_file():
    """torch._check and torch._grouped_mm are documented in spite of their names."""
    private_name = re.compile(
        r"\btorch\.(?!_check\b|_grouped_mm\b|ops\.minfer\b)(?:\w+\.)*_(?!_version__)\w+|fx\.experimental|\._schema\b|\._version\b"
    )
    found = [
        f"{path.relative_to(SOURCES)}:{number}: {line.strip()}"
        for path in sorted(SOURCES.rglob("*.py"))
        if path != Path(private.__file__)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if private_name.search(line)
    ]
    assert not found, found


@pytest.mark.parametrize("name", ["_C._after_autograd_keyset", "_ops._len_torch_dispatch_stack_pre_dispatch"])
def test_a_torch_without_it(name):
    script = f"import torch; del torch.{name}\ntry:\n  import minfer\nexcept ImportError as error:\n  print(error)"
    paths = [str(Path(path).resolve()) for path in sys.path if path]
    done = subprocess.run([sys.executable, "-c", f"import sys; sys.path = {paths!r}; {script}"], capture_output=True, text=True)
    assert f"needs torch.{name}, which torch {torch.__version__} does not have" in done.stdout, done.stderr
    assert minfer.__version__ and private.TESTED in done.stdout


def test_constants_in_compiled_graphs():
    """What the function returns when it is traced is in the graph, also a tensor that it holds."""
    seen = []

    class Held:
        def __init__(self):
            self.number, self.tensor = 3, torch.full((2,), 5.0)

    @private.constant_in_compiled_graphs
    def held(function):
        seen.append(function)
        return Held()

    compiled = torch.compile(lambda x: x * held(len).number + held(len).tensor, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 8.0)) and seen == [len, len]
