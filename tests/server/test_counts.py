"""Numbers that the processes of a server share, and the metrics that are made of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

pytest.importorskip("prometheus_client")
pytest.importorskip("msgspec")

from helpers.paths import ROOT
from quire.server.counts import Counts
from quire.server.metrics import EventCounter, ValueHistogram

BOUNDS = (0.5, 1, 2.5)


def test_counts_of_three_processes_are_summed_in_each(rng):
    first = Counts(3)
    every = [first, *(Counts(3, index, first.descriptor) for index in (1, 2))]
    cells = [counts.allocate() for counts in every]
    numbers = [counts.allocate(4) for counts in every]
    added = [[rng.randrange(100) for _ in range(4)] for _ in every]
    for i, (single, several) in enumerate(zip(cells, numbers, strict=True)):
        single.add(i + 1)
        single.add(10)
        for j, value in enumerate(added[i]):
            several.local[j] += value
    for i, (single, several) in enumerate(zip(cells, numbers, strict=True)):
        assert single.total == 36
        assert single.others() == [value for j, value in enumerate((11, 12, 13)) if j != i]
        assert several.totals() == [sum(column) for column in zip(*added, strict=True)]
    assert abs(first.started - time.time()) < 60
    assert {counts.started for counts in every} == {first.started}
    first.close()


def test_counts_of_another_program_are_in_the_sums():
    with_other = Counts(2)
    program = "import sys; from quire.server.counts import Counts; Counts(2, 1, int(sys.argv[1])).allocate().add(5)"
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    descriptor = with_other.descriptor
    subprocess.run([sys.executable, "-c", program, str(descriptor)], pass_fds=[descriptor], env=variables, check=True)
    with_other.close()
    cells = with_other.allocate()
    cells.add(2)
    assert (cells.total, cells.others()) == (7, [5])


def test_counts_of_one_process_have_no_descriptor():
    counts = Counts()
    cells = counts.allocate()
    cells.add(3)
    assert (cells.total, cells.others(), counts.descriptor) == (3, [], None)


def test_counts_beyond_their_memory_are_refused():
    counts = Counts()
    counts.allocate(511)
    with pytest.raises(ValueError, match="size = 1: 0 numbers are left"):
        counts.allocate()


def test_value_histogram_of_two_processes_has_the_values_of_both():
    first = Counts(2)
    own, other = (ValueHistogram(counts, BOUNDS) for counts in (first, Counts(2, 1, first.descriptor)))
    for value in (0.1, 0.5, 0.6, 7.0):
        own.observe(value)
    for value in (2.5, 2.6):
        other.observe(value)
    assert own.buckets() == other.buckets()
    buckets, total = own.buckets()
    assert buckets == [("0.5", 2), ("1.0", 3), ("2.5", 4), ("+Inf", 6)]
    assert total == pytest.approx(13.3)
    first.close()


def test_event_counter_of_two_processes_has_the_events_of_both():
    first = Counts(2)
    own, other = (EventCounter(counts) for counts in (first, Counts(2, 1, first.descriptor)))
    own.inc()
    other.inc(4)
    assert own.total == other.total == 5
    first.close()
