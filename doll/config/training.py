"""The learning: the task, the policy, the optimizer, and when the job ends."""

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
from doll.config.section import LONGEST_S, Section
from doll.config.tables import TableConfig
from doll.config.variants import Variants

T = TypeVar("T")
# YAML 1.1 reads 3e-4, without a point, as text; nothing tells a class that a number is meant.
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
"""Keyword arguments, whatever their types; text such as 3e-4 is a number."""


class NamedClass(Section):
    """A class of somebody else, such as an optimizer or a schedule, and its keyword arguments."""

    cls: Annotated[str, AfterValidator(_is_class_name)] = Field(alias="class")
    """`module.Class`, as in torch.optim.AdamW"""
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
    """`module:Class`, or `file.py:Class` relative to the job file"""
    args: dict[str, Any] = Field(default_factory=dict)
    """keyword arguments of the class"""

    @model_validator(mode="after")
    def _has_class(self) -> Self:
        module, _, name = self.cls.rpartition(":")
        if not module or not name.isidentifier():
            raise ValueError(f"expected 'module:Class' or 'file.py:Class', got {self.cls!r}")
        return self


class SgdConfig(Section):
    """Stochastic gradient descent on the mean gradient of a group."""

    name: Literal["sgd"] = "sgd"
    lr: PositiveFloat = 0.1
    momentum: float = Field(default=0.0, ge=0, lt=1)
    nesterov: bool = False
    weight_decay: float = Field(default=0.0, ge=0)


class AdamConfig(Section):
    """Adam on the mean gradient of a group."""

    name: Literal["adam"] = "adam"
    lr: PositiveFloat = 1e-3
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)


class AdagradConfig(Section):
    """Adagrad (Duchi, Hazan, Singer, 2011) on the mean gradient of a group: each weight has a rate of its own."""

    name: Literal["adagrad"] = "adagrad"
    lr: PositiveFloat = 0.1
    initial_accumulator: float = Field(default=0.0, ge=0)
    """what a weight's sum of squared gradients begins with; without it, the first step of each weight is lr, however
    short its gradient is"""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """of the steps, after each weight's rate: with it large batches need a smaller lr, and do not overshoot at first"""
    weight_decay: float = Field(default=0.0, ge=0)


class TorchConfig(NamedClass):
    """A torch optimizer class, or one of another package with its interface, on the model's parameters by name
    (docs/guide/model.md). `name` need not be given."""

    name: Literal["class"] = "class"
    groups: ByPattern[Values] = Field(default_factory=dict)
    """arguments of a group of parameters, by a regular expression: the first one that is found in a parameter's name
    (re.search) has it; parameters without one have `args` alone"""


class _Optimizers(Variants):
    """The built-in ones by their names; a class says by its key what it is."""

    def validate(self, value: Any) -> Section:
        if isinstance(value, dict) and "class" in value and self.key not in value:
            value = {self.key: "class", **value}
        return super().validate(value)


optimizers = _Optimizers("name", SgdConfig, AdamConfig, AdagradConfig, TorchConfig, default="sgd")

OptimizerConfig = Annotated[SgdConfig | AdamConfig | AdagradConfig | TorchConfig, optimizers]


class SchedulePart(NamedClass):
    """A torch class of learning rates, or one with its interface, for some updates."""

    updates: PositiveInt | None = None
    """how many updates this part lasts; the last part has none, because it goes on"""


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, dict) else value


class EmaConfig(Section):
    """An exponential moving average of the weights, kept at the server: after each update that has learned something,
    average = decay * average + (1 - decay) * weights. It begins with the weights that the job begins with."""

    decay: float = Field(ge=0, lt=1)
    evaluate: bool = True
    """held-out evaluation measures the average, at checkpoints; false: the weights"""


class GuardConfig(Section):
    """Samples that would break the model are dead-lettered (docs/security.md)."""

    spike_factor: float = Field(default=100.0, ge=0)
    """a sample is checked if its gradient is this many times longer than usual, and dead-lettered if its step would
    raise the loss on other samples too much; 0: only samples without a finite gradient are dead-lettered"""


