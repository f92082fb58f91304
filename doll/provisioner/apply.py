"""The effects of a turn: end and launch instances, write the journal, save the state. Each action is first written to
the journal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from doll import telemetry
from doll.errors import CheckpointError, ConfigError, FencedError, ServiceUnavailableError
from doll.provisioner.decision import ActionResult, order_fields
from doll.provisioner.fleets.port import Fleet, Instance, InstanceState, LaunchError
from doll.provisioner.job_state import JobState
from doll.provisioner.reconcile import FleetAction, Launch, Terminate, Wait
from doll.provisioner.state_store import StateStore

log = telemetry.get_logger(__name__)


@dataclass(eq=False, repr=False)
class ActionExecutor:
    """Carries out the effects of turns. A dry run has none.

    An error of the store is raised only before its first successful write; later errors count as temporary (for example
    a full disk). The job must not depend on the disk: machines are ended and the budget is kept even if journal lines
    are missing. Only launches require that the state is saved.

    Args:
        check_lease: function that is called before each order, because this process may have been frozen. It raises
            FencedError if another provisioner has taken over, and CheckpointError if it cannot determine this.

    Attributes:
        problem: reason why the last write failed, or "".
    """

    job: JobState
    fleet: Fleet
    store: StateStore
    check_lease: Callable[[], None]
    problem: str = field(default="", init=False)
    _has_written: bool = field(default=False, init=False)
    _unconfirmed: list[Instance] = field(default_factory=list, init=False)  # launched since the last check of the lease

    def journal(self, kind: str, now_s: float, **fields: Any) -> None:
        """Append an entry to the provisioner's journal."""
        if not self.job.dry_run:
            self._write(self.store.append, {"kind": kind, "turn": self.job.turn, "time_s": now_s, **fields})

    def _write(self, write: Callable[[Mapping[str, Any]], None], value: Mapping[str, Any]) -> None:
        try:
            write(value)
        except (ConfigError, CheckpointError) as exc:
            if not self._has_written:
                raise
            self.problem = str(exc)
        else:
            self._has_written, self.problem = True, ""

    def save(self) -> str:
        """Save the state, which includes pending orders. Returns the reason for a failure, or ""."""
        job = self.job
        if job.dry_run:
            return ""
        job.instances.forget_all_but(job.billing.billed)
        try:
            self._write(self.store.save, job.to_dict())
        except FencedError:
            self._undo()
            raise
        if not self.problem:
            self._unconfirmed.clear()
        return self.problem

    def _undo(self) -> None:
        """End the instances that were launched after another provisioner took over. This can happen if this process is
        frozen between its check of the lease and its order. The successor does not end these instances if it has
        already ended the job."""
        if not self._unconfirmed:
            return
        try:
            kept = self.store.load() or {}
            known = {instance["id"] for instance in kept["instances"]["known"]} if kept else set()
            ids = [instance.id for instance in self._unconfirmed if instance.id not in known]
            if ids:
                log.warning("launched_too_late", instances=ids, action="ended: another provisioner has taken over")
                self.fleet.terminate(ids)
        except (CheckpointError, ConfigError, ServiceUnavailableError) as exc:
            log.warning("not_ended", instances=[item.id for item in self._unconfirmed], error=str(exc))
        self._unconfirmed.clear()

    def _lease_problem(self) -> str:
        """Return why no order can be made, or "". Raises FencedError if another provisioner has the lease."""
        try:
            self.check_lease()
        except FencedError:
            self._undo()
            raise
        except CheckpointError as exc:
            return f"not tried: the lease does not answer: {exc}"
        self._unconfirmed.clear()
        return ""

    def apply(self, actions: Sequence[FleetAction], instances: list[Instance], now_s: float) -> list[ActionResult]:
        """Carry out the terminations, then the launches. `instances` is updated in place."""
        results: list[ActionResult] = [ActionResult(action) for action in actions if isinstance(action, Wait)]
        ends = [action for action in actions if isinstance(action, Terminate)]
        if ends:
            results += self._terminate(ends, instances, now_s)
        launches, launch_state = [action for action in actions if isinstance(action, Launch)], self.job.launch_state
        if launches:
            on_spot = {instance.slot for instance in instances if instance.is_alive and instance.market == "spot"}
            for launch in launches:
                order = launch.order
                launch_state.ordered(order, now_s, fallback=order.market == "on_demand" and order.slot in on_spot)
                self.journal("order", now_s, **order_fields(launch))
            if problem := self.save():
                # The orders stay pending, because some may be repetitions; the next turn makes them.
                return [*results, *(ActionResult(launch, f"not tried: {problem}") for launch in launches)]
            results += [self._launch(launch, instances, now_s) for launch in launches]
        return results

    def end(self, ids: Sequence[str]) -> str:
        """Ask the fleet to end these instances. Returns the reason for a failure, or ""."""
        if problem := self._lease_problem():
            return problem
        try:
            self.fleet.terminate(ids)
        except (ConfigError, ServiceUnavailableError) as exc:
            return str(exc)
        return ""

    def _terminate(self, ends: Sequence[Terminate], instances: list[Instance], now_s: float) -> list[ActionResult]:
        for end in ends:
            self.journal("end", now_s, id=end.id, slot=end.slot, why=end.why)
        ids = [end.id for end in ends]
        if problem := self.end(ids):
            return [ActionResult(end, problem) for end in ends]
        instances[:] = [
            replace(instance, state=InstanceState.ENDING) if instance.id in ids else instance for instance in instances
        ]
        return [ActionResult(end) for end in ends]

    def _launch(self, launch: Launch, instances: list[Instance], now_s: float) -> ActionResult:
        order, launch_state = launch.order, self.job.launch_state
        if launch_state.stopped:
            launch_state.cancelled(order)
            return ActionResult(launch, f"not tried: {launch_state.stopped}")
        if launch_state.is_paused(order.market, now_s):
            if launch_state.pending[order.slot][1] == now_s:  # otherwise it may have been made before
                launch_state.cancelled(order)
            return ActionResult(launch, f"not tried: {launch_state.refusal(order.market)}")
        if problem := self._lease_problem():
            return ActionResult(launch, problem)  # it stays pending, because it may be a repetition
        try:
            instance = self.fleet.launch(order)
        except LaunchError as exc:
            launch_state.failed(order, exc, now_s)
            fields = order_fields(launch)
            self.journal("launch_failed", now_s, **fields, failure=exc.failure.value, code=exc.code, error=str(exc))
            return ActionResult(launch, f"{exc.failure.value}: {exc}")
        self._unconfirmed.append(instance)
        self.job.instances.launched(instance)
        if instance.id not in {known.id for known in instances}:
            instances.append(instance)
        launch_state.launched(order)
        launch_state.seen(order.slot, order.incarnation)
        self.journal("launched", now_s, **order_fields(launch), id=instance.id, pool=instance.pool)
        return ActionResult(launch, id=instance.id)
