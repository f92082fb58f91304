"""The preparation of a spot run: the job's market, its plan, and the predictions of a backtest of this market."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import numpy as np
from doll.amounts import duration, usd
from doll.config import JobConfig, ProcessesFleetConfig
from doll.errors import ConfigError
from doll.monitor.state.pilot_run import with_pilot
from doll.provisioner.launch_state import LaunchLimits
from doll.provisioner.planning.assessment import Assessment, assess, report_text
from doll.provisioner.planning.plan_request import plan_request
from doll.provisioner.planning.state import PlannerSettings
from doll.provisioner.settings import ControllerSettings, controller_settings
from doll.provisioner.traces.market import SpotMarket, make_market

from doll_lab.backtests.adaptive import ADAPTIVE
from doll_lab.spot.spot_history import Prediction
from doll_lab.spot.spot_prediction import predict, reference_policies

_UNBOUNDED: Final = 1_000_000


@dataclasses.dataclass(frozen=True)
class SpotRun:
    """A job, its market, and all facts that are known before the run.

    Attributes:
        predictions: predictions by policy; empty if the plan is not feasible.
    """

    market: SpotMarket
    fleet: ProcessesFleetConfig
    settings: ControllerSettings
    seed: int
    assessment: Assessment
    notes: list[str]
    predictions: dict[str, Prediction]

    @classmethod
    def of(cls, config: JobConfig, seed: int) -> SpotRun:
        """Build the market, plan, and predict.

        Raises:
            ConfigError: the job file lacks a key, or has keys that exclude each other.
        """
        fleet, plan = config.fleet, config.plan
        if not isinstance(fleet, ProcessesFleetConfig):
            raise ConfigError(f"fleet.kind: expected processes, the machines of `doll spot`, got {fleet.kind}")
        if plan.deadline_s is None or config.stop.updates is None:
            raise ConfigError("expected plan.deadline_s, and stop.updates: the work that is to be done by then")
        if config.source is None:
            raise ConfigError("source: expected one in the job file: the market opens when it starts")
        market, section = make_market(config, fleet, seed)
        section, pilot_notes = with_pilot(config, section)
        settings, _ = controller_settings(config.model_copy(update={"plan": section}))
        settings = dataclasses.replace(settings, limits=_unbounded(settings))
        request, notes = plan_request(config, section, config.worker_rates_per_s())
        if config.arrivals.while_down != "pause":
            notes.append(
                "arrivals.while_down is queue: samples that queue for a worker are read when it is back, so the job "
                "ends earlier and costs less than predicted"
            )
        assessment = assess(request)
        predictions = {}
        if assessment.problem is None:
            rates, leave_s = np.asarray(settings.rates_per_s), config.worker.drain_s
            for policy in (None, *reference_policies()):  # the planner, and policies that need no plan
                prediction = predict(market, settings.planner, rates, leave_s=leave_s, policy=policy)
                predictions[prediction.policy] = prediction
        return cls(market, fleet, settings, seed, assessment, [*pilot_notes, *notes], predictions)

    @property
    def planner(self) -> PlannerSettings:
        """The planner's settings in seconds of this machine, and in USD per hour of this machine's time."""
        return self.settings.planner

    @property
    def predicted(self) -> Prediction:
        """The prediction for the planner, which is the policy that runs."""
        return self.predictions[ADAPTIVE]

    def text(self) -> str:
        lines = [report_text(self.assessment, self.notes)]
        if self.predictions:
            prediction = self.predicted
            lines.append(
                f"Backtest of this market (seed {self.seed}): {usd(prediction.cost_usd)} USD, "
                f"{prediction.cost_usd / self.assessment.all_on_demand_usd:.1%} of on-demand, done at "
                f"{duration(prediction.finish_s)}, {prediction.moves} moves"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.assessment.to_dict(),
            "notes": self.notes,
            "market": self.market_facts(),
            "predictions": {name: dataclasses.asdict(prediction) for name, prediction in self.predictions.items()},
        }

    def market_facts(self) -> dict[str, Any]:
        """Return the main figures of the market."""
        market = self.market
        return {
            "name": market.name, "seed": self.seed, "alpha": market.alpha, "speed_up": market.speed_up,
            "notice_s": market.notice_s, "no_notice_share": self.fleet.no_notice_share, "boot_s": self.planner.boot_s,
            "machines_per_worker": market.machines_per_slot,
        }  # fmt: skip


def _unbounded(settings: ControllerSettings) -> LaunchLimits:
    """Return launch limits for a replayed market, where each turn tries a launch and gets the answer at once.

    With a limit per minute, the attempts of slots that wait for spot would use up the launches that other slots need to
    go to on-demand in time.
    """
    return dataclasses.replace(
        settings.limits, retry_s=settings.planner.replan_s, early_s=0.0, launches_per_min=_UNBOUNDED,
        fallbacks_per_min=_UNBOUNDED,
    )  # fmt: skip
