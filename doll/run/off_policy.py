"""`doll versions value`: the mean reward if a version had chosen, estimated from the log of served choices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import torch

from doll.errors import ConfigError, RetryLater, SampleError, SkipRecord
from doll.evaluation.heldout import HeldOut
from doll.evaluation.live_records import LiveRecords
from doll.evaluation.stored_weights import newest_weights
from doll.model.flat_model import FlatModel, build
from doll.records.bounded import short
from doll.run.status import reachable_kafka
from doll.run.target import Target
from doll.serving.answer_log import SERVED_FIELD
from doll.storage.checkpoints import resolve_version
from doll.storage.stores import open_store
from doll.task.base import Sample, Task, load_task
from doll.task.batches import SampleBatch, batch_of
from doll.task.records import Record
from doll.theory.checks import Floats
from doll.theory.off_policy import (
    Choices,
    PolicyValue,
    doubly_robust,
    inverse_propensity,
    probabilities_of,
    self_normalized,
)

_MOST_NAMED: Final = 3  # reasons for records that are left out


@dataclass(frozen=True, kw_only=True)
class VersionValue:
    """The mean reward that is estimated for a version, had it chosen.

    Attributes:
        estimates: by the name of the estimator: `ips`, `snips`, and `dr` if the task predicts rewards.
    """

    version: int
    estimates: dict[str, PolicyValue]


@dataclass(frozen=True, kw_only=True)
class OffPolicyReport:
    """The values of versions, from one log.

    Attributes:
        logged: mean reward of what was served.
        choices: number of logged choices.
        left_out: reason -> number of records that have no choice or no reward.
    """

    logged: float
    choices: int
    left_out: dict[str, int]
    versions: list[VersionValue]

    def text(self) -> str:
        lines = [f"served: mean reward {self.logged:.4g} of {self.choices:,} logged choices"]
        for item in self.versions:
            for name, value in item.estimates.items():
                lines.append(
                    f"version {item.version}: {value.mean:.4g} ({value.low:.4g} to {value.high:.4g}) by {name}, "
                    f"{value.effective:,.0f} effective choices"
                )
        reasons = list(self.left_out.items())
        lines += [f"left out: {count:,} records: {reason}" for reason, count in reasons[:_MOST_NAMED]]
        if len(reasons) > _MOST_NAMED:
            lines.append(f"left out: {sum(count for _, count in reasons[_MOST_NAMED:]):,} records for other reasons")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        versions = [
            {"version": item.version, **{name: value._asdict() for name, value in item.estimates.items()}}
            for item in self.versions
        ]
        return {"logged": self.logged, "choices": self.choices, "left_out": self.left_out, "versions": versions}


class LoggedChoices:
    """Collects the choices in records, with their samples."""

    def __init__(self, task: Task, reward: str) -> None:
        self._task, self._reward = task, reward
        self._samples: list[Sample] = []
        self._choices: list[tuple[int, float, float]] = []
        self.left_out: Counter[str] = Counter()

    def add(self, record: Record) -> None:
        """Take a record that `doll serve --log-records` has written, or the same with a label by `data.join`."""
        try:
            choice, sample = self._choice(record.value), self._task.decode_record(record)
        except (SampleError, SkipRecord, RetryLater) as exc:
            self.left_out[short(str(exc))] += 1
        except Exception as exc:  # the user's code may raise anything
            self.left_out[short(f"{type(exc).__name__}: {exc}")] += 1
        else:
            if isinstance(sample, list):
                self.left_out["more than one sample in a record"] += 1
                return
            self._choices.append(choice)
            self._samples.append(sample)

    def _choice(self, value: bytes) -> tuple[int, float, float]:
        try:
            fields = msgspec.json.decode(value, type=dict[str, Any])
            answer, reward = fields[SERVED_FIELD]["answer"], fields[self._reward]
            action, probability = answer["action"], answer["probability"]
        except (msgspec.MsgspecError, KeyError, TypeError, UnicodeDecodeError, RecursionError) as exc:
            what = f"{SERVED_FIELD}.answer with action and probability, and {self._reward}"
            raise SampleError(f"expected a JSON object with {what}") from exc
        numbers = (action, probability, reward)
        if type(action) is not int or not all(type(number) in (int, float, bool) for number in numbers):
            raise SampleError("expected an action that is an integer, and numbers as its probability and reward")
        return action, float(probability), float(reward)

    def together(self) -> tuple[Choices, SampleBatch]:
        """Return what was collected.

        Raises:
            ConfigError: there is no choice.
        """
        if not self._choices:
            reason = next(iter(self.left_out), "the topic has no records")
            raise ConfigError(f"no logged choice in {sum(self.left_out.values()):,} records: {reason}")
        actions, probabilities, rewards = zip(*self._choices, strict=True)
        choices = Choices(np.array(actions, np.int64), np.array(probabilities), np.array(rewards))
        return choices, batch_of(self._task, self._samples)


def value_of_versions(target: Target, wanted: Sequence[str], *, reward: str, most: int) -> OffPolicyReport:
    """Estimate the value of versions from the newest records of the job's samples topic.

    Args:
        reward: field of a record with its reward.
        most: largest number of records.

    Raises:
        VersionUnknownError: a version is not kept.
        ConfigError: the records have no choices, or the task does not choose.
        ServiceUnavailableError: Kafka does not answer.
    """
    torch.set_num_threads(1)
    target, services = reachable_kafka(target)
    config, store = target.config, open_store(target.config, target.run.path)
    versions = [resolve_version(store, name) for name in wanted]
    task = load_task(config)
    with closing(LiveRecords(config, services)) as records:
        raw = records.take_raw(most)
    logged = LoggedChoices(task, reward)
    for value in raw.values:
        if value is not None:
            logged.add(Record(value))
    choices, samples = logged.together()
    model = build(config, task)
    values = []
    for version in versions:
        stored = newest_weights(
            config, target.run.path, model, version=version, average=config.training.evaluates_average, in_place=True
        )
        assert stored is not None, "the version was resolved"
        stored.load_into(model)
        values.append(VersionValue(version=version, estimates=estimates(task, model, samples, choices)))
        model.restore_buffers()
    return OffPolicyReport(
        logged=float(choices.reward.mean()),
        choices=len(choices.action),
        left_out=dict(logged.left_out),
        versions=values,
    )


def estimates(task: Task, model: FlatModel, samples: SampleBatch, choices: Choices) -> dict[str, PolicyValue]:
    """Return the value of the model by each estimator.

    Raises:
        ConfigError: the task does not choose, or its code fails.
    """
    policy, predicted = list[Floats](), list[Floats]()
    try:
        for _, output in HeldOut(task, samples.num_samples, samples).outputs(model.module):
            if (chosen := task.choose(output)) is None:
                raise ConfigError(f"{type(task).__name__}.choose: expected the probability of each action, got None")
            policy.append(probabilities_of(chosen))
            if (values := task.action_values(output)) is not None:
                predicted.append(np.asarray(values, dtype=np.float64))
        of_all = np.concatenate(policy)
        result = {"ips": inverse_propensity(choices, of_all), "snips": self_normalized(choices, of_all)}
        if predicted:
            result["dr"] = doubly_robust(choices, of_all, np.concatenate(predicted))
    except ConfigError:
        raise
    except Exception as exc:  # the user's code may raise anything
        raise ConfigError(f"{type(task).__name__} does not choose: {type(exc).__name__}: {exc}") from exc
    return result
