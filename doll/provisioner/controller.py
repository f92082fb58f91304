"""The provisioner's loop, one turn at a time: observe, plan, reconcile, apply. It has no clock and no thread.

A turn has these effects, in this order: 1. list the fleet; 2. add ended instances to the bill; 3. write each
termination to the journal, then end the instance; 4. write orders to the journal and save the state; 5. make the
orders, one by one; 6. save the state. After a crash between two steps, the next turn continues. The fleet's tags show
which instances exist. An order that may have been made is repeated unchanged, which returns the same instance. Ending
an instance twice is no error.

While this process is frozen, another process may make the next turn. The successor takes over the state, so steps 4 and
6 of this process fail. This process also checks the lease before each termination and order of steps 3 and 5. If a
check fails, this process ends the instances that it has launched since the previous check and that the successor does
not know.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from doll import telemetry
from doll.provisioner import reconcilers
from doll.provisioner.apply import ActionExecutor
from doll.provisioner.billing import BillingRule
from doll.provisioner.decision import Decision
from doll.provisioner.fleets.port import Fleet, SpotProbe
from doll.provisioner.job_state import JobState
from doll.provisioner.observation import Observed
from doll.provisioner.prices.port import PriceFeed
from doll.provisioner.scale_in import release_request
from doll.provisioner.settings import ControllerSettings
from doll.provisioner.state_store import StateStore
from doll.provisioner.turn import Reconciler, Turn
from doll.records import control as records

log = telemetry.get_logger(__name__)


class Controller:
    """The provisioner of one job.

    Call `turn` at least every `settings.planner.replan_s` seconds, and pass the job's records to `observed.feed` in
    between. A new object continues from the state in the state store.

    Args:
        billing: billing rule of the owner of the fleet's machines.
        probe: function that returns whether spot has a machine, without launching one. None: the outcomes of launches
            show this.
        check_lease: function that raises FencedError if another provisioner has taken over.
        dry_run: whether to decide and report without changing or saving anything.
        job, topics_id: name of the job and id of its topics; "": not known. Machines that another job has left in this
            fleet are ended. A saved state of earlier topics with the same names is ignored.

    Attributes:
        state: state of the job, which is saved. It has the caller's `positions` in the topics that it reads.
    """

    def __init__(
        self, settings: ControllerSettings, fleet: Fleet, prices: PriceFeed, billing: BillingRule,
        state_store: StateStore, *, probe: SpotProbe | None = None, check_lease: Callable[[], None] = lambda: None,
        dry_run: bool = False, job: str = "", topics_id: str = "",
    ) -> None:  # fmt: skip
        new = partial(JobState, settings, billing, prices, probe, dry_run=dry_run)
        self.state, kept = new(name=job, topics_id=topics_id), state_store.load()
        try:
            if kept is not None:
                self.state.restore(kept)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as exc:
            log.warning("provision_state_invalid", error=f"{type(exc).__name__}: {exc}", action="from tags and topics")
            self.state = new(name=self.state.name, topics_id=self.state.topics_id)
        self._executor = ActionExecutor(self.state, fleet, state_store, check_lease)
        # The fleet is observed first. A run begins before its instances are billed, so that it has its own bill. Bill
        # and health decide whether machines are wanted, scale-in decides for which slots, and the plan decides where.
        # The decision states what was done, so it is recorded last; orders are saved before they are made. All that a
        # successor needs is in the state, so it may start between any two steps.
        self._reconcilers: tuple[Reconciler, ...] = (
            reconcilers.FleetListing().reconcile,
            partial(reconcilers.read_prices, prices=prices),  # without a listing or prices, the turn ends here
            reconcilers.end_others,
            reconcilers.begin_run,
            reconcilers.follow_instances,
            reconcilers.bill_instances,
            reconcilers.review_health,
            reconcilers.update_estimates,
            reconcilers.review_pause,
            reconcilers.review_workers,
            reconcilers.change_fleet,
            reconcilers.stop_launches,
            reconcilers.raise_alarms,
            reconcilers.record_decision,
        )

    @property
    def observed(self) -> Observed:
        """The knowledge from the job's records so far."""
        return self.state.observed

    def retarget(self, settings: ControllerSettings) -> None:
        """Change deadline, budget, work, K or behaviour while the job runs; the initial rates and availability are
        ignored. Raises ValueError if slots, b or machines per worker differ, because these never change."""
        state = self.state
        state.settings.check_change(settings)
        state.settings = settings
        state.plan.retarget(settings)
        state.launch_state.limits, self.observed.heartbeat_timeout_s = settings.limits, settings.heartbeat_timeout_s
        self.observed.keeps_losses = settings.scale_in is not None

    def release_request(self, decision: Decision) -> records.Scale | None:
        """Return the request to the parameter server that follows from this decision; None if there is none."""
        if self.state.dry_run or decision.phase != "run":
            return None
        return release_request(decision.released, self.observed.status)

    def turn(self, now_s: float, *, draining: bool = False) -> Decision:
        """Make one decision and carry it out. If `draining`, end every instance and launch none.

        Raises:
            FencedError: another provisioner has taken over. Nothing was changed after the takeover.
            ConfigError, CheckpointError: the state or the journal cannot be written.
        """
        self.state.turn += 1
        phase, why = self.state.phase(draining=draining)
        turn = Turn(self.state, self._executor, now_s, phase, why, self.state.billing.last_bill())
        decisions = (reconcile(turn) for reconcile in self._reconcilers)
        return next(decision for decision in decisions if decision is not None)
