"""Every policy, as `training.policy` of the small jobs of integration tests, and which of them meet what."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from fuzzing import ALL_EXAMPLES

POLICIES: Final = [
    "{name: asp}",
    "{name: doll, group_size: 2}",
    "{name: doll, group_size: 2, staleness: 2}",
    "{name: bsp}",
    "{name: ssp, staleness: 2}",
    "{name: essp, staleness: 2}",
    "{name: vap, value_bound: 5}",
    "{name: isp}",
    "{name: wsp, wave_batches: 2, clock_distance: 2}",
    "{name: diloco, local_batches: 2, grace_s: 0.2}",
]


def some(policies: Sequence[str], *names: str) -> list[str]:
    """The first one of each of these names; all of them in `make test-all`.

    In `make test` each policy meets some kinds of trouble, and each kind meets some policies of unlike families: groups
    of gradients (doll, bsp), steps one by one (asp, ssp, essp, vap), steps that are held back (isp), waves (wsp), and
    rounds (diloco).
    """
    if ALL_EXAMPLES:
        return list(policies)
    first = {re.findall(r"\w+", policy.removeprefix("{name: "))[0]: policy for policy in reversed(policies)}
    chosen = [policy for policy in policies if policy in (first.get(name) for name in names)]
    assert len(chosen) == len(names), (policies, names)
    return chosen
