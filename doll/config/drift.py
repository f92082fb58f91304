"""The section `drift`: which metrics of a job are watched for a change of the stream."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from doll.config.gates import direction_of
from doll.config.section import LONGEST_S, Section, short_form


class DetectorConfig(Section):
    """How a metric is watched. A text is the detector."""

    detector: Literal["adwin", "page_hinkley", "kswin"] = "adwin"
    """a detector of the library River"""
    args: dict[str, float] = Field(default={}, max_length=10)
    """further arguments of River's class, such as delta of adwin"""
    better: Literal["lower", "higher", "one"] | None = None
    """which values are better; one: those near 1; default: known for loss, accuracy and the metrics of doll.metrics"""


Detector = Annotated[DetectorConfig, short_form("detector")]


class ReactionConfig(Section):
    """A higher learning rate for some updates after a change of the stream, and a shorter window of the moving average
    (training.ema), so that the model follows it sooner."""

    lr_factor: float = Field(default=3.0, gt=0, le=1000)
    """factor of the learning rate"""
    ema_factor: float = Field(default=1.0, ge=1, le=1_000_000)
    """by how much shorter the window of the moving average is: 1 - decay times this, at most 1, takes the place of
    1 - decay"""
    updates: int = Field(default=200, ge=1, le=1_000_000_000)
    """number of updates with these factors, from the update at which the change was noticed"""


class ChallengerConfig(Section):
    """A second job on the same stream, which begins at a drift and is compared with the job."""

    job: Path | None = None
    """job file of the challenger, such as one with another optimizer; its name, its stream and the weights that it
    begins with are replaced; default: that of the job"""
    begin_with: str | None = Field(default=None, pattern=r"[a-z0-9][a-z0-9_-]{0,62}")
    """version or alias of the job whose weights the challenger begins with, such as stable; default: new weights"""
    most: int = Field(default=1, ge=1, le=100)
    """largest number of challengers of a run"""
    min_interval_s: float = Field(default=86_400.0, ge=0, le=LONGEST_S)
    """least time between two drifts that start a challenger"""
    compare_after_s: float = Field(default=600.0, ge=0, le=LONGEST_S)
    """time for which a challenger learns before its newest version and that of the job are compared"""
    metric: str = "loss"
    """metric of the comparison: loss, or a mean that Task.metrics returns"""


Challenger = Annotated[ChallengerConfig, short_form("job")]


class InputsConfig(Section):
    """Changes of what comes: features, labels, and the model's answers. The evaluator reads a part of the stream for
    it."""

    records_per_s: int = Field(default=100, ge=1, le=100_000)
    """largest number of records read in a second, the newest ones"""
    window: int = Field(default=5_000, ge=1_000, le=1_000_000_000)
    """samples of the newest window, which is compared with an earlier one; longer than what comes and goes each day
    if this is not to be reported"""
    max_index: float = Field(default=0.2, gt=0, le=100)
    """population stability index above which a column has changed"""
    leave_out: list[str] = Field(default=[], max_length=1_000)
    """columns that are not watched, such as x[3] or user.age"""
    answers: bool = True
    """whether the model's answers are watched too; they are computed for 2,000 samples in each window"""


class DriftConfig(Section):
    """Changes of the stream that make the model worse (docs/guide/drift.md). The evaluator watches the prequential
    metrics of each update, and says between which records a metric became worse."""

    metrics: dict[str, Detector] = Field(default={}, max_length=32)
    """metrics by name, each with its detector [loss: adwin]"""
    inputs: InputsConfig | None = None
    """watch features, labels and answers too; default: no"""
    react: ReactionConfig | None = None
    """what the parameter server does about a change; default: nothing. Only with a policy whose workers send
    gradients"""
    challenger: Challenger | None = None
    """start a second job on the same stream after a change; default: no. A text is its job file"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        unknown = [name for name, item in self.metrics.items() if item.better is None and direction_of(name) is None]
        if unknown:
            raise ValueError(f"metrics.{unknown[0]}.better: expected lower, higher or one")
        return self

    @property
    def watched(self) -> dict[str, DetectorConfig]:
        """The metrics that are watched."""
        return self.metrics or {"loss": DetectorConfig()}
