"""Any thread, any stream, any device: operators as the first CUDA action of a fresh thread, from several threads at once, on another device
than the current one, always with the same bits. What the cases have in common with the library is checked without a GPU.
"""

import itertools
import threading

import pytest
import torch

from tests.contracts import operator_cases

THREADS = 4
gpu = pytest.mark.gpu


@pytest.fixture(scope="module")
def cases():
    """operator -> (calls, what each returns on the main thread); memory for results is in torch's cache then: allocating asks no CUDA."""
    calls = operator_cases.calls("cuda:0")
    expected = {name: [results(call) for call in own] for name, own in calls.items()}
    torch.cuda.synchronize()
    return {name: list(zip(calls[name], expected[name], strict=True)) for name in calls}


def cases_of(name, cases):
    """An operator's (call, what it returns)."""
    if name not in cases:
        pytest.skip("not in this build")
    return cases[name]


def results(call):
    with torch.inference_mode():
        return [x.clone(memory_format=torch.contiguous_format) for x in call()]


def same(have, want):
    return all(torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)) for x, y in zip(have, want, strict=True))


def in_thread(function):
    """What the function returns on a thread of its own that has done nothing yet; raises what it raises."""
    outcome = {}

    def run():
        try:
            outcome["value"] = function()
        except BaseException as error:  # noqa: BLE001  handed to the test
            outcome["error"] = error

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


def test_cases_are_of_every_operator_and_repeat():
    calls = operator_cases.calls("cpu")
    assert calls.keys() == operator_cases.names()
    for name, own in calls.items():
        assert all(same(results(call), results(call)) for call in own), name


@gpu
@pytest.mark.parametrize("name", sorted(operator_cases.names()))
def test_first_action_of_a_thread(name, cases):
    for call, want in cases_of(name, cases):
        have = in_thread(lambda call=call: call())  # nothing before it, not even a clone
        torch.cuda.synchronize()
        assert same(have, want)


@gpu
@pytest.mark.parametrize("name", sorted(operator_cases.names()))
def test_first_action_of_a_thread_within_a_capture(name, cases):
    """A thread that has only begun a capture: that binds a context, and planning, copies and launches are all captured."""
    call, want = cases_of(name, cases)[0]

    def capture():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = call()
        graph.replay()
        torch.cuda.synchronize()
        return [x.clone() for x in out]

    assert same(in_thread(capture), want)


@gpu
def test_threads_at_once(cases):
    """Each on a stream of its own, each through all operators, beginning at different ones."""
    flat = [(name, call, want) for name, own in cases.items() for call, want in own]
    barrier, wrong = threading.Barrier(THREADS), []

    def run(index):
        stream = torch.cuda.Stream()
        barrier.wait()
        try:
            with torch.cuda.stream(stream):
                for name, call, want in itertools.islice(itertools.cycle(flat), index * len(flat) // THREADS, 3 * len(flat)):
                    have = results(call)
                    stream.synchronize()
                    if not same(have, want):
                        wrong.append((index, name))
        except Exception as error:  # noqa: BLE001  handed to the test
            wrong.append((index, f"{type(error).__name__}: {error}"))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@gpu
@pytest.mark.parametrize("name", sorted(operator_cases.names()))
def test_another_device_than_the_current_one(name, cases):
    if torch.cuda.device_count() < 2:
        pytest.skip("requires a second GPU")
    alike = torch.cuda.get_device_name(0) == torch.cuda.get_device_name(1)
    of_first = cases_of(name, cases)
    for call, (_, want) in zip(operator_cases.calls("cuda:1")[name], of_first, strict=True):
        with torch.cuda.device(0):
            have = results(call)
            assert torch.cuda.current_device() == 0, "the current device stays what it was"
        threaded = in_thread(call)
        torch.cuda.synchronize(1)
        assert all(x.device == torch.device("cuda:1") for x in (*have, *threaded))
        assert same(have, threaded)
        if alike:
            assert same([x.cpu() for x in have], [x.cpu() for x in want])
