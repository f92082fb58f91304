"""The tasks of a virtual worker's stages, simulated or measured: order, throughput, minibatches in flight. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "FB"]
Steps = list[tuple[float, float]]
"""(seconds, value from then on)."""


class Span(NamedTuple):
    """One task of a stage: forward (F), backward (B), or both (FB, the last stage). Minibatches count from 1."""

    stage: int
    kind: Kind
    minibatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """The tasks of one virtual worker.

    Attributes:
        num_stages: k.
        in_flight: N_m.
        spans: all tasks; the tasks of one stage are in the order of their start.
    """

    num_stages: int
    in_flight: int
    spans: tuple[Span, ...]
    _by_stage: tuple[tuple[Span, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_stage: list[list[Span]] = [[] for _ in range(self.num_stages)]
        for span in self.spans:
            by_stage[span.stage].append(span)
        object.__setattr__(self, "_by_stage", tuple(tuple(spans) for spans in by_stage))

    def of_stage(self, stage: int) -> tuple[Span, ...]:
        """Return the tasks of one stage, in order."""
        return self._by_stage[stage]

    def order(self, stage: int) -> str:
        """Return the tasks of one stage, as in `F1 F2 B1`."""
        return " ".join(f"{span.kind}{span.minibatch}" for span in self.of_stage(stage))

    @property
    def end_s(self) -> float:
        """The end of the last task in seconds; 0 without tasks."""
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def completions_s(self) -> list[float]:
        """The time of each completion of a minibatch, in order."""
        return [span.end_s for span in self.of_stage(0) if span.kind != "F"]

    def throughput(self) -> float:
        """Return the minibatches per second in steady state: the slope of completions over time, by least squares.

        Minibatches may complete in groups, so a count between two moments would depend on where it cuts a group.

        Raises:
            ValueError: there are fewer than 3 N_m + 2 minibatches.
        """
        times = self.steady_completions_s()
        middle, mean_s = (len(times) - 1) / 2, fmean(times)
        spread = sum((number - middle) ** 2 for number in range(len(times)))
        return spread / sum((number - middle) * (at_s - mean_s) for number, at_s in enumerate(times))

    def steady_completions_s(self) -> list[float]:
        """Return the `completions_s` while the pipeline was full, without the first half of this time, when it settles.

        It fills until the first N_m minibatches are complete. It drains from the start of the last minibatch on, which
        is when the minibatch N_m places before it is complete.

        Raises:
            ValueError: there are fewer than 3 N_m + 2 minibatches.
        """
        completions_s = self.completions_s
        count = len(completions_s)
        last = count - 1 - self.in_flight
        if last < 2 * self.in_flight + 1:
            raise ValueError(
                f"expected {3 * self.in_flight + 2} minibatches at least, of which the first and the last "
                f"{self.in_flight} do not count, got {count}"
            )
        return completions_s[max(self.in_flight, last // 2) : last + 1]

    def in_flight_steps(self, stage: int) -> Steps:
        """Return the number of minibatches whose activations this stage keeps, from the start of the forward task to
        the end of the backward task. There is one step for each change."""
        changes = [(span.start_s, 1) for span in self.of_stage(stage) if span.kind != "B"]
        changes += [(span.end_s, -1) for span in self.of_stage(stage) if span.kind != "F"]
        return _sums(changes)

    def max_in_flight(self, stage: int) -> int:
        """Return m_q: the maximum number of minibatches whose activations this stage keeps at once."""
        return int(max((count for _, count in self.in_flight_steps(stage)), default=0))

    def memory_steps(
        self,
        stage: int,
        *,
        parameter_bytes: float,
        activation_bytes: float,
        optimizer_multiplier: float,
    ) -> Steps:
        """Return the bytes of this stage over time: W (1 + opt), and W + A for each minibatch in flight.

        Args:
            stage: number of the stage.
            parameter_bytes: W of this stage.
            activation_bytes: A of this stage, for one minibatch.
            optimizer_multiplier: opt, number of arrays of W's size besides W.
        """
        fixed = parameter_bytes * (1.0 + optimizer_multiplier)
        each = activation_bytes + parameter_bytes
        return [(0.0, fixed)] + [(at_s, fixed + count * each) for at_s, count in self.in_flight_steps(stage)]


def _sums(changes: Iterable[tuple[float, int]]) -> Steps:
    """Return the running sum of changes; at the same moment, ends are before begins."""
    steps: Steps = []
    total = 0
    for at_s, change in sorted(changes):
        total += change
        if steps and steps[-1][0] == at_s:
            steps[-1] = (at_s, total)
        else:
            steps.append((at_s, total))
    return steps
