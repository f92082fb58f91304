"""The provisioner's last decision, read from its journal and its state, and its text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from doll import telemetry
from doll.amounts import usd
from doll.errors import CheckpointError, ConfigError
from doll.provisioner.decision import Decision
from doll.provisioner.fleets.port import InstanceState
from doll.provisioner.state_store import FileStateStore, SharedStateStore
from doll.records.bounded import json_object

log = telemetry.get_logger(__name__)

_STATES: Final = {InstanceState.PENDING: "booting", InstanceState.ENDING: "terminating"}
_TAIL_BYTES: Final = 4_000_000  # lines are long; the newest decision is near the end


def last_decision(store: FileStateStore | SharedStateStore, start_command: str) -> dict[str, Any]:
    """Return the last decision from the journal, or from the state if it is newer, with the instances of the state.
    Raises ConfigError, which names `start_command`, if there is no decision yet."""
    try:
        state = store.load() or {}
    except CheckpointError as error:
        log.warning("provision_state_unreachable", error=str(error), action="from the journal of this machine")
        state = {}
    decision: dict[str, Any] | None = None
    placement: dict[str, int] | None = None
    try:
        with store.journal.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            for line in file.read().splitlines():
                try:
                    entry = json_object(line)
                except ValueError:
                    continue  # the first one is cut off by the seek, the last one perhaps by a crash
                if entry.get("kind") == "decision":
                    decision = entry
                elif entry.get("kind") == "placement":
                    placement = entry.get("scores")
    except OSError:
        pass
    saved = state.get("decision")
    if isinstance(saved, dict) and (decision is None or saved.get("time_s", 0.0) > decision.get("time_s", 0.0)):
        decision = saved  # the decision of a provisioner on another machine
    if decision is None:
        raise ConfigError(f"{store.journal}: no decision yet: start the provisioner with: {start_command}")
    instances = state.get("instances", {}).get("known", [])
    scores = {} if placement is None else {"placement_scores": placement}
    return {**decision, **scores, "instances": instances, "journal": str(store.journal)}


def decision_text(decision: Decision) -> str:
    """Return a decision as text for people."""
    instances = [{**asdict(instance), "state": instance.state.value} for instance in decision.instances]
    return _text({**decision.to_dict(), "instances": instances})


def status_text(decision: Mapping[str, Any], now_s: float) -> str:
    """Return the result of `last_decision` as text for people at this Unix time. Raises ConfigError if the journal has
    other content."""
    try:
        return f"last decision {age_text(now_s - decision['time_s'])} ago: {_text(decision)}"
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        journal = decision["journal"]
        raise ConfigError(
            f"{journal}: expected a decision of this release ({type(error).__name__}: {error})"
        ) from error


def _text(decision: Mapping[str, Any]) -> str:
    def money(name: str) -> str:
        value = decision.get(name)
        return "?" if value is None else usd(value)

    def number(name: str, form: str = ".4f", unit: str = "") -> str:
        value = decision.get(name)
        return "?" if value is None else f"{value:{form}}{unit}"

    # In updates too if the policy fixes the batches of an update.
    target_updates = decision.get("target_updates")
    updates = "" if target_updates is None else f" (updates {number('updates_done', 'g')} of {target_updates:g})"
    count = int(decision.get("machines_per_worker") or 1)
    per_worker = f" per worker of {count} machines" if count > 1 else ""
    lines = [
        f"{'dry run, ' if decision.get('dry_run') else ''}phase {decision['phase']}; binding constraint: "
        f"{decision['binding']}" + ("" if decision["feasible"] else "; the deadline cannot be met"),
        f"  clock    {number('elapsed_s', '.0f', ' s')}, samples {number('samples_done', '.0f')} of "
        f"{number('target_samples', '.0f')}{updates}, expected end {number('expected_finish_s', '.0f', ' s')}",
        f"  cost     {money('spent_usd')} USD ({money('spent_spot_usd')} spot, {money('spent_on_demand_usd')} "
        f"on-demand), expected {money('expected_cost_usd')}; all on-demand until now {money('all_on_demand_usd')}",
        f"           {money('usd_per_1000_updates')} USD per 1000 updates, {money('usd_per_error_point')} USD per "
        "point of error",
        f"  prices   {number('spot_usd_per_h')} spot, {number('on_demand_usd_per_h')} on-demand USD/h{per_worker}; "
        f"availability {number('availability', '.3f')}; {number('moves_total', '.0f')} moves, "
        f"{number('interruptions_total', '.0f')} interruptions",
    ]
    if scores := decision.get("placement_scores"):
        text = ", ".join(f"{zone} {score}" for zone, score in scores.items())
        lines.append(f"  zones    EC2's spot placement scores for all workers, of 10: {text}")
    lines += [f"  slots {slots}: {reason}" for reason, slots in decision["reasons"].items()]
    lines += _instance_lines(decision)
    lines += [f"  action: {action}" for action in decision["actions"]]
    lines += [f"  waiting: slots {slots}: {why}" for why, slots in decision["waits"].items()]
    lines += [f"  alarm: {alarm}" for alarm in decision["alarms"]]
    return "\n".join(lines)


def _instance_lines(decision: Mapping[str, Any]) -> list[str]:
    """Return lines with the wanted market and the machines of each slot."""
    wanted = {slot: market.replace("_", "-") or "none" for slot, market in enumerate(decision["markets"])}
    now_s, ready = decision["time_s"], decision["ready"]
    by_slot: dict[int, list[str]] = {}
    for instance in decision["instances"]:
        if instance["state"] != InstanceState.ENDED:
            text = instance_text(
                instance["market"], instance["incarnation"], InstanceState(instance["state"]),
                is_ready=instance["id"] in ready, has_notice=instance["notice_s"] is not None,
                age_s=now_s - instance["launched_s"],
            )  # fmt: skip
            by_slot.setdefault(instance["slot"], []).append(f"{text}, {instance['pool']}, {instance['id']}")
    lines = ["  slot  wanted     machines"] if by_slot else []
    for slot in sorted(by_slot):
        lines.append(f"  {slot:>4}  {wanted.get(slot, 'none'):<9}  {'; '.join(by_slot[slot])}")
    return lines


def instance_text(
    market: str, incarnation: int, state: InstanceState, *, is_ready: bool, has_notice: bool, age_s: float
) -> str:
    """Return a short text on a machine, such as `spot #2 ready, 35 s old` for the second machine of its slot."""
    if has_notice:
        shown = "interruption notice"
    elif state == InstanceState.RUNNING:
        shown = "ready" if is_ready else "worker not ready"
    else:
        shown = _STATES.get(state, state)
    return f"{market.replace('_', '-')} #{incarnation} {shown}, {age_text(age_s)} old"


def age_text(seconds: float) -> str:
    """Return an age as `35 s`, `12 min` or `3.5 h`."""
    seconds = max(0.0, seconds)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
