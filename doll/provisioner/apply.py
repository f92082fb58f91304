"""The apply step of a turn: end and launch instances, and write each action to the journal before it is done."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
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


class ActionExecutor:
    """Carries actions out on a fleet.

    Args:
        save: persists the provisioner's state; "", or why it is not persisted. Pending orders must be durable before
            they are made.
        check_lease: raises FencedError where another provisioner has taken over, CheckpointError where that is not
            known. It is asked before each order, however long ago the turn began: this process may have been frozen.
        known_to_successor: ids of the instances in the state that a successor has saved.
    """

    def __init__(
        self,
        fleet: Fleet,
        launch_state: LaunchState,
        tracker: InstanceTracker,
        *,
        journal: Journal,
        save: Callable[[], str],
        check_lease: Callable[[], None],
        known_to_successor: Callable[[], Collection[str]],
    ) -> None:
        self._fleet = fleet
        self._launch_state = launch_state
        self._tracker = tracker
        self._journal = journal
        self._save = save
        self._check_lease = check_lease
        self._known_to_successor = known_to_successor
        self._unconfirmed: list[Instance] = []  # launched since the lease was last known to be ours

    def confirm(self) -> None:
        """What was launched until now was launched under the lease."""
        self._unconfirmed.clear()

    def undo(self) -> None:
        """Another provisioner has taken over: end what this one may have launched after that.

        A process can be frozen between its look at the lease and its order. The successor ends such a machine, or keeps
        it, where it lists it; but it may have ended the job by then, and nobody would.
        """
        if not self._unconfirmed:
            return
        try:
            known = self._known_to_successor()
            ids = [instance.id for instance in self._unconfirmed if instance.id not in known]
            if ids:
                log.warning("launched_too_late", instances=ids, action="ended: another provisioner has taken over")
                self._fleet.terminate(ids)
        except (CheckpointError, ConfigError, ServiceUnavailableError) as exc:
            log.warning("not_ended", instances=[item.id for item in self._unconfirmed], error=str(exc))
        self._unconfirmed.clear()

    def _lease_problem(self) -> str:
        """ "", or why an order is not made now; raises FencedError where the lease is another's."""
        try:
            self._check_lease()
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
                self._launch_state.ordered(order, now_s, fallback=order.market == "on_demand" and order.slot in on_spot)
                self._journal("order", now_s, **order_fields(launch))
            if problem := self._save():
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
        timeout_s = self._launch_state.limits.notice_timeout_s
        endable = [
            instance
            for instance in others
            if instance.is_endable and (instance.notice_s is None or now_s > instance.notice_s + timeout_s)
        ]
        if not endable or dry_run:
            return
        for instance in endable:
            why = f"it is of another job: {instance.job}"
            self._journal("end", now_s, id=instance.id, slot=instance.slot, why=why)
        try:
            if problem := self._lease_problem():
                raise ServiceUnavailableError(problem)
            self._fleet.terminate([instance.id for instance in endable])
        except (ConfigError, ServiceUnavailableError) as exc:
            alarms.append(f"machines of another job could not be ended: {exc}")

    def clear_away(self, ended: Sequence[Instance], *, dry_run: bool) -> None:
        """The job is over: what the fleet's owner keeps of these ended instances goes."""
        if not ended or dry_run:
            return
        try:
            if problem := self._lease_problem():
                raise ServiceUnavailableError(problem)
            self._fleet.terminate([instance.id for instance in ended])
        except (ConfigError, ServiceUnavailableError) as exc:
            log.warning("ended_instances_not_cleared", error=str(exc), action="nothing runs; their owner keeps them")

    def _terminate(self, ends: Sequence[Terminate], instances: list[Instance], now_s: float) -> list[ActionResult]:
        for end in ends:
            self._journal("end", now_s, id=end.id, slot=end.slot, why=end.why)
        ids = [end.id for end in ends]
        if problem := self._lease_problem():
            return [ActionResult(end, problem) for end in ends]
        try:
            self._fleet.terminate(ids)
        except (ConfigError, ServiceUnavailableError) as exc:
            return [ActionResult(end, str(exc)) for end in ends]
        instances[:] = [
            replace(instance, state=InstanceState.ENDING) if instance.id in ids else instance for instance in instances
        ]
        return [ActionResult(end) for end in ends]

    def _launch(self, launch: Launch, instances: list[Instance], now_s: float) -> ActionResult:
        order, launch_state = launch.order, self._launch_state
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
            instance = self._fleet.launch(order)
        except LaunchError as exc:
            launch_state.failed(order, exc, now_s)
            fields = order_fields(launch)
            self._journal("launch_failed", now_s, **fields, failure=exc.failure.value, code=exc.code, error=str(exc))
            return ActionResult(launch, f"{exc.failure.value}: {exc}")
        self._unconfirmed.append(instance)
        self._tracker.launched(instance)
        if instance.id not in {known.id for known in instances}:
            instances.append(instance)
        launch_state.launched(order)
        launch_state.seen(order.slot, order.incarnation)
        self._journal("launched", now_s, **order_fields(launch), id=instance.id, pool=instance.pool)
        return ActionResult(launch, id=instance.id)
