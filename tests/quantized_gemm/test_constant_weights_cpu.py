"""minfer.nn.constant_weights without a GPU: when a module says ``constant_weights``, with events that happen when the test says so."""

import contextlib
import copy
import pickle
import weakref

import minfer
import pytest
import torch
from minfer.nn import constant_weights
from minfer.nn.linear import W4Linear, W8Linear
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

K, N = 256, 48


class Device:
    """What the modules see of CUDA: events, and whether a graph is being captured."""

    def __init__(self):
        self.events: list[Device.Event] = []
        self.capturing, self.on_event, self.on_question = False, None, None
        device = self

        class Event:
            def __init__(self):
                self.done = False

            def record(self):
                assert not device.capturing, "an event of a capture says nothing of finished work"
                device.events.append(self)
                if device.on_event is not None:
                    device.on_event()

        self.Event = Event

    def is_done(self, event):
        assert not self.capturing, "an event cannot be asked for within a capture"
        if self.on_question is not None:
            self.on_question()
        return event.done

    def finish(self):
        for event in self.events:
            event.done = True


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(constant_weights, "_DEVICE", "cpu")
    monkeypatch.setattr(constant_weights, "_is_done", device.is_done)
    monkeypatch.setattr(torch.cuda, "Event", device.Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: device.capturing)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    return device


class Said:
    """A module whose calls say what they promised; the operator runs all the same."""

    def __init__(self, monkeypatch, module):
        self.module, self.calls = module, []
        name = f"w{module._bits}a16_gemm"
        operator = getattr(minfer, name)

        def spy(*args, **kwargs):
            self.calls.append(kwargs["constant_weights"])
            return operator(*args, **kwargs)

        monkeypatch.setattr(minfer.nn.linear, name, spy)
        self.x = torch.randn(3, module.in_features).to(module.bias.dtype)

    def __call__(self):
        out = self.module(self.x)
        assert torch.equal(out, self.module.weight().gemm(self.x))
        return self.calls[-1]


def linear(kind=W4Linear):
    module = torch.nn.Linear(K, N).half()
    layer = kind.from_linear(module, 64, False) if kind is W4Linear else kind.from_linear(module, symmetric=False)
    assert layer.constant_weights is False  # the default: nothing is proven where nobody asks for it
    layer.constant_weights = None
    return layer


@pytest.fixture(params=[W4Linear, W8Linear])
def said(request, monkeypatch, device):
    return Said(monkeypatch, linear(request.param))


def proven(said, device):
    """The module, when it has got as far as saying so."""
    assert said() is False
    device.finish()
    assert said() is True
    return said


def test_an_event_behind_the_writers(said, device):
    """Nothing is said before it has happened; from then on nothing is made or asked for."""
    assert [said(), said(), said()] == [False, False, False] and len(device.events) == 1
    device.finish()
    device.on_question = lambda: questions.append(1)
    questions = []
    assert [said(), said(), said()] == [True, True, True]
    assert len(device.events) == len(questions) == 1


def in_place(name):
    return lambda module: getattr(module, name).copy_(getattr(module, name).clone())


def through_a_view(module):
    module.scales[0, 3:5] *= 1.0


def under_inference_mode(module):
    with torch.inference_mode():
        module.zeros.add_(0)


def by_an_operator(module):
    a, b = torch.randn(module.scales.shape[0], 8).half(), torch.randn(8, N).half()
    with torch.inference_mode():
        minfer.gemm(a, b, out=module.scales)


def another(name):
    return lambda module: setattr(module, name, getattr(module, name).clone())


def memory_of_another(module):
    module.qweight.data = module.qweight.clone()


def state_dict(**options):
    return lambda module: module.load_state_dict({name: x.clone() for name, x in module.state_dict().items()}, **options)


