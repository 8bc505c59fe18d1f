"""The ways in which a case is run. All must give the bits of the first eager run, which is the one that is compared with the truth."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import minfer
import torch
from torch import Tensor

from .arena import Arena, raw_bytes, same_bits
from .family import Contents, Family, Parameters

OTHER_THREADS = 3
LARGEST_POISONED = 1 << 26  # bytes of a free block of memory
LARGEST_CACHE = 4 << 30  # bytes that torch may keep from case to case: other processes test on the same GPU
MORE_POISONED = (*[1 << 20] * 4, LARGEST_POISONED)  # of both pools of the allocator, up to 1 MiB and more, whatever is free in them


class Call:
    """A case's operator on the operands of an arena."""

    def __init__(self, family: Family, p: Parameters, arena: Arena, names: list[str]):
        self.family, self.p, self.arena, self.names = family, p, arena, names
        self.written = family.written(p)

    def tensors(self, arena: Arena | None = None) -> dict[str, Tensor | None]:
        views = (arena or self.arena).views()
        return {name: views.get(name) for name in self.names} | ({"out": views["out"]} if "out" in views else {})

    def __call__(self, arena: Arena | None = None) -> dict[str, Tensor]:
        """Runs it once; what it writes is as it was before."""
        arena = arena or self.arena
        arena.restore(self.written)
        return self.family.call(self.p, self.tensors(arena))

    def own(self) -> Arena:
        """Operands for a call beside others: what is written is its own."""
        return self.arena.clone(self.written)


def copies(results: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().clone(memory_format=torch.preserve_format) for name, x in results.items()}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@cache
def kernels_of(family: str, dtype: str, form: str) -> list[str]:
    """Names of the kernels that this build has for a dtype of A and a format of weights or of a cache ("dense": of that dtype)."""
    short = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float8_e4m3fn": "e4m3", "int8": "s8"}[dtype]
    of_any = form != "dense" and (short, form) != ("bf16", "int8")  # attention over codes in float16
    forms = {form, "codes"} if of_any else {form}
    found = [kernel for kernel in minfer.kernels(family) if kernel["compiled"] and kernel["ab_type"] == short]
    return [kernel["name"] for kernel in found if kernel["b_format"] in forms]


def has_ranges(name: str) -> bool:
    """Whether a CTA of the kernel may compute all ranges of k of a tile."""
    return any(kernel["name"] == name and kernel["in_place_ranges"] for kernel in minfer.kernels())


def poison_free_memory(device: torch.device, like: list[Tensor] | None = None) -> None:
    """Fills memory that is handed out next with NaN, so that what an operator leaves unwritten shows, in results and in its workspace."""
    if device.type == "cuda":
        if torch.cuda.memory_reserved(device) > LARGEST_CACHE:
            torch.cuda.empty_cache()
        # The caching allocator hands out the smallest free block that is large enough: each is asked for by its size, small ones first.
        free = [
            block["size"]
            for segment in torch.cuda.memory_snapshot()
            if segment["device"] == device.index
            for block in segment["blocks"]
            if block["state"] == "inactive" and block["size"] <= LARGEST_POISONED
        ]
        blocks = [torch.empty(size, dtype=torch.uint8, device=device) for size in (*sorted(free), *MORE_POISONED)]
        for block in blocks:
            block.fill_(0xFF)
        return
    blocks = [torch.full((x.numel() * x.element_size(),), 0xFF, dtype=torch.uint8) for x in like or []]
    del blocks


def difference(have: dict[str, Tensor], want: dict[str, Tensor]) -> str | None:
    """Whether results have other bits."""
    for name, x in want.items():
        if not same_bits(have[name], x):
            off = (have[name].double() - x.double()).abs().nan_to_num(nan=torch.inf) if have[name].shape == x.shape else None
            if off is None:
                return f"{name} is {list(have[name].shape)} instead of {list(x.shape)}"
            raw = raw_bytes(have[name]) != raw_bytes(x)
            return f"{name}: {int(raw.sum())} bytes differ, by up to {off.max().item() if off.numel() else 0:.4g}"
    return None


