"""The learning settings: the task, the policy, the optimizer, and when the job ends."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, Self, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from doll.config.policy import POLICIES, PolicyConfig, default_policy
from doll.config.section import LONGEST_S, Section, short_form
from doll.config.tables import TableConfig
from doll.config.variants import Variants

T = TypeVar("T")
# YAML 1.1 reads 3e-4 (without a point) as text, and a class cannot know that it is a number.
_NUMBER: Final = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


def _is_class_name(name: str) -> str:
    parts = name.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ValueError(f"expected module.Class, as in torch.optim.AdamW, got {name!r}")
    return name


def _with_numbers(value: Any) -> Any:
    match value:
        case str() if _NUMBER.fullmatch(value):
            return float(value)
        case dict():
            return {key: _with_numbers(item) for key, item in value.items()}
        case list():
            return [_with_numbers(item) for item in value]
        case _:
            return value


Values = Annotated[dict[str, Any], BeforeValidator(_with_numbers)]
"""Keyword arguments of any type; text such as 3e-4 is a number."""


class NamedClass(Section):
    """A class of another package, such as an optimizer or a schedule, and its keyword arguments."""

    cls: Annotated[str, AfterValidator(_is_class_name)] = Field(alias="class")
    """class as `module.Class`, such as torch.optim.AdamW"""
    args: Values = Field(default_factory=dict)
    """keyword arguments of the class"""


def _check_patterns(values: dict[str, T]) -> dict[str, T]:
    for pattern in values:
        try:
            re.compile(pattern)
        except re.error as exc:
            raise ValueError(f"expected a regular expression, got {pattern!r}: {exc}") from exc
    return values


ByPattern = Annotated[dict[str, T], AfterValidator(_check_patterns)]  # values by regular expressions


class TaskConfig(Section):
    """The user's task: a Python class and its keyword arguments."""

    cls: str = Field(alias="class")
    """class as `module:Class`, or as `file.py:Class` relative to the job file"""
    args: dict[str, Any] = Field(default_factory=dict)
    """keyword arguments of the class"""

    @model_validator(mode="after")
    def _has_class(self) -> Self:
        module, _, name = self.cls.rpartition(":")
        if not module or not name.isidentifier():
            raise ValueError(f"expected 'module:Class' or 'file.py:Class', got {self.cls!r}")
        return self


class SgdConfig(Section):
    """Stochastic gradient descent on the mean gradient of an update's batches."""

    name: Literal["sgd"] = "sgd"
    lr: PositiveFloat = 0.1
    momentum: float = Field(default=0.0, ge=0, lt=1)
    nesterov: bool = False
    weight_decay: float = Field(default=0.0, ge=0)


class AdamConfig(Section):
    """Adam on the mean gradient of an update's batches."""

    name: Literal["adam"] = "adam"
    lr: PositiveFloat = 1e-3
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)


class AdagradConfig(Section):
    """Adagrad (Duchi, Hazan, Singer, 2011) on the mean gradient of an update's batches: each weight has its own
    rate."""

    name: Literal["adagrad"] = "adagrad"
    lr: PositiveFloat = 0.1
    initial_accumulator: float = Field(default=0.0, ge=0)
    """initial value of a weight's sum of squared gradients; if it is 0, the first step of each weight is lr, however
    small its gradient is"""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """momentum of the steps, applied after each weight's rate: with momentum, large batches need a smaller lr, and do
    not overshoot at first"""
    weight_decay: float = Field(default=0.0, ge=0)


class TorchConfig(NamedClass):
    """A torch optimizer class, or a class of another package with the same interface, applied to the model's parameters
    by name (docs/guide/model.md). `name` can be omitted."""

    name: Literal["class"] = "class"
    groups: ByPattern[Values] = Field(default_factory=dict)
    """arguments for groups of parameters, by regular expression: the first expression that is found in a parameter's
    name (re.search) applies; parameters without one only have `args`"""


class _Optimizers(Variants):
    """The built-in optimizers by their names; a section with the key `class` is a `TorchConfig`."""

    def validate(self, value: Any) -> Section:
        if isinstance(value, dict) and "class" in value and self.key not in value:
            value = {self.key: "class", **value}
        return super().validate(value)


optimizers = _Optimizers("name", SgdConfig, AdamConfig, AdagradConfig, TorchConfig, default="sgd")

OptimizerConfig = Annotated[SgdConfig | AdamConfig | AdagradConfig | TorchConfig, optimizers]


class SchedulePart(NamedClass):
    """A torch scheduler class, or a class with the same interface, for the learning rate of a number of updates."""

    updates: PositiveInt | None = None
    """number of updates for which this part lasts; omitted in the last part, which has no end"""
    metric: str | None = None
    """only for ReduceLROnPlateau, as the only part: `loss`, or a metric of the task, of samples before they are
    learned. The scheduler gets its mean over the samples of each `every_updates` updates"""
    every_updates: PositiveInt = 100
    """with `metric`: number of updates between two steps of the scheduler, so that `patience` counts such intervals"""


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, dict) else value


class EmaConfig(Section):
    """An exponential moving average of the weights at the server. After each update with at least one sample, average =
    decay * average + (1 - decay) * weights. The average starts with the initial weights of the job."""

    decay: float = Field(ge=0, lt=1)
    evaluate: bool = True
    """true: held-out evaluation measures the average, at checkpoints; false: it measures the weights"""


