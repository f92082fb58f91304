"""The section `versions`: the checks that a version must pass before it gets an alias by itself."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from doll.config.section import LONGEST_S, Section


def _as_tolerance(value: Any) -> Any:
    return {"tolerance": value} if isinstance(value, int | float) and not isinstance(value, bool) else value


class MetricGateConfig(Section):
    """How much worse than the alias's version a version may be in a metric. A number is the tolerance."""

    tolerance: NonNegativeFloat = 0.0
    """the largest difference that is accepted"""
    better: Literal["lower", "higher", "one"] | None = None
    """which values are better; one: those near 1, as of a calibration; default: known for the metrics of doll.metrics,
    loss and accuracy"""


MetricGate = Annotated[MetricGateConfig, BeforeValidator(_as_tolerance)]


class GatesConfig(Section):
    """Checks of each checkpoint by the evaluator, cheapest first. A version that passes all of them gets the alias; any
    other one keeps the reason (`doll versions show`). Evaluated are the held-out samples (docs/guide/gates.md)."""

    alias: str = Field(default="stable", pattern=r"^[a-z][a-z0-9_-]{0,62}$")
    """the alias that moves"""
    metrics: dict[str, MetricGate] = Field(default={}, max_length=100)
    """held-out metrics by name, such as loss, auc or auc[0] (a segment), each with its tolerance [loss: 0]. A version
    fails if it is worse than the alias's version by more than the tolerance, beyond the noise of the samples"""
    held_back_share: float = Field(default=0.01, gt=0, lt=0.5)
    """share of the versions that are held back although they are as good as the alias's, over all metrics together"""
    max_step: Annotated[float, Field(ge=1)] | None = 10.0
    """a version fails if a tensor has moved this many times as far as usual; null: not checked"""
    max_shift: PositiveFloat | None = None
    """largest population stability index between the model's outputs and those of the alias's version; 0.25 is a large
    shift; null: not checked"""
    max_slowdown: Annotated[float, Field(ge=1)] | None = 3.0
    """a version fails if its answers take this many times as long; null: not checked"""
    max_growth: Annotated[float, Field(ge=1)] | None = 2.0
    """a version fails if its checkpoint is this many times as large; null: not checked"""
    max_event_age_s: PositiveFloat | None = Field(default=None, le=LONGEST_S)
    """a version fails if the newest event that it has learned is older than this (needs freshness.time); null: not
    checked"""
    min_interval_s: float | None = Field(default=None, ge=0, le=LONGEST_S)
    """minimum time between two moves of the alias; default: 0, or 30 with versions.live, which needs some seconds to
    compare a version with the one before"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.alias == "latest" or (self.alias[0] == "v" and self.alias[1:].isdecimal()):
            raise ValueError(f"alias: expected a name that is not latest and not v with a number, got {self.alias}")
        unknown = [name for name, gate in self.metrics.items() if gate.better is None and direction_of(name) is None]
        if unknown:
            raise ValueError(f"metrics.{unknown[0]}: expected better: lower, higher or one")
        return self

    @property
    def gated(self) -> dict[str, MetricGateConfig]:
        """The metrics that are checked."""
        return self.metrics or {"loss": MetricGateConfig()}

    def better(self, metric: str) -> Literal["lower", "higher", "one"]:
        """Return which values of a metric are better."""
        known = self.gated[metric].better or direction_of(metric)
        assert known is not None
        return known


class LiveConfig(Section):
    """A watch on the version that got the alias last: the evaluator measures it and the version before on the newest
    records of the stream, and moves the alias back if the new one is worse (docs/guide/gates.md)."""

    metric: str = "loss"
    """metric that is compared: the loss, or a mean that the task's metrics return"""
    better: Literal["lower", "higher"] | None = None
    """which values are better; default: known for the loss and accuracy"""
    tolerance: NonNegativeFloat = 0.0
    """the largest difference that is accepted"""
    error: float = Field(default=0.05, ge=1e-9, le=0.5)
    """probability that a version that is as good as the one before is moved back, at any time"""
    max_records_per_s: PositiveInt = Field(default=200, le=100_000)
    """maximum number of records that are measured in a second, the newest ones; both versions compute them"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.better is None and direction_of(self.metric) not in ("lower", "higher"):
            raise ValueError(f"metric: {self.metric}: expected better: lower or higher")
        return self

    @property
    def sign(self) -> int:
        """1 if lower values are better, else -1."""
        return 1 if (self.better or direction_of(self.metric)) == "lower" else -1


class VersionsConfig(Section):
    """Versions that get an alias by themselves."""

    gates: GatesConfig | None = None
    """checks before a version gets the alias; default: aliases move only by `doll versions alias`"""
    live: LiveConfig | None = None
    """a watch on the version that got the alias last, with the newest records; needs gates; default: none"""

    @property
    def min_interval_s(self) -> float:
        """The minimum time between two moves of the alias by gates, in seconds."""
        given = None if self.gates is None else self.gates.min_interval_s
        return given if given is not None else 0.0 if self.live is None else _LIVE_INTERVAL_S

    @model_validator(mode="after")
    def _has_gates(self) -> Self:
        if self.live is not None and self.gates is None:
            raise ValueError("live: expected gates, which move the alias: gates: {} has their defaults")
        return self


_LIVE_INTERVAL_S: Final = 30.0
_DIRECTIONS: dict[str, Literal["lower", "higher", "one"]] = {
    "loss": "lower", "log_loss": "lower", "normalized_entropy": "lower", "rmse": "lower", "pinball_loss": "lower",
    "accuracy": "higher", "auc": "higher", "average_precision": "higher", "ndcg": "higher", "calibration": "one",
}  # fmt: skip


def direction_of(metric: str) -> Literal["lower", "higher", "one"] | None:
    """Return which values of a metric are better, by its name without a segment; None: not known."""
    return _DIRECTIONS.get(metric.partition("[")[0])
