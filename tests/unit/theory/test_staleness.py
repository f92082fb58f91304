"""The staleness meter against the definition, on random schedules; and that it stays small and cheap."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest
from doll.theory import staleness
from doll.theory.staleness import Histogram, StalenessMeter, bucket
from fuzzing import seeds
from hypothesis import given
from hypothesis import strategies as st

Read = tuple[int, int, int]  # worker, version, batch


class Schedule:
    """Workers that read a version and push a batch to a later one; every update is of one batch."""

    def __init__(self, num_workers: int, updates: int, *, seed: int, lag: int) -> None:
        rng = random.Random(seed)
        self.num_workers = num_workers
        self.clocks = [[0] * num_workers]  # of each version
        self.steps: list[Read] = []  # step i makes version i + 1
        speeds = [rng.uniform(1.0, 1.5) for _ in range(num_workers)]
        for version in range(updates):
            clocks = self.clocks[-1]
            worker = min(range(num_workers), key=lambda n: (clocks[n] + rng.random()) * speeds[n])
            self.steps.append((worker, max(0, version - rng.randrange(lag)), clocks[worker]))
            self.clocks.append([clock + (n == worker) for n, clock in enumerate(clocks)])

    def differences(self) -> Counter[int]:
        """By the definition: of each read, one difference for each other worker."""
        return Counter(
            self.clocks[version][other] - 1 - batch
            for worker, version, batch in self.steps
            for other in range(self.num_workers)
            if other != worker
        )

    def feed(self, meter: StalenessMeter) -> Histogram:
        for version, (worker, read, batch) in enumerate(self.steps, 1):
            meter.read(worker, read, batch)
            meter.applied(worker, version, batch + 1)
        return meter.histogram


class ReadsNewest(StalenessMeter):
    """A wrong one: it takes the clocks of now for those of the version that was read."""

    def read(self, worker: int, version: int, batch: int, count: int = 1) -> None:
        super().read(worker, self._version, batch, count)


class CountsBatches(StalenessMeter):
    """A wrong measure: the number of batches in place of the number of the newest batch."""

    def read(self, worker: int, version: int, batch: int, count: int = 1) -> None:
        super().read(worker, version, batch - 1, count)


@pytest.mark.parametrize("seed", seeds(5))
def test_every_read_is_compared_with_every_other_worker(seed: int) -> None:
    schedule = Schedule(5, 400, seed=seed, lag=12)
    expected = schedule.differences()
    histogram = schedule.feed(StalenessMeter([0] * 5))
    assert histogram.counts == expected
    assert histogram.total == sum(difference * times for difference, times in expected.items())
    assert histogram.mean == pytest.approx(np.mean(list(expected.elements())))
    for wrong in (ReadsNewest, CountsBatches):
        assert schedule.feed(wrong([0] * 5)).counts != expected, wrong.__name__


def rounds(num_workers: int, count: int) -> Histogram:
    """Bulk synchronous: each version has one more batch of every worker."""
    meter = StalenessMeter([0] * num_workers, history=0)
    for number in range(count):
        for worker in range(num_workers):
            meter.read(worker, number, number)
        for worker in range(num_workers):
            meter.applied(worker, number + 1, number + 1)
    return meter.histogram


@pytest.mark.parametrize("num_workers", [2, 5, 16, 17, 100])
def test_bulk_synchronous_is_always_minus_one(num_workers: int) -> None:
    histogram = rounds(num_workers, 8)
    reads = 8 * num_workers
    assert histogram.counts == {-1: reads * (num_workers - 1) if num_workers <= 16 else reads}
    assert (histogram.older, histogram.mean, histogram.percentile(1)) == (0, -1.0, -1.0)


@pytest.mark.slow
def test_one_other_worker_in_turn_gives_the_same_mean() -> None:
    schedule = Schedule(40, 20_000, seed=1, lag=80)
    in_turn = schedule.feed(StalenessMeter([0] * 40))
    assert in_turn.size == 20_000
    of_all = schedule.feed(StalenessMeter([0] * 40, all_up_to=40))
    assert of_all.size == 39 * 20_000
    deviation = np.std(list(Counter(of_all.counts).elements()))
    assert abs(in_turn.mean - of_all.mean) < 5 * deviation / math.sqrt(20_000)


def test_in_turn_every_pair_counts_equally_often() -> None:
    """This holds also where workers read in a fixed order: one turn for all would pair each with the same worker."""
    num_workers = 20
    asked: list[int] = []

    def is_live(worker: int) -> bool:
        asked.append(worker)
        return True

    meter = StalenessMeter([0] * num_workers, is_live=is_live)
    pairs: Counter[tuple[int, int]] = Counter()
    for _ in range(3 * (num_workers - 1)):
        for worker in range(num_workers):
            meter.read(worker, 0, 0)
            pairs[worker, asked[-1]] += 1
    assert set(pairs.values()) == {3}
    assert len(pairs) == num_workers * (num_workers - 1)


@pytest.mark.parametrize("num_workers", [17, 5000])
def test_the_cost_of_a_read_does_not_grow_with_the_workers(num_workers: int) -> None:
    asked = 0

    def is_live(worker: int) -> bool:
        nonlocal asked
        asked += 1
        return worker == 3 or not only_one

    only_one = False
    meter = StalenessMeter([0] * num_workers, is_live=is_live)
    meter.read(3, 0, 0)
    assert (asked, meter.histogram.size) == (1, 1)
    only_one = True
    meter.read(3, 0, 0)
    assert (meter.histogram.size, meter.histogram.older) == (1, 0), "there is nobody to compare it with"


@pytest.mark.parametrize(("num_workers", "history", "kept"), [(3, 600, 200), (50, 600, staleness.LEAST_HISTORY)])
def test_what_it_keeps_of_old_versions_is_bounded_and_older_reads_are_counted_apart(
    num_workers: int, history: int, kept: int
) -> None:
    meter = StalenessMeter([0] * num_workers, history=history, all_up_to=num_workers)
    for version in range(1, 2001):
        meter.applied(0, version, version)  # the others stand still: nothing is kept of them
        meter.read(1, max(0, version - kept + 1), 0)
        assert meter.histogram.older == 0
    (track,) = meter._tracks.values()
    assert len(track._versions) == len(track._clocks) <= 1.25 * kept
    before = meter.histogram.size
    meter.read(1, 2000 - len(track._versions), 0)
    assert meter.histogram.older == 1, "of worker 0, whose clock at this version is forgotten"
    assert meter.histogram.size == before + num_workers - 2
    assert meter.histogram.counted_share == pytest.approx(1 - 1 / (meter.histogram.size + 1))
    meter.read(1, 2000 - kept + 1, 0)
    assert meter.histogram.older == 1
    assert meter.histogram.counts[bucket(2000 - kept)] >= 1  # of worker 0 at this version


def test_reads_from_before_the_meter_began_are_counted_apart() -> None:
    meter = StalenessMeter([4, 6, 2], version=10)
    meter.read(0, 9, 4)
    meter.read(0, 10, 4)
    assert (meter.histogram.older, meter.histogram.counts) == (2, {1: 1, -3: 1})


def test_exact_versions_are_counted_without_a_history() -> None:
    meter = StalenessMeter([4, 6], version=10, history=0)
    meter.read(0, 10, 4, count=2)  # a set of the batches 4 and 5
    meter.read(1, 10, 6)
    assert meter.histogram.counts == {1: 1, 0: 1, -3: 1}
    meter.applied(0, 11, 6)
    meter.read(1, 10, 7)
    assert meter.histogram.older == 1
    assert not meter._tracks


def test_a_worker_that_comes_late_begins_at_the_others_clock() -> None:
    away = {2}
    meter = StalenessMeter([0, 0, 0], is_live=lambda worker: worker not in away)
    for number in range(5):
        for worker in (0, 1):
            meter.read(worker, number, number)
        for worker in (0, 1):
            meter.applied(worker, number + 1, number + 1)
    assert meter.histogram.counts == {-1: 10}, "nobody waits for the worker that is away"
    away.clear()
    meter.joined(2)
    for worker, batch in ((0, 5), (1, 5), (2, 0)):
        meter.read(worker, 5, batch)
    assert meter.histogram.counts == {-1: 16}
    meter.read(0, 4, 5)  # a version from before: what worker 2 has missed is empty, so this version contains it
    assert meter.histogram.counts == {-1: 17, -2: 1}
    meter.joined(2, clock=9)  # as a policy that keeps clocks says
    meter.read(2, 5, 0)
    assert meter.histogram.counts == {-1: 17, -2: 1, 5 - 1 - 9: 2}


def test_a_worker_without_batches_has_the_minimum_clock_of_each_version() -> None:
    """Worker 2 has no batches. The minimum of a version is the clock that the other two have at least."""
    meter = StalenessMeter([0, 0, 0], minimum_clock=lambda version: version // 2)
    for number in range(8):
        for worker in (0, 1):
            meter.applied(worker, 2 * number + worker + 1, number + 1)
    meter.read(0, 16, 8)
    assert meter.histogram.counts == {-1: 2}
    meter.read(0, 6, 8)  # with a minimum of 3: its weights are as old for worker 2 as for worker 1
    assert meter.histogram.counts == {-1: 2, 3 - 1 - 8: 2}


class Model:
    """The definition, with the clocks of all versions: nothing is forgotten, and each call looks at everything.

    A worker that joins late begins at the smallest clock of the others; what it has missed is in every version. With
    `bounded`, the policy's minimum rises with the smallest clock, and counts for whoever is below it.
    """

    def __init__(self, num_workers: int, *, bounded: bool) -> None:
        self.clocks = [[0] * num_workers]  # of each version
        self.minima = [0]  # of each version
        self.batches = [0] * num_workers
        self.live = set(range(num_workers))
        self.bounded = bounded

    def minimum(self, version: int) -> int:
        return self.minima[version]

    def differences(self, worker: int, version: int) -> dict[int, int]:
        """By the other worker."""
        own = self.clocks[-1][worker]
        clocks = enumerate(self.clocks[version])
        return {n: max(at, self.minima[version]) - 1 - own for n, at in clocks if n != worker and n in self.live}

    def applied(self, worker: int) -> None:
        self.batches[worker] += 1
        self.clocks.append([at + (n == worker) for n, at in enumerate(self.clocks[-1])])
        least = min((self.clocks[-1][n] for n in self.live), default=0) if self.bounded else 0
        self.minima.append(max(self.minima[-1], least))

    def joined(self, worker: int) -> None:
        least = min((self.clocks[-1][n] for n in self.live - {worker}), default=0)
        if least > self.clocks[-1][worker]:
            for clocks in self.clocks:
                clocks[worker] = least
        self.live.add(worker)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("seed", seeds(50))
def test_every_read_is_counted_as_the_definition_says(seed: int, bounded: bool) -> None:
    """Workers join, leave, skip batches, come back, and use any version since they began."""
    rng = random.Random(seed)
    num_workers = rng.choice((1, 2, 3, 8, 40))
    model = Model(num_workers, bounded=bounded)
    is_live, minimum = model.live.__contains__, model.minimum
    meter, in_turn = (
        StalenessMeter([0] * num_workers, all_up_to=limit, is_live=is_live, minimum_clock=minimum)
        for limit in (num_workers, 0)
    )
    expected: Counter[int] = Counter()
    reads = 0
    for _ in range(800):
        worker = rng.randrange(num_workers)
        step = rng.random()
        if worker not in model.live:
            if step < 0.3:
                model.joined(worker)
                for each in (meter, in_turn):
                    each.joined(worker)
        elif step < 0.03:
            model.live.discard(worker)
        elif step < 0.06:
            count = rng.randrange(1, 5)
            model.batches[worker] += count
            for each in (meter, in_turn):
                each.skipped(worker, count)
        else:
            newest = len(model.clocks) - 1
            version = rng.choice((newest, rng.randint(max(0, newest - 20), newest), rng.randint(0, newest)))
            due = model.differences(worker, version)
            batch = model.batches[worker]
            expected.update(due.values())
            before = Counter(in_turn.histogram.counts)
            for each in (meter, in_turn):
                each.read(worker, version, batch)
            reads += bool(due)
            assert (Counter(in_turn.histogram.counts) - before).keys() <= {bucket(each) for each in due.values()}
            model.applied(worker)
            for each in (meter, in_turn):
                each.applied(worker, newest + 1, batch + 1)
    assert meter.histogram.counts == Counter(bucket(each) for each in expected.elements())
    assert meter.histogram.total == sum(expected.elements())
    assert in_turn.histogram.size == reads
    assert meter.histogram.older == in_turn.histogram.older == 0


def test_batches_of_the_warm_up_are_not_counted() -> None:
    meter = StalenessMeter([0, 0], warm_up=2)
    for batch in range(4):
        meter.read(0, 0, batch)
    assert meter.histogram.counts == {-3: 1, -4: 1}


@given(st.integers(-(2**62), 2**62))
def test_a_difference_is_counted_as_one_that_is_hardly_nearer_to_zero(difference: int) -> None:
    counted = bucket(difference)
    assert abs(counted) <= abs(difference) <= abs(counted) * (1 + 1 / 16)
    assert (counted >= 0) == (difference >= 0)
    assert bucket(counted) == counted


def test_a_histogram_stays_small_however_far_workers_drift_apart() -> None:
    histogram = Histogram()
    for difference in range(0, 10**7, 97):
        histogram.add(-difference)
    assert len(histogram.counts) < staleness.EXACT + 16 * 20
    assert histogram.total == -sum(range(0, 10**7, 97))


@given(st.lists(st.integers(-100, 100), min_size=1), st.lists(st.integers(-100, 100)), st.floats(0.5, 100))
def test_merged_histograms_have_the_mean_and_percentiles_of_all(left: list[int], right: list[int], q: float) -> None:
    merged = Histogram(Counter(left), total=sum(left), older=1)
    merged.merge(Histogram(Counter(right), total=sum(right), older=2))
    values = left + right
    assert (merged.size, merged.older) == (len(values), 3)
    assert merged.mean == pytest.approx(np.mean(values))
    assert merged.percentile(q) == np.percentile(values, q, method="inverted_cdf")


def test_an_empty_histogram_has_no_mean() -> None:
    assert math.isnan(Histogram().mean)
    assert math.isnan(Histogram().percentile(50))
