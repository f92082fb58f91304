"""SGD on one convex problem with weights that a consistency model allows to be old, in numpy. Pure.

f_t(x) = |a_t · x - a_t · x*|, a_t drawn on the unit sphere (L = 1), x_0 = 0 and ‖x*‖ given. Its minimum is known, and
its gradients do not become smaller near it, so that steps have to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from doll.theory.checks import Floats

from benchmarks.paper.regret import Regret

_POINTS = 200

# Clocks that the views of one clock miss, shape (runs, workers): of (rng, shape, most).
Misses = Callable[[np.random.Generator, tuple[int, int], int], npt.NDArray[np.int64]]


@dataclass(frozen=True)
class Curves:
    """Runs side by side.

    Attributes:
        updates: T, shape (m,).
        regret: R of the first T updates, shape (runs, m).
        distance: the largest ½‖x_t - x*‖² of all runs.
        gamma: γ_t = ‖x̃_t - x_t‖ / ū_t of each view behind the first clocks, shape (any,); empty where not asked for.
    """

    updates: Floats
    regret: Floats
    distance: float
    gamma: Floats

    @property
    def exponent(self) -> float:
        """Of T in the mean regret R/T of all runs, over the last factor 10 of T."""
        last = self.updates >= self.updates[-1] / 10
        mean = self.regret.mean(axis=0)[last] / self.updates[last]
        return float(np.polyfit(np.log(self.updates[last]), np.log(mean), 1)[0])


def all_that_may(rng: np.random.Generator, shape: tuple[int, int], most: int) -> npt.NDArray[np.int64]:
    """Each view misses as many clocks as it may."""
    return np.full(shape, most, np.int64)


def evenly(rng: np.random.Generator, shape: tuple[int, int], most: int) -> npt.NDArray[np.int64]:
    """SSP's staleness in the paper's figure 1: even over the window."""
    return rng.integers(0, most + 1, shape)


def mostly_none(rng: np.random.Generator, shape: tuple[int, int], most: int) -> npt.NDArray[np.int64]:
    """ESSP's: nine of ten views miss no clock before their own."""
    return np.where(rng.random(shape) < 0.9, 0, evenly(rng, shape, most))


def under_ssp(
    theorem: Regret, num_workers: int, staleness: int, misses: Misses, *, dimensions: int, distance: float, clocks: int,
    runs: int = 1, seed: int, constant_step: float | None = None, keep_gamma: bool = False,
) -> Curves:  # fmt: skip
    """P workers in step; a view of clock c has all updates of the clocks before c - m, m = 0 to s as `misses` draws.

    As in the ESSP paper, no worker has its own updates sooner. The sequence x_t is ordered by clocks, then by workers.
    """
    rng = np.random.default_rng((51, seed))
    optimum = _optimum(rng, runs, dimensions, distance)
    sums = np.zeros((clocks + 1, runs, dimensions))  # of all updates of the clocks before c
    lengths = np.empty((clocks, runs))  # sum over a clock's updates of their lengths
    missing = np.empty((clocks, runs, num_workers)) if keep_gamma else None
    regret, farthest = np.empty((clocks, runs, num_workers)), 0.0
    every = np.arange(runs)[:, None]
    for clock in range(clocks):
        late = np.minimum(misses(rng, (runs, num_workers), staleness), clock)
        views = sums[clock - late, every]
        directions = _directions(rng, (runs, num_workers, dimensions))
        error = np.sum(directions * (views - optimum[:, None]), axis=-1)
        regret[clock] = np.abs(error)
        steps = theorem.step_size(np.arange(clock * num_workers + 1, (clock + 1) * num_workers + 1))
        steps = steps if constant_step is None else np.full_like(steps, constant_step)
        updates = -(steps * np.sign(error))[..., None] * directions
        before = sums[clock][:, None] + np.cumsum(updates, axis=1) - updates
        sums[clock + 1] = sums[clock] + updates.sum(axis=1)
        lengths[clock] = steps.sum()
        farthest = max(farthest, float(np.max(np.sum((before - optimum[:, None]) ** 2, axis=-1)) / 2))
        if missing is not None:
            missing[clock] = np.linalg.norm(before - views, axis=-1)
    gamma = np.empty(0)
    if missing is not None:
        first, last = staleness, clocks - staleness
        window = np.stack([lengths[first + shift : last + shift] for shift in range(-staleness, staleness + 1)])
        gamma = (missing[first:last] / (window.mean(axis=0) / num_workers)[..., None]).ravel()
    return _curves(regret.transpose(1, 0, 2).reshape(runs, -1), farthest, gamma)


def under_vap(
    theorem: Regret, value_bound: float, *, dimensions: int, distance: float, updates: int, runs: int = 1, seed: int,
    shrinks: bool = True,
) -> Curves:  # fmt: skip
    """Each view is off by v_t in each coordinate, in the direction in which its loss grows: the worst that VAP allows.

    Args:
        shrinks: v_t = v_0/√t; else v_0 stays.
    """
    rng = np.random.default_rng((51, seed))
    optimum = _optimum(rng, runs, dimensions, distance)
    newest, farthest = np.zeros((runs, dimensions)), 0.0
    regret = np.empty((updates, runs))
    steps = theorem.step_size(np.arange(1, updates + 1))
    bounds = value_bound / np.sqrt(np.arange(1, updates + 1)) if shrinks else np.full(updates, value_bound)
    for update in range(updates):
        direction = _directions(rng, (runs, dimensions))
        error = np.sum(direction * (newest - optimum), axis=-1)
        error += np.sign(error) * bounds[update] * np.abs(direction).sum(axis=-1)
        regret[update] = np.abs(error)
        newest = newest - (steps[update] * np.sign(error))[:, None] * direction
        if update % 16 == 0:
            farthest = max(farthest, float(np.max(np.sum((newest - optimum) ** 2, axis=-1)) / 2))
    return _curves(regret.T, farthest, np.empty(0))


