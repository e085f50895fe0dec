"""What stores share."""

import gc
import threading

import numpy as np
import pytest

from fastcap import stores
from fastcap.stores import LiveTable


def test_an_object_is_known_by_identity():
    table = LiveTable()
    first, second = np.ones(3), np.ones(3)
    table.set(first, "first")
    assert table.get(first) == "first"
    assert table.get(second) is None
    table.set(first, "again")
    assert table.get(first) == "again"
    assert table.values() == ["again"]


def test_the_dead_are_forgotten():
    table = LiveTable()
    made = np.ones(3)
    table.set(made, 1)
    table.set(np.ones(4), 2)
    gc.collect()
    assert len(table) == 1
    del made
    assert len(table) == 0


def test_what_cannot_be_referred_to_weakly_is_kept():
    table = LiveTable()
    made = [1]
    number = id(made)
    table.set(made, 1)
    del made
    assert all(id([1]) != number for _ in range(100))
    assert len(table) == 1
    table.clear()
    assert len(table) == 0


def test_discard():
    table = LiveTable()
    made = [1]
    table.set(made, 1)
    table.discard([1])
    assert table.get(made) == 1
    table.discard(made)
    assert table.get(made) is None
    table.discard(made)


def test_a_table_can_die_before_its_objects():
    table = LiveTable()
    made = np.ones(3)
    table.set(made, 1)
    del table
    gc.collect()
    del made


def test_many_threads():
    table = LiveTable()

    def work():
        for number in range(2000):
            made = np.ones(1)
            table.set(made, number)
            assert table.get(made) == number

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert len(table) == 0


def test_unknown_names():
    with pytest.raises(AttributeError, match="no attribute 'RedisStore'"):
        stores.RedisStore  # noqa: B018
