"""The apply step of a turn: end and launch instances, and write each action to the journal before it is done."""

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
    """Appends an entry to the provisioner's journal."""

    def __call__(self, kind: str, now_s: float, **fields: Any) -> None: ...


@dataclass(eq=False, repr=False)
class ActionExecutor:
    """Carries actions out on a fleet.

    Args:
        save: persists the state, pending orders above all; returns why that failed, or "".
        check_lease: asked before each order, since this process may have been frozen. Raises FencedError if another
            provisioner has taken over, CheckpointError if that is not known.
        known_to_successor: ids of the instances in the state that a successor has saved.
    """

    fleet: Fleet
    launch_state: LaunchState
    tracker: InstanceTracker
    _: KW_ONLY
    journal: Journal
    save: Callable[[], str]
    check_lease: Callable[[], None]
    known_to_successor: Callable[[], Collection[str]]
    _unconfirmed: list[Instance] = field(default_factory=list, init=False)  # launched since the lease was known as ours

    def confirm(self) -> None:
        """Record that everything launched until now was launched under the lease."""
        self._unconfirmed.clear()

    def undo(self) -> None:
        """End what was launched after another provisioner took over: this process may have been frozen between its look
        at the lease and its order. The successor may have ended the job by then, so nobody else would."""
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
        """Return why an order is not made now, or "". Raises FencedError if the lease is another's."""
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
        """Carry out the ends, then the launches; `instances` is brought up to date."""
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
                # The orders stay pending, as some may be repetitions: the next turn makes them.
                return [*results, *(ActionResult(launch, f"not tried: {problem}") for launch in launches)]
            results += [self._launch(launch, instances, now_s) for launch in launches]
        return results

    def end_others(self, others: Sequence[Instance], now_s: float, alarms: list[str], *, dry_run: bool) -> None:
        """End instances that another job has left in this job's fleet."""
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
        """Have the fleet's owner drop what it keeps of these ended instances: the job is over."""
        if not ended or dry_run:
            return
        if problem := self._end([instance.id for instance in ended]):
            log.warning("ended_instances_not_cleared", error=problem, action="nothing runs; their owner keeps them")

    def _end(self, ids: Sequence[str]) -> str:
        """Ask the fleet to end these instances; returns why that failed, or ""."""
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
            if launch_state.pending[order.slot][1] == now_s:  # else it may have been made before
                launch_state.cancelled(order)
            return ActionResult(launch, f"not tried: {launch_state.refusal(order.market)}")
        if problem := self._lease_problem():
            return ActionResult(launch, problem)  # it stays pending, as it may be a repetition
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
