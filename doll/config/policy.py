"""`training.policy` of the job file: the section of the registered policy that it names."""

from __future__ import annotations

import importlib.metadata
import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from importlib.metadata import EntryPoint
from typing import Any, ClassVar, Final, Literal, NamedTuple

from pydantic import Field

from doll.config.section import Section
from doll.config.variants import Variants
from doll.errors import ConfigError

GROUP: Final = "doll.policies"


class OuterStep(NamedTuple):
    """The step that a server makes with the mean change of the workers' weights:
    `doll.optim.optimizer.OuterOptimizer`."""

    lr: float
    momentum: float  # Nesterov momentum
    age_discount: float  # factor of a change for each update after the weights it was computed on


class SparsePush(NamedTuple):
    """The part of a worker's change that a push sends, with the factor that it has in the model: `doll.optim.top_k`."""

    density: float  # share of the numbers of each chunk
    bits: int  # bits of each number: 2 or 32
    lr: float  # factor of the mean change of the workers

    def factor(self, num_workers: int) -> float:
        """Return the factor that a worker gives its change while `num_workers` workers are live."""
        return self.lr / max(1, num_workers)


class PolicyConfig(Section, ABC):
    """Base of every policy's section. The planner, the progress and the reports use its methods for predictions.

    Attributes:
        supports_tables: the policy's bounds also hold for rows that workers request individually.
    """

    supports_tables: ClassVar[bool] = True
    name: str

    @property
    def serial_updates(self) -> bool:
        """Whether the batches of an update are granted only after the update before it has been made, so that
        Proposition 1 of the DOLL paper holds with K = `batches_per_update`. Default: no."""
        return False

    def age_weight(self, age: int) -> float:
        """Return the weight of a gradient in its update, relative to the others: `age` updates were made since the
        version that it was computed on. Their mean is weighted, so the step is as long as without. Default: 1."""
        return 1.0

    @property
    def sends_steps(self) -> bool:
        """Whether workers run the optimizer and send the change of their weights, which the server adds. Default:
        workers send gradients, and the server runs the optimizer."""
        return False

    @property
    def publishes_deltas(self) -> bool:
        """Whether an update changes so few numbers that workers read only the changed numbers, and not the whole
        weights or rows. Default: no."""
        return False

    @property
    def outer_step(self) -> OuterStep | None:
        """The step that the server makes with the changes that workers send. None (the default): the server adds the
        changes. Only if `sends_steps`."""
        return None

    @property
    def batches_per_push(self) -> int:
        """How many consecutive batches a worker computes, each on the weights after its own previous steps, before it
        pushes them as one. Default: 1; more than 1 only if `sends_steps`. The pushes of a stream end after its batches
        k n - 1."""
        return 1

    @property
    def pushes_under_way(self) -> int:
        """How many batches of a worker, each in its own push, may be granted and not yet in the model. Default: 1."""
        return 1

    @property
    def filter_threshold(self) -> float:
        """v of the significance filter: a worker holds a change back while the change is at most v / sqrt(t) of the
        weight that it changes. t is the round: 1 for batches computed at version 0. Default: 0, everything is sent.
        Only if `sends_steps`."""
        return 0.0

    @property
    def sparse_push(self) -> SparsePush | None:
        """The part of its change that a worker sends with each push; it holds the rest back. None (the default): all of
        it. Only if `sends_steps` and without an `outer_step`."""
        return None

    @property
    def holds_back(self) -> bool:
        """Whether workers hold back parts of their steps, which are settled before their batches become durable, as
        `Policy.holds_back` tells the engine. Default: with a `sparse_push`."""
        return self.sparse_push is not None

    @property
    def averages_workers(self) -> bool:
        """Whether a contribution that a worker computes in parallel with others has the factor `share` in the model.
        Default: no, because an update is one step on the mean of all of its contributions."""
        return False

    @property
    def parallel_batches(self) -> int:
        """How many batches of one push a worker computes at the same time, each without the steps of the others.
        Default: 1, because the batches of a push are computed one after the other."""
        return 1

    def share(self, num_workers: int) -> float:
        """Return the factor of the step on one batch while `num_workers` workers are live. With it, the steps that all
        workers make in parallel move the model as far as one step on their mean.

        1 / P; in a pipeline, which computes N_m batches at the same time, 1 / (P N_m). 1 if the policy does not average
        its workers.
        """
        return 1 / (max(1, num_workers) * self.parallel_batches) if self.averages_workers else 1.0

    @abstractmethod
    def batches_per_update(self, num_workers: int) -> int:
        """Return K: how many batches one update takes while `num_workers` workers are live."""

    @abstractmethod
    def update_rate_per_s(self, rates_per_s: Sequence[float], batch_size: int) -> float:
        """Return λ_U, the updates per second while the workers keep up with the stream.

        Args:
            rates_per_s: shape (N,), samples per second of each live worker's stream; may be infinite.
            batch_size: b, samples per batch.
        """

    def shortfall_text(self, missing: int, *, live: int, workers: int, max_pending_batches: int) -> str:
        """Return why no update can be made, and what to do, if `missing` batches cannot come from the live workers."""
        return (
            f"no update can be made: {missing} batches more are needed than the {live} live workers of {workers} can "
            f"hold (worker.max_pending_batches {max_pending_batches}); start the missing workers, or restart with a "
            "larger worker.max_pending_batches or a smaller group"
        )


