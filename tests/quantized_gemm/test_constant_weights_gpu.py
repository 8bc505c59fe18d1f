"""minfer.nn.constant_weights on a GPU: whoever writes the weights, and however late, a module that proves them has the bits of one that
reads nothing early. The writer is a kernel that lets its successor begin beside it (fuzz.late_writer)."""

import copy
import threading

import minfer
import pytest
import torch
from minfer.nn.linear import W4Linear, W8Linear

from tests.fuzz.late_writer import Late

pytestmark = pytest.mark.gpu

K, N, ROUNDS = 512, 256, 12
KINDS = [W4Linear, W8Linear]


class Written:
    """A module whose scales a slow product writes, and what it says of its calls."""

    def __init__(self, kind, monkeypatch):
        linear = torch.nn.Linear(K, N, bias=False).half().cuda()
        module = kind.from_linear(linear, 64, False) if kind is W4Linear else kind.from_linear(linear, 64, symmetric=False)
        module.constant_weights = None
        first, second = module.scales.clone(), (module.scales * 2).contiguous()
        self.writers = [Late(x, torch.device("cuda", torch.cuda.current_device())) for x in (first, second)]
        self.writers[1].out = self.writers[0].out  # one operand, two contents
        self.scales = self.writers[0].view
        self.x = torch.randn(4, K, device="cuda").half()
        plain = copy.deepcopy(module)
        plain.constant_weights = False
        self.wanted = []
        for late in self.writers:
            plain.scales = late.content.clone()
            self.wanted.append(plain(self.x))
        assert not torch.equal(*self.wanted)
        self.writers[0].hold(self.writers[0].content)
        module.scales, self.module, self.said = self.scales, module, []
        name = f"w{module._bits}a16_gemm"
        operator = getattr(minfer, name)

        def spy(*args, **kwargs):
            self.said.append(kwargs["constant_weights"])
            return operator(*args, **kwargs)

        monkeypatch.setattr(minfer.nn.linear, name, spy)
        torch.cuda.synchronize()

    def prove(self):
        self.module(self.x)
        torch.cuda.synchronize()
        self.module(self.x)
        assert self.said[-1] is True
        return self


@pytest.fixture(params=KINDS)
def written(request, monkeypatch):
    return Written(request.param, monkeypatch)


def test_an_early_read_would_be_seen(written):
    """The user's word, where it is not true: else the other tests could not fail."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no programmatic dependent launch")
    written.module.constant_weights = True
    wrong = 0
    for i in range(ROUNDS):
        written.writers[(i + 1) % 2].write()
        wrong += not torch.equal(written.module(written.x), written.wanted[(i + 1) % 2])
        torch.cuda.synchronize()
    assert wrong > 0


@pytest.mark.parametrize("calls", [1, 2, 5])
def test_a_writer_in_front(calls, written):
    """Of each round's calls, the first ones are still beside the writer."""
    written.prove()
    for i in range(ROUNDS):
        written.writers[(i + 1) % 2].write()
        for out in [written.module(written.x) for _ in range(calls)]:
            assert torch.equal(out, written.wanted[(i + 1) % 2])
    assert written.said.count(False) > ROUNDS
    written.prove()


def test_a_writer_on_another_stream(written):
    written.prove()
    other = torch.cuda.Stream()
    for i in range(ROUNDS):
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            written.writers[(i + 1) % 2].write()
        torch.cuda.current_stream().wait_stream(other)
        assert torch.equal(written.module(written.x), written.wanted[(i + 1) % 2])
    written.prove()


def captured(work):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    return graph, out


def test_a_graph_that_writes(written):
    """Writer and call in one graph: nothing is promised. A call in front of the writer may be."""
    written.prove()
    written.said.clear()

    def work():
        early = written.module(written.x)
        written.writers[1].write()
        late = written.module(written.x)
        written.writers[0].write()
        return early, late

    graph, (early, late) = captured(work)
    assert written.said == [True, False]
    for _ in range(ROUNDS):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(early, written.wanted[0]) and torch.equal(late, written.wanted[1])


def test_a_writer_in_front_of_a_replay(written):
    """Launches overlap within a graph, not across its beginning: what stands in front has finished."""
    written.prove()
    written.said.clear()
    graph, out = captured(lambda: written.module(written.x))
    assert written.said == [True]
    writing, _ = captured(lambda: written.writers[1].write())
    for i in range(ROUNDS):
        written.writers[0].write()
        graph.replay()
        assert torch.equal(out, written.wanted[0]), i
        writing.replay()
        graph.replay()
        assert torch.equal(out, written.wanted[1]), i


def test_a_replay_in_front_of_a_call(written):
    """A graph's writes are not counted when it is replayed: they have finished before what follows it begins."""
    written.prove()
    writing = [captured(late.write)[0] for late in written.writers]
    written.prove()
    for i in range(ROUNDS):
        writing[(i + 1) % 2].replay()
        assert torch.equal(written.module(written.x), written.wanted[(i + 1) % 2]), i
    assert written.said[-1] is True


def test_a_question_does_not_break_a_capture(written):
    """Of another thread, in CUDA's strictest mode."""
    written.module(written.x)
    torch.cuda.synchronize()
    begun, asked, said = threading.Event(), threading.Event(), []

    def ask():
        begun.wait(60)
        with torch.cuda.stream(torch.cuda.Stream()):
            said.append(minfer.nn.constant_weights._is_done(written.module._known._seen.event))
        asked.set()

    thread = threading.Thread(target=ask)
    thread.start()
    other, graph = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        begun.set()
        assert asked.wait(60)
        other += 1
    thread.join()
    graph.replay()
    torch.cuda.synchronize()
    assert said == [True] and other.sum().item() == 8


def test_threads_share_a_module(written):
    """Each on a stream of its own, with a writer between the rounds."""
    rounds, threads, wrong = 8, 4, []
    barrier = threading.Barrier(threads + 1, timeout=120)

    def run():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for i in range(rounds):
                barrier.wait()
                stream.wait_event(done)
                for _ in range(20):
                    wrong.append(not torch.equal(written.module(written.x), written.wanted[i % 2]))
                stream.synchronize()
                barrier.wait()

    pool = [threading.Thread(target=run) for _ in range(threads)]
    done = torch.cuda.Event()
    for thread in pool:
        thread.start()
    for i in range(rounds):
        written.writers[i % 2].write()
        done.record()
        barrier.wait()
        barrier.wait()
    for thread in pool:
        thread.join()
    assert len(wrong) == rounds * threads * 20 and not any(wrong)
    assert True in written.said and False in written.said


@pytest.mark.parametrize("kind", KINDS)
def test_inference_mode_and_moves(kind, monkeypatch):
    written = Written(kind, monkeypatch)
    with torch.inference_mode():
        written.prove()
        written.writers[1].write()
        assert torch.equal(written.module(written.x), written.wanted[1])
        assert written.said[-1] is False, "a write under inference_mode counts"
    moved = copy.deepcopy(written.module).cpu().cuda()
    assert torch.equal(moved(written.x), written.wanted[1]) and written.said[-1] is False