class GuardConfig(Section):
    """The guard against samples that would damage the model; it writes dead letters for them (docs/security.md)."""

    spike_factor: float = Field(default=100.0, ge=0)
    """a sample is checked if its gradient is this many times longer than usual; it is dead-lettered if its step would
    raise the loss on other samples too much; 0: only samples without a finite gradient are dead-lettered"""


class InitFromConfig(Section):
    """The initial weights of a new job, instead of the weights that its task draws (docs/guide/model.md). The source is
    read once: a job that continues from a checkpoint has its own weights."""

    source: str = Field(alias="from")
    """a run folder; or `RUN@VERSION` for a version other than the newest, by its number or an alias; or a folder or
    `s3://bucket/prefix` of checkpoints; or a `.safetensors` file; or a `.pt` or `.ckpt` file with a `state_dict`. Paths
    are relative to the job file, or to the working directory"""
    strict: bool = False
    """refuse weights that do not match, instead of reporting them"""
    rename: ByPattern[str] = Field(default_factory=dict)
    """replacements for regular expressions in the source's names, as in {"^backbone\\.": "encoder."}; each expression
    must be found in a name"""

    @field_validator("source")
    @classmethod
    def _is_named(cls, value: str) -> str:
        if not value.strip() or "\0" in value:
            raise ValueError(f"expected a run folder or a file, got {value!r}")
        return value


InitFrom: TypeAlias = Annotated[InitFromConfig, short_form("from")]


class TrainingConfig(Section):
    """How the model learns."""

    policy: Annotated[PolicyConfig, POLICIES] = Field(default_factory=default_policy)
    optimizer: OptimizerConfig = Field(default_factory=SgdConfig)
    tables: ByPattern[TableConfig] = Field(default_factory=dict)
    """settings of tables, by regular expression: the first one that is found in a table's name (re.search) applies"""
    reduction: Literal["mean", "sum"] = "mean"
    """mean: step on the mean gradient of an update's samples; sum: step on the sum, as the paper defines it"""
    clip_norm: PositiveFloat | None = None
    """maximum norm of an update's gradient; a longer gradient is scaled down"""
    clip_value: PositiveFloat | None = None
    """maximum absolute value of a number of an update's gradient; a larger value is clipped to this one"""
    schedule: Annotated[list[SchedulePart], BeforeValidator(_as_list)] = Field(default_factory=list)
    """learning rates by update: one class, or several, one after the other (docs/guide/model.md); default: the learning
    rate of the optimizer"""
    ema: EmaConfig | None = None
    guard: GuardConfig = Field(default_factory=GuardConfig)
    precision: Literal["float32", "bf16"] = "float32"
    """precision of the forward and backward passes: bf16 uses torch.autocast; parameters and gradients stay float32"""
    init_from: InitFrom | None = None
    """the initial weights of a new job: a run, `RUN@VERSION`, a file, or a section [weights that the task draws]"""

    @property
    def evaluates_average(self) -> bool:
        """Whether held-out evaluation measures the average of the weights instead of the weights."""
        return self.ema is not None and self.ema.evaluate

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.clip_norm is not None and self.clip_value is not None:
            raise ValueError("clip_value: expected either clip_norm or clip_value, got both: remove one")
        if len(self.schedule) > 1 and any(part.metric for part in self.schedule):
            raise ValueError("schedule: expected a part with `metric` to be the only one")
        if self.policy.sends_steps and any(part.metric for part in self.schedule):
            raise ValueError(f"schedule: metric: policy {self.policy.name}: expected workers that send gradients")
        for number, part in enumerate(self.schedule):
            is_last = number == len(self.schedule) - 1
            if is_last and part.updates is not None:
                raise ValueError(f"schedule: expected no updates in its last part, got {part.updates}: it goes on")
            if not is_last and part.updates is None:
                raise ValueError(f"schedule: expected `updates` in part {number} ({part.cls}): another part follows it")
        return self


class StopConfig(Section):
    """The job ends when the first of these conditions is met; without conditions, it runs until it is stopped."""

    updates: PositiveInt | None = None
    """number of model updates; an update without a usable sample does not count"""
    samples: PositiveInt | None = None
    """number of samples applied to the model"""
    seconds: PositiveFloat | None = Field(default=None, ge=0.001, le=LONGEST_S)
    """wall-clock seconds since the job's first update that has learned a sample"""
    accuracy: float | None = Field(default=None, gt=0, le=1)
    """the job ends when the held-out accuracy reaches this value"""
    loss: float | None = None
    """the job ends when the held-out loss is at or below this value"""
    metric: str | None = Field(default=None, min_length=1, max_length=100)
    """the job ends when this metric of the task on held-out samples reaches `at_least` or `at_most`; `prequential_NAME`
    is metric NAME of the samples of the last 50 updates, before they were learned"""
    at_least: float | None = None
    """minimum of `metric`"""
    at_most: float | None = None
    """maximum of `metric`"""

    @model_validator(mode="after")
    def _metric_has_a_bound(self) -> Self:
        bounds = [bound for bound in (self.at_least, self.at_most) if bound is not None]
        if len(bounds) != (self.metric is not None):
            raise ValueError("expected metric with at_least or at_most, as in {metric: auc, at_least: 0.8}")
        return self

    @property
    def bound(self) -> str:
        """The bound of `metric`, such as "at least 0.8"."""
        return f"at most {self.at_most:g}" if self.at_least is None else f"at least {self.at_least:g}"
