"""The schedule of one virtual worker: which stage computes which minibatch when (the HetPipe paper, section 4). Pure.

A virtual worker is a pipeline of k stages. Minibatch p goes forward through stages 0 to k - 1 and backward from there
to stage 0, where it is complete. The last stage does both in one task. A stage does its tasks one at a time, in the
order in which they arrive; so minibatches are complete in order, on which the bounds of WSP rest. Minibatch p starts
when p - N_m is complete and p is admitted.

Figure 1 of the paper, four stages with tasks of one second, and four minibatches in flight:

>>> timeline = simulate([StageTimes(1.0, 1.0)] * 4, in_flight=4, minibatches=7)
>>> timeline.order(0)
'F1 F2 F3 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7'
>>> timeline.order(3)
'FB1 FB2 FB3 FB4 FB5 FB6 FB7'
>>> [timeline.max_in_flight(stage) for stage in range(4)]
[4, 4, 3, 1]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from doll_lab.pipelines.timeline import Kind, Span, Timeline

Jitter = Callable[[int, Kind, int], float]
"""(stage, kind, minibatch) -> factor on the task's time."""


class StageTimes(NamedTuple):
    """Seconds of a stage's tasks for one minibatch, with what it takes to receive their input."""

    forward_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


class Pipeline:
    """The stages of one virtual worker at work; the caller keeps the time.

    Each call that may make stages busy is followed by `dispatch`, once for all events of one moment: which of two tasks
    arrived first is known then.

    Attributes:
        started: minibatches that have started, which are 1 to `started`.
        completed: minibatches that are complete.
        spans: of the tasks so far, in order of their start.
        busy: stages that compute.
    """

    def __init__(
        self,
        stages: Sequence[StageTimes],
        in_flight: int,
        *,
        jitter: Jitter | None = None,
        forward_first: bool = False,
    ) -> None:
        """
        Args:
            stages: first stage first.
            in_flight: N_m, minibatches between their start and their completion.
            jitter: factor on the time of each task; default: 1.
            forward_first: which of two tasks that arrive at the same moment comes first. Backward first keeps fewer
                activations.

        Raises:
            ValueError: no stage, a time below 0, or no minibatch in flight.
        """
        if not stages or in_flight < 1:
            raise ValueError(
                f"expected a stage and a minibatch in flight at least, got {len(stages)} stages and {in_flight}"
            )
        for number, times in enumerate(stages):
            if not min(times) >= 0.0:
                raise ValueError(f"stage {number}: expected times of 0 s or more, got {times}")
        self.stages = tuple(stages)
        self.in_flight = in_flight
        self.started = 0
        self.completed = 0
        self.busy = 0
        self.spans: list[Span] = []
        self._jitter = jitter
        self._forward_first = forward_first
        self._last = len(stages) - 1
        # What has arrived, in order: (moment, minibatch).
        self._forward: list[deque[tuple[float, int]]] = [deque() for _ in stages]
        self._backward: list[deque[tuple[float, int]]] = [deque() for _ in stages]
        self._running: list[Span | None] = [None] * len(stages)
        self._touched: set[int] = set()  # stages that may have something to begin

    @property
    def has_room(self) -> bool:
        """The next minibatch may start, if it is admitted."""
        return self.started - self.completed < self.in_flight

    def start(self, now: float) -> int:
        """The next minibatch starts: it arrives at the first stage.

        Raises:
            ValueError: the minibatch N_m places before it is not complete.
        """
        if not self.has_room:
            raise ValueError(
                f"minibatch {self.started + 1}: expected {self.started + 1 - self.in_flight} to be complete, "
                f"got {self.completed} complete ones"
            )
        self.started += 1
        self._forward[0].append((now, self.started))
        self._touched.add(0)
        return self.started

    def end(self, stage: int, now: float) -> int | None:
        """The task of this stage ends; what it computed arrives at the next one.

        Returns:
            the minibatch that is complete now, if any.
        """
        span = self._running[stage]
        if span is None:
            raise ValueError(f"stage {stage}: expected a task under way, got none")
        self._running[stage] = None
        self.busy -= 1
        self._touched.add(stage)
        if span.kind == "F":
            self._forward[stage + 1].append((now, span.minibatch))
            self._touched.add(stage + 1)
        elif stage:
            self._backward[stage - 1].append((now, span.minibatch))
            self._touched.add(stage - 1)
        else:
            self.completed += 1
            return span.minibatch
        return None

    def dispatch(self, now: float) -> list[tuple[float, int]]:
        """Stages with nothing to do begin what came first.

        Returns:
            (end in seconds, stage) of each task that begins.
        """
        begun: list[tuple[float, int]] = []
        for stage in sorted(self._touched):
            if self._running[stage] is not None:
                continue
            task = self._next(stage)
            if task is None:
                continue
            kind, minibatch = task
            times = self.stages[stage]
            seconds = times.forward_s if kind == "F" else times.backward_s if kind == "B" else sum(times)
            if self._jitter is not None:
                seconds *= self._jitter(stage, kind, minibatch)
            span = Span(stage, kind, minibatch, now, now + seconds)
            self._running[stage] = span
            self.busy += 1
            self.spans.append(span)
            begun.append((span.end_s, stage))
        self._touched.clear()
        return begun

    def _next(self, stage: int) -> tuple[Kind, int] | None:
        """Take the task that arrived first."""
        forward, backward = self._forward[stage], self._backward[stage]
        if forward and backward:
            came, gone = forward[0][0], backward[0][0]
            is_forward = came < gone or (came == gone and self._forward_first)
        else:
            is_forward = bool(forward)
        if is_forward:
            return "FB" if stage == self._last else "F", forward.popleft()[1]
        return ("B", backward.popleft()[1]) if backward else None