# ---- any device ----------------------------------------------------------------------------------------------------------------------


def again(call: Call, want: dict[str, Tensor]) -> str | None:
    return difference(call(), want)


def inference(call: Call, want: dict[str, Tensor]) -> str | None:
    with torch.inference_mode():
        return difference(call(), want)


def _in_threads(count: int, work: Callable[[int], dict[str, Tensor]]) -> list[dict[str, Tensor] | BaseException]:
    found: list[dict[str, Tensor] | BaseException] = [RuntimeError("a thread gave nothing")] * count

    def run(i: int) -> None:
        try:
            found[i] = work(i)
        except BaseException as error:  # noqa: BLE001  reported by the caller
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _judge(found: list[dict[str, Tensor] | BaseException], wants: list[dict[str, Tensor]]) -> str | None:
    for i, (have, want) in enumerate(zip(found, wants, strict=True)):
        if isinstance(have, BaseException):
            return f"thread {i} raised {type(have).__name__}: {have}"
        text = difference(have, want)
        if text:
            return f"thread {i}: {text}"
    return None


def threads(call: Call, want: dict[str, Tensor], others: list[Contents]) -> str | None:
    """Several threads at once, each with contents of its own (without ``others``: the same), on CUDA on a stream of its own."""
    device = call.arena.device
    own = 1 if others else 1 + OTHER_THREADS
    arenas, wants = [call.own() for _ in range(own)], [want] * own
    for other in others:
        arenas.append(call.arena.clone(list(call.arena.storages)))
        arenas[-1].refill(other.tensors)
        arenas[-1].remember()
        wants.append(copies(call(arenas[-1])))
    synchronize(device)
    ready, cores = threading.Barrier(len(arenas)), torch.get_num_threads()

    def work(i: int) -> dict[str, Tensor]:
        if device.type != "cuda":
            torch.set_num_threads(cores)  # a thread of its own: torch's products divide k by their number, which decides on the bits
            ready.wait()
            return copies(call(arenas[i]))
        stream = torch.cuda.Stream(device)
        ready.wait()
        with torch.cuda.stream(stream):
            have = copies(call(arenas[i]))
        stream.synchronize()
        return have

    return _judge(_in_threads(len(arenas), work), wants)


# ---- CPU -----------------------------------------------------------------------------------------------------------------------------


def fake(call: Call, want: dict[str, Tensor]) -> str | None:
    """Shapes, dtypes and strides by the rule for tensors without contents."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        tensors = {name: None if x is None else mode.from_tensor(x) for name, x in call.tensors().items()}
        have = call.family.call(call.p, tensors)
    for name, x in call().items():  # not ``want``: copies have no gaps between rows
        y = have[name]
        same = y.shape == x.shape and y.dtype == x.dtype and y.device == x.device
        # Of a tensor without elements, and of modes of one, strides say nothing; what is written has the caller's.
        own = name in call.written or call.family.out(call.p) is not None
        modes = zip(x.shape, x.stride(), y.stride(), strict=True)
        strides = own or x.numel() == 0 or all(n == 1 or a == b for n, a, b in modes)
        if not same or not strides:
            of = lambda z: f"{z.dtype} {list(z.shape)} with strides {z.stride()} on {z.device}"  # noqa: E731
            return f"{name} of fake tensors is {of(y)}, really it is {of(x)}"
    return None


def compiled(call: Call, want: dict[str, Tensor]) -> str | None:
    """In one graph of torch.compile, which runs the operators as they are."""
    torch._dynamo.reset()
    call.arena.restore(call.written)
    names = [name for name, x in call.tensors().items() if x is not None]
    none = {name: None for name in call.tensors()}

    def run(*tensors: Tensor) -> dict[str, Tensor]:
        return call.family.call(call.p, none | dict(zip(names, tensors, strict=True)))

    tensors = call.tensors()
    have = torch.compile(run, fullgraph=True, backend="eager", dynamic=False)(*(tensors[name] for name in names))
    return difference(have, want)


# ---- CUDA ----------------------------------------------------------------------------------------------------------------------------


_sides: dict[torch.device, torch.cuda.Stream] = {}


def busy(call: Call, want: dict[str, Tensor]) -> str | None:
    """Beside a stream that keeps the device's SMs and memory occupied."""
    device = call.arena.device
    side = _sides.setdefault(device, torch.cuda.Stream(device))
    with torch.cuda.stream(side):
        x = torch.full((2048, 2048), 1e-3, dtype=torch.float16, device=device)
        y, far = torch.empty_like(x), torch.empty(1 << 24, dtype=torch.uint8, device=device)
        side.wait_stream(torch.cuda.default_stream(device))
        for i in range(40):
            torch.mm(x, x, out=y)
            if i % 4 == 0:
                far[: 1 << 23].copy_(far[1 << 23 :])
    have = copies(call())
    torch.cuda.synchronize(device)
    return difference(have, want)


