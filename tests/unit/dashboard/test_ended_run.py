"""The page of a run that has ended shows what the page of the running job showed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from doll.config import load
from doll.dashboard.ended_run import ended_run
from doll.dashboard.sources import EndedRun, RunningJob
from doll.errors import ConfigError
from doll.monitor.views.page import page
from doll.monitor.views.page_details import detail
from doll.process.files import write_json
from doll.records.control import Finished
from doll.storage.checkpoints import Checkpoint
from doll.storage.stores import open_store
from page_feed import MadeUpJob, leave_run


@pytest.fixture
def made_up() -> MadeUpJob:
    """A job that has ended after a minute."""
    made_up = MadeUpJob()
    made_up.run(59)
    made_up.refuse(7, "no JSON")
    made_up.kill(3)
    made_up.run(1)
    made_up.status(dead_reasons=(("no JSON", 1),))
    made_up.feed(Finished(term=1, version=240, reason="samples: 30720 reached", time_s=made_up.now_s))
    return made_up


@pytest.fixture
def folder(made_up: MadeUpJob, tmp_path: Path) -> Path:
    """The folder that `doll up` would leave."""
    leave_run(made_up, tmp_path, restarts={"worker-3": 1, "kafka": 2})
    return tmp_path


def test_the_page_of_a_folder_is_that_of_the_job(made_up: MadeUpJob, folder: Path) -> None:
    live, past = made_up.read(page), page(ended_run(made_up.config, folder))
    assert past["job"] == live["job"]
    for name in ("learning", "work"):
        assert past["questions"][name]["verdict"] == live["questions"][name]["verdict"]
    for name in ("target", "held-out accuracy", "prequential loss"):
        assert dict(past["questions"]["learning"]["facts"])[name] == dict(live["questions"]["learning"]["facts"])[name]
    for name in ("staleness", "sent", "stability margin"):
        assert dict(past["questions"]["work"]["facts"])[name] == dict(live["questions"]["work"]["facts"])[name]
    assert past["curves"]["accuracy"]["held_out"].keys() == live["curves"]["accuracy"]["held_out"].keys()
    assert past["curves"]["samples"] == live["curves"]["samples"]
    assert past["lists"]["versions"] == {
        version: [*row[:2], "durable"] for version, row in live["lists"]["versions"].items()
    }
    assert past["workers"]["3"]["state"] == "gone"
    assert past["workers"]["2"]["market"] == "spot"
    facts = dict(past["questions"]["safety"]["facts"])
    assert (facts["restarts"], facts["dead letters"]) == (
        "workers 1, parameter server 0, kafka 2",
        "1 dead letter: no JSON",
    )


def test_records_of_a_folder_open(made_up: MadeUpJob, folder: Path) -> None:
    state = ended_run(made_up.config, folder)
    letter = detail(state, "letter", [0, 7])
    assert letter is not None
    assert dict(letter["facts"])["content"] == '{"x": 1}'
    update = detail(state, "update", [200])
    assert update is not None
    assert dict(update["facts"])["samples"] == "128"
    assert update == made_up.read(lambda live: detail(live, "update", [200]))
    worker = detail(state, "worker", [2])
    assert worker is not None
    assert worker["rows"][0][0] == "2"
    old = detail(state, "update", [3])
    assert old is not None
    assert dict(old["facts"])["offsets"].startswith(f"in the topic {made_up.config.topic('updates')};")


def test_a_run_that_was_killed_is_shown_as_far_as_it_came(made_up: MadeUpJob, folder: Path) -> None:
    (folder / "report.json").unlink()
    (folder / "dead.json").unlink()
    shown = page(ended_run(made_up.config, folder))
    assert shown["job"]["state"] == "not running"
    assert shown["questions"]["safety"]["verdict"].startswith("no report: this run was killed")
    assert shown["curves"]["samples"]


def test_an_empty_folder_is_shown_as_empty(made_up: MadeUpJob, tmp_path: Path) -> None:
    learning = page(ended_run(made_up.config, tmp_path))["questions"]["learning"]
    assert learning["verdict"] == "not known: no report: this run was killed, or its Kafka does not answer"


@pytest.mark.parametrize(
    "change",
    [{"events": 7}, {"measures": {"staleness": 1}}, {"worker_lines": [{"worker": {}}, 3]}, {"dead_reasons": [1]}],
)
def test_a_report_of_another_release_is_refused(made_up: MadeUpJob, folder: Path, change: dict[str, object]) -> None:
    report = json.loads((folder / "report.json").read_text())
    write_json(folder / "report.json", {**report, **change})
    with pytest.raises(ConfigError, match=r"report\.json: expected a report of this release"):
        ended_run(made_up.config, folder)


def test_decisions_come_from_the_journal(made_up: MadeUpJob, folder: Path) -> None:
    decision = {
        "kind": "decision", "turn": 4, "time_s": 1.0, "elapsed_s": 30.0, "phase": "run", "binding": "guard",
        "feasible": True,
        "markets": ["spot"], "reasons": {"why": "0"}, "actions": ["slot 0: wait: spot is down"], "alarms": [],
        "spent_usd": 0.5, "all_on_demand_usd": 1.0,
    }  # fmt: skip
    lines = ["not json", json.dumps(decision), json.dumps({"kind": "order"}), json.dumps(decision)[:20]]
    (folder / "provision-clicks.jsonl").write_text("\n".join(lines))
    state = ended_run(made_up.config, folder)
    assert page(state)["lists"]["decisions"] == {"4": ["30 s", "slot 0: wait: spot is down"]}
    bars = {bar["label"]: bar for bar in page(state)["questions"]["progress"]["bars"]}
    assert bars["cost"]["text"] == "0.50 USD, 50 % of 1.00 all on-demand"


def _checkpoint(term: int, version: int) -> Checkpoint:
    tensors = {"weights": np.zeros(2, np.float32)}
    return Checkpoint(job="clicks", fingerprint="f1", term=term, version=version, state=b"", tensors=tensors)


def test_a_version_has_its_names_and_says_whether_it_is_kept(made_up: MadeUpJob, folder: Path) -> None:
    store = open_store(load(folder / "job.yaml"), folder)
    term = store.claim_term()
    for version in (232, 236):
        store.save(_checkpoint(term, version))
    store.change_marks(lambda marks: marks.with_pin(232).with_alias("stable", 232))
    source = EndedRun(made_up.config, folder)
    kept = source.kept_versions()
    shown = source.read(lambda state: [detail(replace(state, kept=kept), "version", [v]) for v in (232, 236, 240)])
    facts = [dict(item["facts"]) for item in shown if item is not None]
    assert [item["kept"] for item in facts] == ["yes, pinned", "yes", "not any more"]
    assert [item.get("aliases") for item in facts] == ["stable", None, None]


def test_a_page_that_was_opened_while_the_run_went_on_shows_its_end(made_up: MadeUpJob, folder: Path) -> None:
    """Its broker is gone by then. A run that is resumed goes on, and its page says so."""
    source = RunningJob(made_up.config, folder)
    report = (folder / "report.json").rename(folder / "report.previous.json")
    assert source.read(page)["questions"]["safety"]["verdict"] == "reading the history of the job"
    audit = {"ok": True, "applied": 30_720, "pending": 0, "missing": 0, "duplicate": 0}
    write_json(folder / "report.json", {**json.loads(report.read_text()), "audit": audit})
    shown = source.read(page)
    assert shown["job"]["state"] == "ended: samples: 30720 reached"
    assert shown["questions"]["safety"]["verdict"] == "yes, but 1 record could not be learned"
    assert dict(shown["questions"]["safety"]["facts"])["audit"].startswith("30,720 applied once")
    past = EndedRun(made_up.config, folder)
    write_json(folder / "report.json", {**json.loads(report.read_text()), "audit": {**audit, "ok": False}})
    assert past.read(page)["questions"]["safety"]["tone"] == "bad"
    (folder / "report.json").unlink()
    assert past.read(page)["questions"]["safety"]["verdict"].startswith("this run goes on")
    assert source.read(page)["questions"]["safety"]["verdict"] == "reading the history of the job"
