"""The reason why no partition fits: the layer, the device, and the missing resource. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from doll.pipeline.planner.partition import DoesNotFitError, furthest_text, misfit
from doll.pipeline.profiling.profile import Device

from doll_lab.pipelines.device_orders import Costs, reachable
from doll_lab.pipelines.partition_problem import Problem


def explain(problem: Problem, costs: Costs, in_flight: int) -> DoesNotFitError:
    """Return the error for a problem that has no partition."""
    reasons = _Reasons(problem, costs, in_flight)
    return reasons.lonely_layer() or reasons.idle_devices() or reasons.best_attempt()


class _Reasons:
    def __init__(self, problem: Problem, costs: Costs, in_flight: int) -> None:
        self._problem, self._costs, self._in_flight = problem, costs, in_flight
        self._names = [layer.name for layer in problem.profile.layers]
        self._end = len(self._names)
        self._divided = problem.num_stages > 1

    def lonely_layer(self) -> DoesNotFitError | None:
        """Return the error if a layer fits on no device, alone in a stage, or in the last one with all later layers."""
        for number, name in enumerate(self._names):
            in_last = not self._divided or number == self._end - 1
            stop = number + 1
            fits = bool(self._costs.fits[:, int(in_last), number, stop].any())
            # Each stage before the last one needs a layer.
            may_be_last = number >= self._problem.num_stages - 1
            if fits or (may_be_last and self._costs.fits[:, 1, number, self._end].any()):
                continue
            need = self._need(number, stop, is_last=in_last)
            return self._error(f"layer {name!r} fits on no device: it needs", name, need, self._problem.types, in_last)
        return None

    def idle_devices(self) -> DoesNotFitError | None:
        """Return the error if there are too few devices that any layer fits on."""
        problem, fits = self._problem, self._costs.fits
        cuts = np.arange(self._end)
        idle = [
            kind
            for kind in range(len(problem.types))
            if not (fits[kind, 0, cuts, cuts + 1].any() or fits[kind, 1, problem.num_stages - 1 :, self._end].any())
        ]
        usable = sum(len(group) for kind, group in enumerate(problem.groups) if kind not in idle)
        if usable >= problem.num_stages:
            return None
        needs = [self._need(n, n + 1, is_last=n == self._end - 1) for n in range(self._end)]
        smallest = int(np.argmin(needs))
        name = self._names[smallest]
        return self._error(
            f"{problem.num_stages} stages need as many devices, and even the layer that needs least, {name!r}, is too "
            "large for some: it needs", name, needs[smallest], [problem.types[kind] for kind in idle],
            smallest == self._end - 1,
        )  # fmt: skip

    def best_attempt(self) -> DoesNotFitError:
        """Return the error if layers fit, but no contiguous cut: how far the first stages reach, and what is left."""
        problem = self._problem
        levels, _ = reachable(self._costs, problem.sets)
        size = number = first = 0
        for tried, level in enumerate(levels):
            # Each stage after these needs a layer.
            room = level[:, : self._end - (problem.num_stages - tried) + 1]
            if not room.any():
                break
            size = tried
            number, first = max(((row, cut) for row, cut in np.argwhere(room).tolist()), key=lambda at: (at[1], -at[0]))
        used = problem.sets.members[size][number]
        left = [group[count] for group, count in zip(problem.groups, used, strict=True) if len(group) > count]
        is_last = size == problem.num_stages - 1
        stop = self._end if is_last else first + 1
        need = self._need(first, stop, is_last=is_last)
        over = first
        if is_last:
            most = max(device.memory_bytes for device in left)
            over = next(n for n in range(first, self._end) if self._need(first, n + 1, is_last=True) > most)
        used_names = [
            f"{count} x {device.name}" if count > 1 else device.name
            for device, count in zip(problem.types, used, strict=True)
            if count
        ]
        what = furthest_text(self._names, first, stop, over, used_names)
        return self._error(what, self._names[over], need, left, is_last)

    def _need(self, first: int, stop: int, *, is_last: bool) -> float:
        return self._problem.bytes_of(first, stop, self._in_flight, is_last=is_last)

    def _error(
        self, what: str, layer: str, need_bytes: float, devices: Sequence[Device], is_last: bool
    ) -> DoesNotFitError:
        fewer = next((n for n in range(self._in_flight - 1, 0, -1) if self._problem.fits(n)), 0)
        return misfit(
            what, layer, need_bytes, devices, self._in_flight, fewer, is_last=is_last, is_only=not self._divided
        )
