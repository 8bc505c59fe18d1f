"""The order in which contestants are timed."""

import itertools

import pytest

from bench.harness import order_of


@pytest.mark.parametrize("count", range(1, 10))
def test_orders_are_balanced(count):
    """Each contestant comes equally often in each place and after each other one."""
    names = [f"contestant {i}" for i in range(count)]
    turns = count * (1 + count % 2)
    orders = [order_of(names, turn) for turn in range(turns)]
    assert all(sorted(order) == names for order in orders)
    places = [[order[place] for order in orders].count(name) for place in range(count) for name in names]
    assert set(places) == {turns // count}
    pairs = [pair for order in orders for pair in itertools.pairwise(order)]
    assert all(pairs.count(pair) == turns // count for pair in itertools.permutations(names, 2))


def test_nobody_is_timed_where_nobody_is():
    assert order_of([], 3) == []