def under_isp(
    theorem: Regret, num_workers: int, threshold: float, *, dimensions: int, distance: float, clocks: int,
    runs: int = 1, seed: int, constant_step: float | None = None,
) -> Curves:  # fmt: skip
    """P replicas; a worker sends what it has summed of a number once that is above v_t of the number's value."""
    rng = np.random.default_rng((51, seed))
    optimum = _optimum(rng, runs, dimensions, distance)
    newest, farthest = np.zeros((runs, dimensions)), 0.0
    held = np.zeros((runs, num_workers, dimensions))
    regret = np.empty((clocks, runs, num_workers))
    for clock in range(clocks):
        # A replica has everybody's updates but what the others hold back.
        replicas = (newest - held.sum(axis=1))[:, None] + held
        directions = _directions(rng, (runs, num_workers, dimensions))
        error = np.sum(directions * (replicas - optimum[:, None]), axis=-1)
        regret[clock] = np.abs(error)
        count = np.arange(clock * num_workers + 1, (clock + 1) * num_workers + 1)
        steps = theorem.step_size(count) if constant_step is None else np.full(num_workers, constant_step)
        updates = -(steps * np.sign(error))[..., None] * directions
        newest = newest + updates.sum(axis=1)
        held = held + updates
        bound = threshold / np.sqrt((clock + 1) * num_workers)
        held = np.where(np.abs(held) > bound * np.abs(replicas + updates), 0.0, held)
        if clock % 16 == 0:
            farthest = max(farthest, float(np.max(np.sum((newest - optimum) ** 2, axis=-1)) / 2))
    return _curves(regret.transpose(1, 0, 2).reshape(runs, -1), farthest, np.empty(0))


def _optimum(rng: np.random.Generator, runs: int, dimensions: int, distance: float) -> Floats:
    return distance * _directions(rng, (runs, dimensions))


def _directions(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    drawn = rng.normal(size=shape)
    unit: Floats = drawn / np.linalg.norm(drawn, axis=-1, keepdims=True)
    return unit


def _curves(losses: Floats, farthest: float, gamma: Floats) -> Curves:
    count = losses.shape[1]
    at = np.unique(np.geomspace(100, count, _POINTS).astype(int))
    return Curves(at.astype(np.float64), np.cumsum(losses, axis=1)[:, at - 1], farthest, gamma)


@dataclass(frozen=True)
class Spread:
    """The variance of weights near an optimum, over runs; a variance is the sum over coordinates.

    Attributes:
        of_views: Var_t as the paper's Theorem 6 has it, of the views x̃_t of a clock, their mean; shape (clocks,).
        newest: of x_t before each clock; shape (clocks,).
        covariance: cov(x_t, E[g_t]), mean of a clock's gradients, each at its own x_t; shape (clocks,).
        predicted: -2 Σ η_t cov(x_t, E[g_t]) over a clock's gradients: its change of Var_t by the theorem; shape
            (clocks,).
    """

    of_views: Floats
    newest: Floats
    covariance: Floats
    predicted: Floats


def unpredicted(variance: Floats, predicted: Floats, first: int) -> float:
    """What the theorem leaves of the changes of a variance: their distance from those that it predicts, of these.

    Args:
        first: clock from which on they are counted.

    >>> unpredicted(np.array([4.0, 2.0, 1.0]), np.array([-2.0, -1.0, 0.0]), 0)
    0.0
    """
    said = predicted[first:-1]
    return float(np.abs(np.diff(variance[first:]) - said).sum() / np.abs(said).sum())


def near_optimum(
    step_scale: float, num_workers: int, staleness: int, misses: Misses, *, dimensions: int, clocks: int, runs: int,
    seed: int,
) -> Spread:  # fmt: skip
    """Least squares whose components have one minimum, x* = 0: gradients a_t (a_t · x̃_t), which are O(ρ_t)."""
    rng = np.random.default_rng((51, seed))
    sums = np.empty((clocks + 1, runs, dimensions))
    sums[0] = rng.normal(size=(runs, dimensions))
    every = np.arange(runs)
    of_views, covariance, predicted = np.zeros(clocks), np.zeros(clocks), np.zeros(clocks)
    for clock in range(clocks):
        newest = sums[clock].copy()
        late = np.minimum(misses(rng, (runs, num_workers), staleness), clock)
        for worker in range(num_workers):
            view = sums[clock - late[:, worker], every]
            direction = _directions(rng, (runs, dimensions))
            expected = view / dimensions  # of a (a · view), for a on the unit sphere
            step = step_scale / np.sqrt(clock * num_workers + worker + 1)
            together = (_variance(newest + expected) - _variance(newest) - _variance(expected)) / 2
            of_views[clock] += _variance(view) / num_workers
            covariance[clock] += together / num_workers
            predicted[clock] -= 2 * step * together
            newest -= step * np.sum(direction * view, axis=-1, keepdims=True) * direction
        sums[clock + 1] = newest
    return Spread(of_views, np.array([_variance(x) for x in sums[:-1]]), covariance, predicted)


def _variance(x: Floats) -> float:
    return float(np.sum(np.var(x, axis=0)))
