"""The producer and the consumers of sm_90a's attention as threads of Python: the template's own code, over a model of barriers, of shared
memory and of tensor cores. A lane of the producer is a thread, a consumer warp is another."""

from __future__ import annotations

import itertools
import operator
import random
import threading
import time
import types
from typing import Any

import pytest
import torch
from minfer.fuse import attention_function
from minfer.fuse.attention_config import AttentionConfig, looked_up_by_key

from tests.fuse.attention_cases import Functions, template_with_python_numbers

pytest.importorskip("cutlass.cute", reason="the CuTe DSL is not installed")
FUNCTIONS = Functions(2, 4, 700, "cpu")
_PATIENCE = 60.0


@pytest.fixture
def template(monkeypatch):
    return template_with_python_numbers(monkeypatch, anew=True)


class Stuck(Exception):
    pass


class Machine:
    """What the threads of a CTA share."""

    def __init__(self, config: AttentionConfig, tile_bytes: int):
        self.changed = threading.Condition()
        stages, arrivals = config.stages, 4 * config.consumers
        counts = [1] * stages + [arrivals] * stages + [1] * stages + [arrivals] * stages + [1, 1, arrivals, arrivals]
        self.barriers = [{"count": n, "left": n, "bytes": 0, "done": 0} for n in counts]
        self.named: dict[int, list[int]] = {}  # threads that have come, times it was completed
        self.words = [0] * 256
        self.numbers: dict[tuple[int, int], int] = {}  # by key
        self.content: dict[tuple[str, int], Any] = {}
        self.readers: dict[tuple[str, int], set[int]] = {}
        self.exchange: list[Any] = [None] * 32
        self.lanes = threading.Barrier(32)
        self.stopped = False

    def until(self, condition: Any, what: str) -> None:
        begin = time.monotonic()
        while not condition():
            if self.stopped or time.monotonic() - begin > _PATIENCE:
                raise Stuck(what)
            self.changed.wait(0.5)

    def settle(self, number: int) -> None:
        barrier = self.barriers[number]
        if barrier["left"] == 0 and barrier["bytes"] == 0:
            barrier["left"] = barrier["count"]
            barrier["done"] += 1
            self.changed.notify_all()

    def arrive(self, number: int, expected: int = 0) -> None:
        with self.changed:
            barrier = self.barriers[number]
            assert barrier["left"] > 0, f"barrier {number}: an arrival too many"
            barrier["bytes"] += expected
            barrier["left"] -= 1
            self.settle(number)

    def expect(self, number: int, count: int) -> None:
        with self.changed:
            self.barriers[number]["bytes"] += count

    def copied(self, number: int, count: int) -> None:
        with self.changed:
            self.barriers[number]["bytes"] -= count
            self.settle(number)

    def wait(self, number: int, parity: int) -> None:
        with self.changed:
            self.until(lambda: self.barriers[number]["done"] % 2 != parity, f"mbarrier {number}, parity {parity}")

    def meet(self, number: int, threads: int, stays: bool) -> None:
        with self.changed:
            state = self.named.setdefault(number, [0, 0])
            state[0] += 32
            assert state[0] <= threads, f"barrier {number}: a warp too many"
            before = state[1]
            if state[0] == threads:
                state[0], state[1] = 0, state[1] + 1
                self.changed.notify_all()
            elif stays:
                self.until(lambda: state[1] != before, f"named barrier {number}")

    def among_lanes(self, lane: int, value: Any) -> list[Any]:
        self.exchange[lane] = value
        try:
            self.lanes.wait(_PATIENCE)
            found = list(self.exchange)
            self.lanes.wait(_PATIENCE)
        except threading.BrokenBarrierError:
            raise Stuck("lanes") from None
        return found


class View:
    def __init__(self, memory: list[int], first: int, count: int):
        self.memory, self.first, self.count = memory, first, count

    def __getitem__(self, i: int) -> int:
        return self.memory[self.first + i]

    def __setitem__(self, i: int, value: int) -> None:
        self.memory[self.first + i] = value


