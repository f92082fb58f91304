"""When a worker's actor ends though nobody asks it to."""

from __future__ import annotations

from doll.provisioner.fleets.ray.host import ORPHAN_S, wait_until_orphaned
from fake_fleet import VirtualClock


def test_an_actor_is_an_orphan_an_hour_after_the_last_sign_that_it_could_read() -> None:
    clock = VirtualClock(0.0)
    renewed_until_s, away_s = 5 * 3600.0, (7_000.0, 30_000.0)

    def read() -> bytes | None:
        if away_s[0] <= clock() < away_s[1]:
            raise RuntimeError("the head is away")
        return str(min(clock(), renewed_until_s)).encode()

    wait_until_orphaned(read, sleep=clock.advance, clock=clock)
    assert away_s[1] + ORPHAN_S <= clock() <= away_s[1] + ORPHAN_S + 120, "five hours of silence of the head are none"


def test_an_actor_without_any_sign_is_an_orphan_too() -> None:
    clock = VirtualClock(0.0)
    wait_until_orphaned(lambda: None, sleep=clock.advance, clock=clock)
    assert ORPHAN_S <= clock() <= ORPHAN_S + 120
