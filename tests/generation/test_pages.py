"""The pool of pages."""

from __future__ import annotations

import random

import pytest
from minfer.generation.pages import OutOfPages, PagePool


def test_allocation():
    pool = PagePool(4, 8)
    first = pool.allocate(3)
    assert sorted(first) == [0, 1, 2] and pool.free == 1
    with pytest.raises(OutOfPages, match="2 pages of 8 tokens were asked for, and 1 of 4 are free"):
        pool.allocate(2)
    assert pool.free == 1
    pool.release(first)
    assert pool.free == 4


def test_a_prefix_is_shared_and_outlives_its_user():
    pool, tokens = PagePool(6, 4), list(range(11))
    pages = pool.allocate(3)
    for index in range(2):
        pool.fill(pages, index, tokens[4 * index : 4 * index + 4])
    assert pool.shared(tokens) == pages[:2]
    assert pool.shared([9, *tokens]) == []
    assert pool.shared(tokens[:8]) == pages[:1]  # one token is left to compute
    pool.release(pages[:1])
    pool.release(pages[:2])
    pool.release(pages)
    assert pool.free == 6
    assert pool.shared(tokens) == pages[:2] and pool.free == 4
    pool.release(pages[:2])
    taken = pool.allocate(6)
    assert sorted(taken) == list(range(6)) and taken[-1] == pages[0]  # what others follow is forgotten last
    pool.release(taken)
    assert pool.shared(tokens) == []


def test_the_same_contents_twice():
    pool, tokens = PagePool(4, 2), [1, 2, 3, 4, 5]
    one, two = pool.allocate(2), pool.allocate(2)
    for pages in (one, two):
        for index in range(2):
            pool.fill(pages, index, tokens[2 * index : 2 * index + 2])
    assert pool.shared(tokens) == one
    pool.release(one), pool.release(one), pool.release(two)
    assert pool.free == 4


def test_no_sharing():
    pool = PagePool(4, 2, share_prefixes=False)
    pages = pool.allocate(2)
    pool.fill(pages, 0, [1, 2])
    assert pool.shared([1, 2, 3]) == []


@pytest.mark.parametrize("seed", range(20))
def test_random_users(seed):
    """No page has two contents, no page in use is given away, and what is found is what was written."""
    rnd = random.Random(seed)
    pool = PagePool(12, 2)
    users: list[tuple[list[int], list[int], int]] = []  # pages, tokens, filled
    written: dict[int, tuple[int, ...]] = {}  # what each page holds, with all tokens before it
    for _ in range(400):
        if users and rnd.random() < 0.4:
            pages, _, _ = users.pop(rnd.randrange(len(users)))
            pool.release(pages)
        else:
            tokens = [rnd.randrange(2) for _ in range(rnd.randrange(1, 9))]
            shared = pool.shared(tokens)
            for index, page in enumerate(shared):
                assert written[page] == tuple(tokens[: 2 * index + 2])
            try:
                fresh = pool.allocate(-(-len(tokens) // 2) - len(shared))
            except OutOfPages:
                pool.release(shared)
                continue
            in_use = {page for pages, _, _ in users for page in pages} | set(shared)
            assert not in_use & set(fresh) and len(set(fresh)) == len(fresh)
            pages = shared + fresh
            for page in fresh:
                written.pop(page, None)
            for index in range(len(shared), len(tokens) // 2):
                written[pages[index]] = tuple(tokens[: 2 * index + 2])
                pool.fill(pages, index, tokens[2 * index : 2 * index + 2])
            users.append((pages, tokens, 0))
        distinct = {page for pages, _, _ in users for page in pages}
        assert pool.free == 12 - len(distinct)