class Number:
    """One number by key."""

    def __init__(self, memory: dict[tuple[int, int], int], numbers: int, column: int, keys: int):
        self.memory, self.place, self.keys = memory, (numbers, column), keys

    def __setitem__(self, i: int, value: int) -> None:
        assert i == 0 and self.place[1] < self.keys
        time.sleep(random.random() * 1e-5)
        self.memory[self.place] = value


class Registers(list):
    def fill(self, value: Any) -> None:
        self[:] = [value] * len(self)


here = threading.local()


def modelled(template: Any, counter: list[int], grid: int, looked_up: Any) -> types.SimpleNamespace:
    """The kernel's parts over Machines; each thread has one of its own. ``looked_up``: of a batch and a key, if anything is."""
    lock = threading.Lock()

    arch = types.SimpleNamespace(
        mbarrier_wait=lambda number, parity: here.machine.wait(number, parity),
        mbarrier_arrive=lambda number: here.machine.arrive(number),
        mbarrier_expect_tx=lambda number, count: here.machine.expect(number, count),
        mbarrier_arrive_and_expect_tx=lambda number, count: here.machine.arrive(number, count),
        sync_warp=lambda: here.machine.among_lanes(here.lane, None) if here.produces else None,
        vote_ballot_sync=lambda truth: sum(bool(x) << i for i, x in enumerate(here.machine.among_lanes(here.lane, truth))),
        shuffle_sync=lambda value, lane: here.machine.among_lanes(here.lane, value)[lane],
        barrier=lambda barrier_id, number_of_threads: here.machine.meet(barrier_id, number_of_threads, True),
        barrier_arrive=lambda barrier_id, number_of_threads: here.machine.meet(barrier_id, number_of_threads, False),
        popc=lambda x: bin(x).count("1"), make_warp_uniform=lambda x: x,
        block_idx=lambda: (here.cta, 0, 0), grid_dim=lambda: (grid, 1, 1),
    )  # fmt: skip

    def copy(source: Any, target: Any) -> None:
        for i in range(template.tiles.PLACE):
            target[i] = source[i]

    template.set("cute", types.SimpleNamespace(arch=arch, autovec_copy=copy, make_rmem_tensor=lambda n, kind: Registers([0] * n)))
    template.set("warpgroup", types.SimpleNamespace(fence=lambda: None, wait_group=lambda n: None))

    class Shared(template.shared.SharedMemory):
        def __init__(self, config: AttentionConfig):
            self.config, self.barriers, self.words = config, 0, 0
            self.q_bytes, self.tile_bytes = 2 * 64 * config.rows, 2 * 64 * config.keys
            self.q_base, self.k_base, self.v_base, self.numbers_base = 0, 1 << 20, 1 << 21, 1 << 22

        def shared_words(self, number: int, count: int) -> View:
            return View(here.machine.words, number, count)

        def key_numbers(self, numbers: int, words: int, dtype: Any, column: int, count: int) -> Number:
            assert words == 0 and count == 1
            return Number(here.machine.numbers, numbers, column, self.config.keys)

    class Producer(template.producer.Producer):
        def next_number(self) -> int:
            with lock:
                counter[0] += 1
                return counter[0] - 1

        def copy(self, name: str, base: int, rows: int, row: int, head: int, page: int, barrier: int) -> None:
            kind, shared = name[0], self.shared
            places = {
                "q": (shared.q_base, shared.q_bytes),
                "k": (shared.k_base, shared.tile_bytes),
                "v": (shared.v_base, shared.tile_bytes),
            }
            first, size = places[kind]
            stage = kind, (base - first) // size
            time.sleep(random.random() * 1e-4)
            assert not here.machine.readers.get(stage), f"{stage} is loaded while it is read"
            here.machine.content[stage] = (row, head, page)
            here.machine.copied(barrier, size)

    class Consumer(template.consumer.Consumer):
        """A warp; its scores, softmax and epilogue are itself."""

        def operands(self) -> None:
            self.scores = self.softmax = self.epilogue = self
            self.functions = types.SimpleNamespace(known_of_rows=self.known_of_rows)

        def start(self) -> None:
            pass

        def first_row(self) -> int:
            return self.group * 64

        def known_of_rows(self, where: Any, queries: Any) -> dict[int, Any]:
            self.where, self.visited, self.tile = where, [], None
            return {}

        def read(self, kind: str, stage: int) -> Any:
            here.machine.readers.setdefault((kind, stage), set()).add(threading.get_ident())
            return here.machine.content[kind, stage]

        def multiply_keys(self, q_at: int, stage: int) -> None:
            where = self.where
            assert self.read("q", q_at) == (where.block * self.config.rows, where.head, where.batch)
            row, head, page = self.read("k", stage)
            assert (head, page) == (where.kv_head, where.batch)
            self.products = row // self.config.keys

        def modify(self, where: Any, queries: Any, known: Any, tile: int, masked: bool, numbers: int) -> None:
            assert tile == self.products
            self.masked = masked
            if self.config.key_words and masked:
                if random.random() < 0.1:
                    time.sleep(0.05)  # the keys' stage is another tile's meanwhile
                memory, keys = here.machine.numbers, self.config.keys
                assert [memory[numbers, i] for i in range(keys)] == [looked_up(where.batch, tile * keys + i) for i in range(keys)]

        def steps_of(self, where: Any, queries: Any, known: Any) -> None:
            return None

        def bases_of(self, where: Any, queries: Any, known: Any, tile: int) -> None:
            return None

        def prepare(self, steps: Any) -> None:
            pass

        def maxima(self, bases: Any) -> Any:
            time.sleep(random.random() * 1e-4)
            return [], False

        def rounded(self) -> None:
            return None

        def exponentials(self, offsets: Any, words: Any) -> None:
            self.tile, self.products = (self.products, self.masked), None

        def multiply_values(self, stage: int) -> None:
            row, head, page = self.read("v", stage)
            assert (row // self.config.keys, head, page) == (self.tile[0], self.where.kv_head, self.where.batch)
            self.visited.append(self.tile)
            self.tile = None

        def rescale_output(self, raised: bool) -> None:
            assert self.tile is not None

        def release(self, barrier: int) -> None:
            stages = self.config.stages
            kind, stage = ("k", barrier - stages) if barrier < 2 * stages else ("v", barrier - 3 * stages)
            if barrier >= 4 * stages:
                kind, stage = "q", barrier - 4 * stages - 2
            here.machine.readers.get((kind, stage), set()).discard(threading.get_ident())
            here.machine.arrive(barrier)

        def store(self, where: Any, rows: Any) -> None:
            assert vars(where) == vars(self.where) and self.tile is None
            self.kernel.stored.append(((where.head, where.batch, where.block, where.part), self.group, self.visited))

    Consumer.soft_cap = None
    for kind in (Producer, Consumer):
        for name in dir(kind):
            method = getattr(kind, name)
            if name not in vars(kind) and hasattr(method, "__wrapped__"):
                setattr(kind, name, method.__wrapped__)
    return types.SimpleNamespace(Shared=Shared, Producer=Producer, Consumer=Consumer)


def run(template: Any, call: Any, config: AttentionConfig, numbers: dict[str, Any], looked_up: Any = None, listed: Any = None) -> list[Any]:
    """What all warps of two CTAs store: where, the warpgroup, and the tiles of keys in their order with whether they were masked."""
    grid = 2
    parts_of = modelled(template, [0], grid, looked_up)
    values = {(x, 0, 0): y for x, y in numbers.items()}
    stored: list[Any] = []
    problems: list[BaseException] = []

    def thread(machine: Machine, cta: int, warp: int, lane: int) -> None:
        here.machine, here.cta, here.lane, here.produces = machine, cta, lane, warp < 4
        kernel = template.kernel.AttentionKernel(call.traced.graph, config, values)
        kernel.functions.gather = gather_of(call.captured)
        kernel.key_tiles.listed = listed
        kernel.thread, kernel.warp, kernel.lane, kernel.group = 32 * warp + lane, warp, lane, warp // 4 - 1
        kernel.shared, kernel.stored, kernel.total = parts_of.Shared(config), stored, kernel.tiles.count()
        try:
            parts_of.Producer(kernel).produce() if warp < 4 else parts_of.Consumer(kernel).consume()
        except BaseException as error:  # noqa: BLE001
            problems.append(error)
            machine.stopped = True
            machine.lanes.abort()

    threads = []
    for cta in range(grid):
        machine = Machine(config, 2 * 64 * config.keys)
        places = [(0, lane) for lane in range(32)] + [(4 + warp, 0) for warp in range(4 * config.consumers)]
        threads += [threading.Thread(target=thread, args=(machine, cta, *place), daemon=True) for place in places]
    for x in threads:
        x.start()
    for x in threads:
        x.join(_PATIENCE * 2)
    assert not problems, problems[:3]
    places = itertools.product(*(range(numbers[x]) for x in ("walk_heads", "batch", "tiles", "parts")))
    expected = sorted((place, group) for place in places for group in range(config.consumers) for _ in range(4))
    assert sorted((place, group) for place, group, _ in stored) == expected
    return stored


def gather_of(tables: list[torch.Tensor]) -> Any:
    def gather(node: Any, indices: list[int]) -> int:
        table = tables[node.attrs[0]]
        return int(table[tuple(min(max(i, 0), n - 1) for i, n in zip(indices, table.shape, strict=True))])

    return gather


@pytest.mark.parametrize("name,consumers,keys,stages,parts,claims", [
    ("none", 3, 80, 3, 1, 0), ("causal", 3, 80, 2, 1, 1), ("causal", 2, 128, 2, 1, 0), ("sliding_tiles", 3, 128, 4, 1, 1),
    ("odd_heads", 2, 80, 3, 2, 1), ("nothing", 3, 80, 2, 1, 1), ("none", 1, 128, 2, 3, 0), ("documents", 2, 128, 2, 1, 1),
    ("documents", 3, 80, 3, 1, 0), ("documents", 1, 80, 2, 2, 1), ("documents and more", 3, 80, 2, 1, 1),
])  # fmt: skip
def test_warps_meet(template, monkeypatch, name, consumers, keys, stages, parts, claims):
    """No warp waits for ever, no stage is written while it is read, and every warpgroup multiplies every tile of keys that its rows see,
    once, with its own queries and values, and masked unless they see it in full."""
    from minfer.fuse.intervals import Arithmetic

    whole = Arithmetic(min, max, lambda c, x, y: x if c else y, int, bool, lambda x, y: x and y, lambda x, y: x or y, operator.not_)
    template.set("_BOUNDS", whole)
    names = {"floor_div": "floordiv", "and": "and_", **{name: name for name in ("mod", "eq", "add", "sub", "lt", "gt", "le", "ge")}}
    scalars = {name: getattr(operator, its) for name, its in names.items()}
    monkeypatch.setattr(template.grid.GridEvaluator, "_number", lambda self, node, types, x: scalars[node.op](*x))
    document = torch.arange(700).flip(0) // 50

    def documents_and_more(b, h, q_idx, kv_idx):  # which are partial to some warpgroups, and full or empty to others
        return (kv_idx < 170) | (kv_idx < q_idx + 100) & (document[kv_idx] > 7)

    nothing = lambda b, h, q_idx, kv_idx: kv_idx < q_idx - 230  # noqa: E731
    masks = {**FUNCTIONS.masks, "nothing": nothing, "documents and more": documents_and_more}
    call = attention_function.traced(None, masks.get(name))
    config = AttentionConfig(
        "bf16",
        64,
        consumers,
        keys,
        stages,
        keys,
        masks=name != "none",
        split=parts > 1,
        key_words=sum(looked_up_by_key(call.traced.graph, False).values()) if name != "none" else 0,
    )
    assert (config.key_words > 0) == name.startswith("documents")

    def looked_up(batch: int, key: int) -> int:
        key = min(key, 699)
        return int(document[key] > 7) if name == "documents and more" else int(call.captured[0][batch, key])

    heads, batch, sq, sk = 2, 2, 300, 411
    numbers = {"sq": sq, "sk": sk, "group": 1, "tiles": -(-sq // config.rows), "walk_heads": heads, "batch": batch, "parts": parts,
               "section": 3, "claims": claims, "counter": None}  # fmt: skip
    stored = run(template, call, config, numbers, looked_up)
    one = template.kernel.AttentionKernel(call.traced.graph, config, {(x, 0, 0): y for x, y in numbers.items()})
    one.functions.gather = gather_of(call.captured)
    for (head, b, block, part), group, visited in stored:
        where = one.tiles.place_of(head, b, block, part, sk)
        first, end = one.tiles.keys_of(where)
        kinds = {tile: one.key_tiles.kind_of(where, tile, end, 64 * group, 64) for tile in range(first, end)}
        have = dict(visited)
        assert len(have) == len(visited) and set(have) <= set(kinds)
        assert set(have) >= {tile for tile, what in kinds.items() if what != template.key_tiles.EMPTY}
        assert all(masked or kinds[tile] == template.key_tiles.FULL for tile, masked in visited)


@pytest.mark.parametrize("keys,listed_k,claims", [(128, 1, 1), (128, 3, 0), (64, 2, 1)])
def test_warps_meet_by_lists(template, monkeypatch, keys, listed_k, claims):
    """Every warpgroup that has rows multiplies what a block mask names, partial blocks masked and in front of full ones, and nothing else;
    what is behind the lists' counts, and blocks that there are not, is not looked at."""
    monkeypatch.setattr(template.grid.GridEvaluator, "_number", lambda self, node, types, x: {"eq": operator.eq}[node.op](*x))
    document = torch.arange(6000) // 50
    call = attention_function.traced(None, lambda b, h, q_idx, kv_idx: document[q_idx] == document[kv_idx])
    words = sum(looked_up_by_key(call.traced.graph, False).values())
    config = AttentionConfig("bf16", 64, 2, keys, 3, keys, listed=True, listed_k=listed_k, masks=True, key_words=words)
    heads, batch, sq, sk, rows = 2, 2, 700, 45 * 128 - 30, 6
    blocks = -(-sk // (keys * listed_k))
    draw = random.Random(keys + listed_k)
    counts: dict[str, list[int]] = {"some": [], "all": []}
    index: dict[str, list[int]] = {"some": [], "all": []}
    for row in range(heads * rows):
        names = draw.sample(range(blocks), draw.choice([0, 1, 3, blocks]))
        cut = draw.randint(0, len(names)) if row % 4 else 0
        for name, its in (("some", names[:cut]), ("all", names[cut:])):
            counts[name].append(len(its))
            index[name] += (its + [draw.choice([-1, 0, 10**6]) for _ in range(blocks)])[:blocks]
    index["all"][0], counts["all"][0] = 10**6, max(counts["all"][0], 1)  # a block that there is not

    def listed(whole: bool, what: str, place: int) -> int:
        return (counts if what == "count" else index)["all" if whole else "some"][place]

    numbers = {"sq": sq, "sk": sk, "group": 1, "tiles": rows, "walk_heads": heads, "batch": batch, "parts": 1, "section": 3,
               "claims": claims, "counter": None, "list_rows": rows, "list_length": blocks, "list_batch": 0, "list_head": rows}  # fmt: skip
    for (head, _, block, _), group, visited in run(template, call, config, numbers, lambda b, key: int(document[min(key, 5999)]), listed):
        row = head * rows + block
        expected = []
        for name in ("some", "all"):
            for its in index[name][row * blocks : row * blocks + counts[name][row]]:
                tiles = [its * listed_k + i for i in range(listed_k)]
                expected += [(x, name == "some" or x * keys + keys > sk) for x in tiles if x * keys < sk]
        has_rows = block * 128 + 64 * group < sq
        assert visited == (expected if has_rows else [])
