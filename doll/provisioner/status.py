"""What the provisioner last decided, from its journal and state file, and as text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from doll.bounded import json_object
from doll.errors import ConfigError
from doll.provisioner.decision import Decision
from doll.provisioner.state_store import FileStateStore

_TAIL_BYTES: Final = 4_000_000  # lines are long; the newest decision is near the end


def last_decision(run_folder: Path, job: str, start_command: str) -> dict[str, Any]:
    """The last decision in the journal, with the instances of the state file.

    Args:
        start_command: what to run where nothing was decided yet.

    Raises:
        ConfigError: nothing was decided yet.
    """
    state_store = FileStateStore(run_folder, job)
    decision: dict[str, Any] | None = None
    placement: dict[str, int] | None = None
    try:
        with state_store.journal.open("rb") as file:
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
    if decision is None:
        raise ConfigError(f"{state_store.journal}: no decision yet: start the provisioner with: {start_command}")
    state = state_store.load() or {}
    scores = {} if placement is None else {"placement_scores": placement}
    return {**decision, **scores, "instances": state.get("known", []), "journal": str(state_store.journal)}


def decision_text(decision: Decision) -> str:
    """A decision for people."""
    instances = [
        {
            "slot": instance.slot, "incarnation": instance.incarnation, "market": instance.market, "id": instance.id,
            "pool": instance.pool, "state": instance.state.value, "ready": instance.id in decision.ready,
        }
        for instance in decision.instances
        if instance.ended_s is None
    ]  # fmt: skip
    return _text({**decision.to_dict(), "instances": instances})


def status_text(decision: Mapping[str, Any]) -> str:
    """What `last_decision` returned, for people.

    Raises:
        ConfigError: the journal holds something else.
    """
    try:
        return _text(decision)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        journal = decision["journal"]
        raise ConfigError(
            f"{journal}: expected a decision of this release ({type(error).__name__}: {error})"
        ) from error


def _text(decision: Mapping[str, Any]) -> str:
    def number(name: str, form: str = ".4f", unit: str = "") -> str:
        value = decision.get(name)
        return "?" if value is None else f"{value:{form}}{unit}"

    # In updates too where the policy fixes the batches of an update.
    target_updates = decision.get("target_updates")
    updates = "" if target_updates is None else f" (updates {number('updates_done', 'g')} of {target_updates:g})"
    lines = [
        f"{'dry run, ' if decision.get('dry_run') else ''}{decision['phase']}; binding constraint: "
        f"{decision['binding']}" + ("" if decision["feasible"] else "; the deadline cannot be met"),
        f"  clock    {number('elapsed_s', '.0f', ' s')}, samples {number('samples_done', '.0f')} of "
        f"{number('target_samples', '.0f')}{updates}, expected end {number('expected_finish_s', '.0f', ' s')}",
        f"  cost     {number('spent_usd')} USD ({number('spent_spot_usd')} spot, {number('spent_on_demand_usd')} "
        f"on-demand), expected {number('expected_cost_usd')}; all on-demand until now {number('all_on_demand_usd')}",
        f"           {number('usd_per_1000_updates')} USD per 1000 updates, {number('usd_per_error_point')} USD per "
        "point of error",
        f"  prices   {number('spot_usd_per_h')} spot, {number('on_demand_usd_per_h')} on-demand USD/h; availability "
        f"{number('availability', '.3f')}; {number('moves_total', '.0f')} moves, "
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
    """The instances of each slot."""
    markets = decision["markets"]
    by_slot: dict[int, list[dict[str, Any]]] = {}
    for instance in decision.get("instances", []):
        by_slot.setdefault(instance["slot"], []).append(instance)
    lines = ["  slot  wanted     instances"] if by_slot else []
    for slot in sorted(by_slot):
        wanted = markets[slot] if 0 <= slot < len(markets) else ""
        instances = ", ".join(
            f"{instance['id']} ({instance['market']}, incarnation {instance['incarnation']}, {instance['pool']}, "
            f"{instance['state']}{', ready' if instance.get('ready') else ''})"
            for instance in by_slot[slot]
        )
        lines.append(f"  {slot:>4}  {wanted or 'none':<9}  {instances}")
    return lines