CHANGES = {
    **{f"{name} in place": in_place(name) for name in ("qweight", "scales", "zeros")},
    **{f"another {name}": another(name) for name in ("qweight", "scales", "zeros")},
    "through a view": through_a_view,
    "under inference_mode": under_inference_mode,
    "by an operator": by_an_operator,
    "memory of another": memory_of_another,
    "load_state_dict": state_dict(),
    "load_state_dict, assign": state_dict(assign=True),
    "no zero points any more": lambda module: setattr(module, "zeros", None),
    "to another place and back": lambda module: module._apply(torch.clone),
    "counted by hand": lambda module: torch.autograd.graph.increment_version(module.qweight),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_begin_anew(change, said, device):
    proven(said, device)
    CHANGES[change](said.module)
    assert said() is False and len(device.events) == 2
    assert said() is False
    device.finish()
    assert said() is True and len(device.events) == 2


def test_what_is_no_weight_may_change(said, device):
    """The operator reads bias and activations in their turn whatever is said."""
    proven(said, device)
    said.module.bias.zero_()
    said.x = torch.randn(7, K).half()
    said.module.alpha = 2.0
    assert said() is True


def test_a_call_with_other_tensors(said, device):
    """functional_call lends the module weights; with its own it begins anew."""
    proven(said, device)
    lent = {name: x.clone() for name, x in said.module.named_buffers()}
    torch.func.functional_call(said.module, lent, (said.x,))
    assert said.calls[-1] is False
    assert said() is False
    device.finish()
    assert said() is True


def test_a_write_between_looking_and_marking(said, device):
    """Of another thread, say: its event may be in front of the write, so it says nothing of it."""
    device.on_event = lambda: said.module.qweight.add_(0)
    assert said() is False
    device.on_event = None
    device.finish()
    assert said() is False, "the event may be older than the write"
    device.finish()
    assert said() is True


def test_a_write_while_asking(said, device):
    assert said() is False
    device.finish()
    device.on_question = lambda: said.module.qweight.add_(0)
    said()  # of the version before, in front of which the work has finished
    device.on_question = None
    assert said() is False
    device.finish()
    assert said() is True


def test_a_forward_of_another_thread_while_asking(said, device):
    """What one thread has found of old weights replaces what another knows of new ones: that costs an event, nothing else."""
    assert said() is False
    device.finish()

    def meanwhile():
        device.on_question = None
        said.module.qweight.add_(0)
        assert said() is False

    device.on_question = meanwhile
    said()
    assert said() is False
    device.finish()
    assert said() is True


def test_a_forward_that_reads_nothing(said, device):
    """The operator has not read the weights, so nobody had to wait for who writes them."""
    rows, said.x = said.x, said.x[:0]
    assert [said(), said()] == [False, False] and not device.events
    said.x = rows.float()  # the operator raises
    with pytest.raises(RuntimeError, match="a must be"):
        said.module(said.x)
    assert len(device.events) == 1
    device.finish()
    said.x = rows
    assert said() is False and len(device.events) == 2
    device.finish()
    assert said() is True


TRACERS = {
    "torch.fx": lambda module, x: torch.fx.symbolic_trace(module, concrete_args=None),
    "make_fx": lambda module, x: make_fx(module)(x),
    "make_fx, before autograd": lambda module, x: make_fx(module, pre_dispatch=True)(x),
    "make_fx of fake tensors": lambda module, x: make_fx(module, tracing_mode="fake", _allow_non_fake_inputs=True)(x),
    "torch.export": lambda module, x: torch.export.export(module, (x,)).graph_module,
}


@pytest.mark.parametrize("tracer", TRACERS)
def test_traced_graphs_have_the_users_word_alone(tracer, said, device):
    proven(said, device)
    assert said() is True
    for word in (None, True):
        said.module.constant_weights = word
        traced = TRACERS[tracer](said.module, said.x)
        assert said.calls[-1] is bool(word)
        assert "gemm" in traced.code


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_traced_by_jit(said, device):
    proven(said, device)
    torch.jit.trace(said.module, said.x, check_trace=False)
    assert said.calls[-1] is False and said() is True


def test_in_a_capture(said, device):
    """A forward before the capture is enough, finished or not; one within it is none, nor are events made or asked for."""
    device.capturing = True
    assert [said(), said()] == [False, False] and not device.events
    device.capturing = False
    assert said() is False
    device.capturing = True
    assert [said(), said()] == [True, True]
    said.module.scales.mul_(1)  # a kernel of the graph
    assert [said(), said()] == [False, False] and len(device.events) == 1
    device.capturing = False
    device.finish()
    assert said() is False
    device.finish()
    assert said() is True
    device.capturing = True
    assert said() is True


def test_tensors_without_versions(device, monkeypatch):
    """Made under inference_mode: writes to them are not counted."""
    with torch.inference_mode():
        said = Said(monkeypatch, linear())
        assert said.module.qweight.is_inference()
        assert [said(), said()] == [False, False] and not device.events
        device.capturing = True
        assert said() is False
    assert said() is False
    said.module.constant_weights = True
    assert said() is True


def test_other_devices_than_cuda(said, monkeypatch, device):
    monkeypatch.setattr(constant_weights, "_DEVICE", "cuda")
    assert [said(), said()] == [False, False] and not device.events


@pytest.mark.parametrize("word", [True, False])
def test_the_users_word(word, said, device):
    said.module.constant_weights = word
    assert said() is word
    said.module.qweight.add_(0)
    device.capturing = True
    assert said() is word
    assert not device.events


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["deepcopy", "pickle"])
def test_copies_know_nothing(copied, said, device):
    proven(said, device)
    other = copied(said.module)
    assert other._known._seen is None and said.module._known._seen is not None
    assert torch.equal(other(said.x), said.module(said.x))
    assert set(said.module.state_dict()) == {"qweight", "scales", "zeros", "bias", "alpha"}
    said.module.constant_weights = True
    assert copied(said.module).constant_weights is True