def simulate(
    stages: Sequence[StageTimes],
    in_flight: int,
    minibatches: int,
    *,
    jitter: Jitter | None = None,
    admitted_s: Callable[[int], float] | None = None,
    forward_first: bool = False,
    pipeline: type[Pipeline] = Pipeline,
) -> Timeline:
    """Run one virtual worker in virtual time.

    Args:
        stages: first stage first.
        in_flight: N_m.
        minibatches: how many there are.
        jitter: factor on the time of each task.
        admitted_s: when a minibatch (1, 2, ...) is admitted; default: from the beginning.
        forward_first: which of two tasks that arrive at the same moment comes first.
        pipeline: another rule of scheduling.

    Raises:
        ValueError: no stage, a time below 0, or no minibatch in flight.
    """
    line = pipeline(stages, in_flight, jitter=jitter, forward_first=forward_first)
    events: list[tuple[float, int]] = [(0.0, -1)]  # (seconds, stage whose task ends; -1: a minibatch is admitted)
    while events:
        now = events[0][0]
        while events and events[0][0] == now:
            stage = heappop(events)[1]
            if stage >= 0:
                line.end(stage, now)
        while line.has_room and line.started < minibatches:
            if admitted_s is not None and (at_s := admitted_s(line.started + 1)) > now:
                heappush(events, (at_s, -1))
                break
            line.start(now)
        for begun in line.dispatch(now):
            heappush(events, begun)
    return Timeline(len(line.stages), in_flight, tuple(line.spans))


def simulate_as_measured(measured: Timeline, *, admitted_s: Callable[[int], float] | None = None) -> Timeline:
    """The schedule that follows from the durations of measured tasks: what a measured order is compared with.

    Args:
        measured: all tasks of minibatches 1, 2, ....
        admitted_s: when a minibatch was admitted; default: from the beginning.

    Raises:
        ValueError: a task is missing.
    """
    durations = {(span.stage, span.kind, span.minibatch): span.end_s - span.start_s for span in measured.spans}

    def seconds(stage: int, kind: Kind, minibatch: int) -> float:
        duration = durations.get((stage, kind, minibatch))
        if duration is None:
            raise ValueError(f"expected all tasks of minibatch {minibatch}, got no {kind} of stage {stage}")
        return duration / 2.0 if kind == "FB" else duration

    minibatches = len(measured.completions_s)
    stages = [StageTimes(1.0, 1.0)] * measured.num_stages
    return simulate(stages, measured.in_flight, minibatches, jitter=seconds, admitted_s=admitted_s)
