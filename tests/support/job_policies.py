"""Every policy, as `training.policy` of the small jobs of integration tests."""

from __future__ import annotations

from typing import Final

POLICIES: Final = [
    "{name: asp}",
    "{name: doll, group_size: 2}",
    "{name: bsp}",
    "{name: ssp, staleness: 2}",
    "{name: essp, staleness: 2}",
    "{name: vap, value_bound: 5}",
    "{name: isp}",
    "{name: wsp, wave_batches: 2, clock_distance: 2}",
    "{name: diloco, local_batches: 2, grace_s: 0.2}",
]