def test_no_memory_is_kept(said, device):
    proven(said, device)
    old = weakref.ref(said.module.qweight)
    said.module.qweight = said.module.qweight.clone()
    assert old() is None


def test_compiled_graphs_have_the_users_word_alone(said, device):
    """A graph outlives what was proven when it was made."""
    proven(said, device)
    torch._dynamo.reset()
    nodes = []

    def record(graph, inputs):
        nodes.extend(n for n in graph.graph.nodes if n.op == "call_function" and "gemm" in str(n.target))
        return graph

    module = linear(type(said.module))
    compiled = torch.compile(module, fullgraph=True, backend=aot_autograd(fw_compiler=record))
    device.finish()
    for word in (None, True, False):
        module.constant_weights = word
        nodes.clear()
        assert torch.equal(compiled(said.x), module.weight().gemm(said.x))
        assert [node.kwargs.get("constant_weights", False) for node in nodes] == [bool(word)], word
    assert len(device.events) == 1


def test_buffers_that_became_parameters(said, device):
    module = said.module
    scales = module.scales
    del module.scales
    module.scales = torch.nn.Parameter(scales, requires_grad=False)
    proven(said, device)
    with torch.no_grad():
        module.scales.mul_(1)
    assert said() is False


OUT = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("minfer::") and name.endswith(".out")]


def test_writes_into_out_count():
    """Under inference_mode, too, into a tensor that was not made there. Meta kernels write nothing, so nothing else counts."""
    assert len(OUT) >= 5
    for name in OUT:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "ADInplaceOrView"), name
    a, b, out = (torch.empty(8, 8, dtype=torch.float16, device="meta") for _ in range(3))
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        before = out._version
        with mode():
            assert minfer.gemm(a, b, out=out) is out
        assert out._version == before + 1, mode
    with torch.inference_mode():
        own = torch.empty(8, 8, dtype=torch.float16, device="meta")
        minfer.gemm(a, b, out=own)
        assert own.is_inference()


@pytest.mark.skipif(minfer.build_info()["cuda"], reason="this build has CUDA")
def test_without_cuda_there_are_no_events():
    with pytest.raises(RuntimeError, match="minfer::_is_done: an event cannot be queried: this build has no CUDA"):
        torch.ops.minfer._is_done(0)


@pytest.mark.parametrize("kind", ["Fp8Linear", "Int8Linear"])
def test_modules_of_8_bit_activations(kind, device, monkeypatch):
    """They prove it in the same way, of their codes."""
    module = getattr(minfer.nn, kind).from_linear(torch.nn.Linear(64, 32, dtype=torch.bfloat16))
    name, calls = "gemm_fp8" if kind == "Fp8Linear" else "gemm_int8", []
    operator = getattr(minfer, name)

    def spy(*args, **kwargs):
        calls.append(kwargs["constant_weights"])
        return operator(*args, **kwargs)

    monkeypatch.setattr(minfer.quantize.scaled_weight, name, spy)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    want = module(x)
    assert calls == [False]
    module.constant_weights = None
    for said in (False, False):
        assert torch.equal(module(x), want) and calls[-1] is said
    device.finish()
    assert torch.equal(module(x), want) and calls[-1] is True
    module.weight.view(torch.uint8)[0, 0] ^= 1  # a write that torch counts
    module(x)
    assert calls[-1] is False
    device.finish()
    module(x)
    assert calls[-1] is True
    with pytest.raises(RuntimeError):
        module(torch.randn(3, 65, dtype=torch.bfloat16))
    module(x)
    assert calls[-1] is False  # the call that raised has read nothing
    module.constant_weights = True
    module(x)
    assert calls[-1] is True
