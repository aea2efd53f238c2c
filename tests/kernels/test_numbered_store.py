"""A store for exchanges that processes number from different times on."""

from __future__ import annotations

import random

import pytest
from torch.distributed import PrefixStore, TCPStore

from quire.kernels.numbered_store import NumberedStore


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_numbered_stores_with_different_counters_exchange_values(store, rng: random.Random):
    firsts = [rng.randrange(100) for _ in range(3)]
    numbered = [NumberedStore(store) for _ in firsts]
    # As torch uses them, through C++.
    stores = [PrefixStore("quire-12-3/", each) for each in numbered]
    for step in range(3):
        for rank, (each, first) in enumerate(zip(stores, firsts, strict=True)):
            each.set(f"Memory/{first + step}/{rank}", f"{step} {rank}")
        for each, first in zip(stores, firsts, strict=True):
            keys = [f"Memory/{first + step}/{rank}" for rank in range(3)]
            each.wait(keys)
            expected = [f"{step} {rank}".encode() for rank in range(3)]
            assert each.multi_get(keys) == [each.get(key) for key in keys] == expected
            assert each.check(keys)
            assert not each.check([f"Memory/{first + step}/3"])
        counts = [each.add(f"Barrier/{first + step}", 1) for each, first in zip(stores, firsts, strict=True)]
        assert counts == [1, 2, 3]


def test_numbered_store_key_without_a_number_is_kept(store):
    NumberedStore(store).set("name", "value")
    assert store.get("name") == b"value"