class InitFromConfig(Section):
    """The weights that a new job begins with, in place of those that its task draws (docs/guide/model.md). It is read
    once: a job that goes on from a checkpoint has its own."""

    source: str = Field(alias="from")
    """a run folder, `RUN@VERSION` for another version than its newest, by its number or an alias, a folder or
    `s3://bucket/prefix` of checkpoints, a `.safetensors` file, or a `.pt` or `.ckpt` file with a `state_dict`; relative
    to the job file, or to the working directory"""
    strict: bool = False
    """refuse whatever does not match, in place of a report of it"""
    rename: ByPattern[str] = Field(default_factory=dict)
    """replacements of regular expressions in the source's names, as in {"^backbone\\.": "encoder."}; each must be found
    in a name"""

    @field_validator("source")
    @classmethod
    def _is_named(cls, value: str) -> str:
        if not value.strip() or "\0" in value:
            raise ValueError(f"expected a run folder or a file, got {value!r}")
        return value


def _named(value: Any) -> Any:
    """A text alone is the source."""
    return {"from": value} if isinstance(value, str) else value


InitFrom: TypeAlias = Annotated[InitFromConfig, BeforeValidator(_named)]


class TrainingConfig(Section):
    """How the model learns."""

    policy: Annotated[PolicyConfig, POLICIES] = Field(default_factory=default_policy)
    optimizer: OptimizerConfig = Field(default_factory=SgdConfig)
    tables: ByPattern[TableConfig] = Field(default_factory=dict)
    """settings of tables, by a regular expression that is found in their names (re.search): the first one counts"""
    reduction: Literal["mean", "sum"] = "mean"
    """mean: step on the mean gradient of an update's samples; sum: on the sum, as the paper writes it"""
    clip_norm: PositiveFloat | None = None
    """maximum norm of an update's gradient; a longer gradient is scaled down"""
    clip_value: PositiveFloat | None = None
    """largest absolute value of a number of an update's gradient; a larger one becomes this one"""
    schedule: Annotated[list[SchedulePart], BeforeValidator(_as_list)] = Field(default_factory=list)
    """learning rates by update: one class, or several that follow each other (docs/guide/model.md); default: those of
    the optimizer"""
    ema: EmaConfig | None = None
    guard: GuardConfig = Field(default_factory=GuardConfig)
    precision: Literal["float32", "bf16"] = "float32"
    """of forward and backward passes: bf16 is torch.autocast; parameters and gradients stay float32"""
    init_from: InitFrom | None = None
    """the weights that a new job begins with: a run, `RUN@VERSION`, or a file, alone or as the section says
    [those that the task draws]"""

    @property
    def evaluates_average(self) -> bool:
        """Whether held-out evaluation measures the average of the weights, and not these."""
        return self.ema is not None and self.ema.evaluate

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.clip_norm is not None and self.clip_value is not None:
            raise ValueError("clip_value: expected either clip_norm or clip_value, got both: remove one")
        for number, part in enumerate(self.schedule):
            is_last = number == len(self.schedule) - 1
            if is_last and part.updates is not None:
                raise ValueError(f"schedule: expected no updates in its last part, got {part.updates}: it goes on")
            if not is_last and part.updates is None:
                raise ValueError(f"schedule: expected `updates` in part {number} ({part.cls}): another part follows it")
        return self


class StopConfig(Section):
    """The job ends when the first of these conditions is met; without any, it runs until it is stopped."""

    updates: PositiveInt | None = None
    """model updates; one without a usable sample does not count"""
    samples: PositiveInt | None = None
    """samples applied"""
    seconds: PositiveFloat | None = Field(default=None, ge=0.001, le=LONGEST_S)
    """wall-clock seconds since the first update of the job that has learned a sample"""
    accuracy: float | None = Field(default=None, gt=0, le=1)
    """held-out accuracy reached"""
    loss: float | None = None
    """held-out loss reached (at or below)"""
