"""The last step of a turn: end and launch instances. Each action is first written to the journal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Protocol

from doll import telemetry
from doll.errors import CheckpointError, ConfigError, FencedError, ServiceUnavailableError
from doll.provisioner.decision import ActionResult, order_fields
from doll.provisioner.fleets.port import Fleet, Instance, InstanceState, LaunchError
from doll.provisioner.instances import InstanceTracker
from doll.provisioner.launch_state import LaunchState
from doll.provisioner.reconcile import FleetAction, Launch, Terminate, Wait

log = telemetry.get_logger(__name__)


class Journal(Protocol):
    """A function that appends an entry to the provisioner's journal."""

    def __call__(self, kind: str, now_s: float, **fields: Any) -> None: ...


@dataclass(eq=False, repr=False)
class ActionExecutor:
    """Carries out actions on a fleet.

    Args:
        save: function that saves the state, which includes pending orders. It returns the reason for a failure, or "".
        check_lease: function that is called before each order, because this process may have been frozen. It raises
            FencedError if another provisioner has taken over, and CheckpointError if it cannot determine this.
        known_to_successor: function that returns the ids of the instances in the state that a successor has saved.
    """

    fleet: Fleet
    launch_state: LaunchState
    tracker: InstanceTracker
    _: KW_ONLY
    journal: Journal
    save: Callable[[], str]
    check_lease: Callable[[], None]
    known_to_successor: Callable[[], Collection[str]]
    _unconfirmed: list[Instance] = field(default_factory=list, init=False)  # launched since the last check of the lease

    def confirm(self) -> None:
        """Record that all instances launched so far were launched while this provisioner held the lease."""
        self._unconfirmed.clear()

    def undo(self) -> None:
        """End the instances that were launched after another provisioner took over. This can happen if this process is
        frozen between its check of the lease and its order. The successor does not end these instances if it has
        already ended the job."""
        if not self._unconfirmed:
            return
        try:
            known = self.known_to_successor()
            ids = [instance.id for instance in self._unconfirmed if instance.id not in known]
            if ids:
                log.warning("launched_too_late", instances=ids, action="ended: another provisioner has taken over")
                self.fleet.terminate(ids)
        except (CheckpointError, ConfigError, ServiceUnavailableError) as exc:
            log.warning("not_ended", instances=[item.id for item in self._unconfirmed], error=str(exc))
        self._unconfirmed.clear()

    def _lease_problem(self) -> str:
        """Return the reason why no order can be made, or "". Raises FencedError if another provisioner has the
        lease."""
        try:
            self.check_lease()
        except FencedError:
            self.undo()
            raise
        except CheckpointError as exc:
            return f"not tried: the lease does not answer: {exc}"
        self.confirm()
        return ""

    def apply(self, actions: Sequence[FleetAction], instances: list[Instance], now_s: float) -> list[ActionResult]:
        """Carry out the terminations, then the launches. `instances` is updated in place."""
        results: list[ActionResult] = [ActionResult(action) for action in actions if isinstance(action, Wait)]
        ends = [action for action in actions if isinstance(action, Terminate)]
        if ends:
            results += self._terminate(ends, instances, now_s)
        launches = [action for action in actions if isinstance(action, Launch)]
        if launches:
            on_spot = {instance.slot for instance in instances if instance.is_alive and instance.market == "spot"}
            for launch in launches:
                order = launch.order
                self.launch_state.ordered(order, now_s, fallback=order.market == "on_demand" and order.slot in on_spot)
                self.journal("order", now_s, **order_fields(launch))
            if problem := self.save():
                # The orders stay pending, because some may be repetitions; the next turn makes them.
                return [*results, *(ActionResult(launch, f"not tried: {problem}") for launch in launches)]
            results += [self._launch(launch, instances, now_s) for launch in launches]
        return results

    def end_others(self, others: Sequence[Instance], now_s: float, alarms: list[str], *, dry_run: bool) -> None:
        """End the instances that another job has left in this job's fleet."""
        if not others:
            return
        jobs = ", ".join(sorted({instance.job for instance in others}))
        alarms.append(f"{len(others)} machines of another job ({jobs}) are in this job's fleet: they are ended")
        timeout_s = self.launch_state.limits.notice_timeout_s
        endable = [
            instance
            for instance in others
            if instance.is_endable and (instance.notice_s is None or now_s > instance.notice_s + timeout_s)
        ]
        if not endable or dry_run:
            return
        for instance in endable:
            why = f"it is of another job: {instance.job}"
            self.journal("end", now_s, id=instance.id, slot=instance.slot, why=why)
        if problem := self._end([instance.id for instance in endable]):
            alarms.append(f"machines of another job could not be ended: {problem}")

    def clear_away(self, ended: Sequence[Instance], *, dry_run: bool) -> None:
        """Have the fleet remove its records of these ended instances, because the job is over."""
        if not ended or dry_run:
            return
        if problem := self._end([instance.id for instance in ended]):
            log.warning("ended_instances_not_cleared", error=problem, action="nothing runs; their owner keeps them")

    def _end(self, ids: Sequence[str]) -> str:
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
        if problem := self._end(ids):
            return [ActionResult(end, problem) for end in ends]
        instances[:] = [
            replace(instance, state=InstanceState.ENDING) if instance.id in ids else instance for instance in instances
        ]
        return [ActionResult(end) for end in ends]

    def _launch(self, launch: Launch, instances: list[Instance], now_s: float) -> ActionResult:
        order, launch_state = launch.order, self.launch_state
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
        self.tracker.launched(instance)
        if instance.id not in {known.id for known in instances}:
            instances.append(instance)
        launch_state.launched(order)
        launch_state.seen(order.slot, order.incarnation)
        self.journal("launched", now_s, **order_fields(launch), id=instance.id, pool=instance.pool)
        return ActionResult(launch, id=instance.id)