class _Pool:
    """Memory that captures share; an empty graph keeps it, so that a case costs no cudaMalloc. torch.cuda.graph would also collect garbage
    and empty the allocator's cache each time."""

    def __init__(self, device: torch.device):
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)
        self.keeper, _ = self.capture(lambda: torch.zeros(1, device=device))

    def capture(self, work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        recorded = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            recorded.capture_begin(pool=self.handle)
            try:
                results = work()
            finally:
                recorded.capture_end()
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        return recorded, results


_pools: dict[torch.device, _Pool] = {}


def capture(device: torch.device, work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of what ``work`` launches, and what it returned."""
    if device not in _pools:
        _pools[device] = _Pool(device)
    return _pools[device].capture(work)


def graph(call: Call, want: dict[str, Tensor], other: Contents) -> str | None:
    """Captured, replayed; replayed again after all operands have got other contents, lengths and pages included."""
    device, arena = call.arena.device, call.arena
    arena.restore(call.written)
    torch.cuda.synchronize(device)
    recorded, results = capture(device, lambda: call.family.call(call.p, call.tensors()))

    def replay() -> dict[str, Tensor]:
        for name, x in results.items():
            if name not in call.written and call.family.out(call.p) is None:
                raw_bytes(x).fill_(0xFF)
        arena.restore(call.written)
        recorded.replay()
        have = copies(results)
        torch.cuda.synchronize(device)
        return have

    for name in ("a replay", "another replay"):
        text = difference(replay(), want)
        if text:
            return f"{name} of a graph: {text}"
    arena.refill(other.tensors)
    arena.remember()
    have = replay()
    changed = copies(call())
    torch.cuda.synchronize(device)
    text = difference(have, changed)
    return f"a replay with other contents: {text}" if text else None


def fresh_thread(call: Call, want: dict[str, Tensor]) -> str | None:
    """The first thing that a thread does on the device, or on any; with more than one, another may be current."""
    device = call.arena.device
    arena = call.own()
    arena.restore(call.written)
    torch.cuda.synchronize(device)
    found = _in_threads(1, lambda i: call.family.call(call.p, call.tensors(arena)))
    torch.cuda.synchronize(device)
    return _judge(found, [want])


def other_device(call: Call, want: dict[str, Tensor]) -> str | None:
    device = call.arena.device
    other = (device.index or 0) ^ 1
    arena = call.own()
    arena.restore(call.written)
    torch.cuda.synchronize(device)

    def work(i: int) -> dict[str, Tensor]:
        torch.cuda.set_device(other)
        have = call.family.call(call.p, call.tensors(arena))
        if torch.cuda.current_device() != other:
            raise RuntimeError(f"the current device is {torch.cuda.current_device()} after the call, was {other}")
        return have

    found = _in_threads(1, work)
    torch.cuda.synchronize(device)
    return _judge(found, [want])
