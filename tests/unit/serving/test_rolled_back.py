"""A model server beside a job that goes back to an earlier version: what was left is never called the newest."""

from __future__ import annotations

from pathlib import Path

import pytest
from doll.records.rollbacks import Rollback
from serving_rig import ServingRig
from waiting import until

pytestmark = pytest.mark.slow  # loads torch
BACK = Rollback(to=5, grid=0, version=10, term=2, skipped=True)


def test_a_checkpoint_of_a_rollback_takes_the_place_of_what_is_still_published(tmp_path: Path) -> None:
    with ServingRig(tmp_path) as rig:
        rig.save(5, samples=80)
        rig.start()
        rig.publish(9)
        until(lambda: rig.version() == 9, "version 9")
        # Nobody leads, and the store still has version 9.
        assert rig.store.claim_term() == 2
        rig.save(10, term=2, samples=80, rollbacks=[BACK])
        until(lambda: rig.version() == 10, "version 5 again, whose number is 10 now")
        facts = rig.infer()[1]["parameters"]
        assert (facts["term"], facts["samples_behind"]) == (2, None), "no record says how far the job is"
        assert "left_behind" not in facts
        rig.publish(9)  # of a server that has not noticed yet
        rig.publish(11, term=3)
        until(lambda: rig.version() == 11, "the version of the next server")


def test_a_name_of_a_version_that_was_left_says_so(tmp_path: Path) -> None:
    with ServingRig(tmp_path, wanted={"stable": 50.0, "latest": 50.0}) as rig:
        rig.save(5, samples=80)
        rig.save(9, samples=144)
        rig.store.change_marks(lambda marks: marks.with_alias("stable", 9))
        rig.start()
        assert "left_behind" not in rig.infer(version="stable")[1]["parameters"]
        rig.store.claim_term()
        rig.save(10, term=2, samples=80, rollbacks=[BACK])

        def facts() -> dict[str, object]:
            answer = rig.infer(version="stable")[1]
            return {"version": answer["model_version"], **answer["parameters"]}

        until(lambda: "left_behind" in facts(), "the rollback to be seen")
        assert facts()["version"] == "9", "an alias names what it names"
        assert facts()["left_behind"] == BACK.text()
        assert facts()["samples_behind"] is None, "it is of another line than the newest one"
        until(lambda: rig.infer(version="latest")[1]["model_version"] == "10", "the newest version")
        assert "left_behind" not in rig.infer(version="latest")[1]["parameters"]
        rig.store.change_marks(lambda marks: marks.with_alias("stable", 5))
        until(lambda: facts()["version"] == "5", "what the alias names now")
        assert "left_behind" not in facts(), "version 5 is in the newest one"