class ParallelConfig(PolicyConfig, ABC):
    """Base of the sections of policies under which the workers change the model in parallel, each by its own steps."""

    contributions: Literal["mean", "sum"] = Field(
        default="mean",
        description="mean: each worker's step is divided by the number of live workers (in a pipeline also by "
        "wave_batches), so that the same lr moves the model as far as under bsp; sum: the steps are added, as in the "
        "papers. The steps that a task computes itself are always added",
    )

    @property
    def averages_workers(self) -> bool:
        return self.contributions == "mean"


class _Policies(Variants):
    """The sections of all policies, by name, of DOLL and other distributions. A policy is imported only if it is used.

    A distribution registers a policy in its metadata:

        [project.entry-points."doll.policies"]
        theirs = "their_package.policy:SPEC"
    """

    built_in: Final = ("doll", "bsp", "asp", "ssp", "essp", "vap", "isp", "wsp", "diloco")

    @property
    def classes(self) -> dict[str, type[Section]]:
        """The sections of DOLL's own policies, which docs/configuration.md lists."""
        return {name: policy_section(name) for name in self.built_in}

    @cached_property
    def _entry_points(self) -> dict[str, list[EntryPoint]]:
        points = {name: [EntryPoint(name, f"doll.ps.policies.{name}:SPEC", GROUP)] for name in self.built_in}
        for point in importlib.metadata.entry_points(group=GROUP):
            points.setdefault(point.name, []).append(point)
        return points

    def names(self) -> tuple[str, ...]:
        """Return every registered name: DOLL's own first, then the others in alphabetical order."""
        return (*self.built_in, *sorted(self._entry_points.keys() - set(self.built_in)))

    def load(self, name: str) -> Any:
        """Return the `doll.ps.policies.PolicySpec` that is registered under `name`, without a check. Raise KeyError if
        the name is not registered, and ConfigError if two distributions register it or its import fails."""
        points = self._entry_points[name]
        if len(points) > 1:
            owners = " and ".join(sorted(map(_distribution, points)))
            raise ConfigError(
                f"{GROUP}: {name!r} is registered by {owners}: expected one; uninstall or rename the other"
            )
        try:
            return points[0].load()
        except Exception as exc:  # other people's code: whatever it raises at import
            raise ConfigError(
                f"cannot load {self.origin(name)}: {type(exc).__name__}: {exc}; update or uninstall this distribution"
            ) from exc

    def origin(self, name: str) -> str:
        """Return the origin of the policy, for messages: the distribution, and the value of the entry point."""
        point = self._entry_points[name][0]
        return f"{GROUP} entry point {name} = {point.value} of {_distribution(point)}"

    def refresh(self) -> None:
        """Forget the discovered policies, because distributions were installed or removed."""
        vars(self).pop("_entry_points", None)

    def validate(self, value: Any) -> Section:
        if isinstance(value, PolicyConfig):
            return value
        name = value.get(self.key, self.default) if isinstance(value, dict) else None
        names = self.names()
        if name not in names:
            raise self.unknown(names)
        try:
            section = policy_section(name)
        except ConfigError as exc:
            raise ValueError(str(exc)) from exc
        return section.model_validate({**value, self.key: name})


def _distribution(point: EntryPoint) -> str:
    return "doll" if point.dist is None else f"{point.dist.name} {point.dist.version}"


POLICIES: Final = _Policies("name", default="doll")


def policy_section(name: str) -> type[PolicyConfig]:
    """Return the section class of a registered policy. Raise KeyError if there is no such policy, and ConfigError if it
    cannot be loaded or is not a policy."""
    spec = POLICIES.load(name)
    section = getattr(spec, "config", None)
    if not (isinstance(section, type) and issubclass(section, PolicyConfig)) or getattr(spec, "name", None) != name:
        raise ConfigError(
            f"{POLICIES.origin(name)}: expected a doll.ps.policies.PolicySpec named {name!r}, got {spec!r:.200}"
        )
    if inspect.isabstract(section):
        missing = ", ".join(sorted(section.__abstractmethods__))
        raise ConfigError(f"{POLICIES.origin(name)}: expected {section.__name__} to define {missing}")
    return section


def default_policy() -> PolicyConfig:
    """Return the policy of a job file that does not name one."""
    return policy_section("doll")(name="doll")
