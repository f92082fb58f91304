"""`doll versions` on the folder of a run that has ended: what each version is, names, pins, and what is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import structlog
from commands import doll
from doll.config import load
from doll.config.fingerprint import make_fingerprint
from doll.model.layout import WeightsLayout
from doll.records.rollbacks import Rollback
from doll.storage.checkpoints import Checkpoint
from doll.storage.file_checkpoints import FileCheckpointStore

JOB = """
job: shop
task: {class: 'my_task.py:MyTask'}
data: {workers: 2, batch_size: 8}
source: {kind: python, of: examples.synthetic.source:gaussians}
training: {policy: {name: doll, group_size: 2}, optimizer: {name: sgd, lr: 0.5}}
"""
UPDATES = """time_s,term,version,n_samples,samples_total,prequential_loss,prequential_accuracy,weight,void
100.000,1,1,16,16,0.9,0.1,16,0
101.000,1,2,16,32,0.7,0.3,16,0
102.000,1,3,16,48,9.9,0.0,16,1
110.000,2,3,16,48,0.5,0.5,16,0
"""
EVALUATIONS = """time_s,term,version,loss,accuracy,void
100.500,1,1,0.8,0.25,0
110.500,2,3,0.4,0.75,0
"""


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A command sets up logging to its own standard error, which is closed when the test is over."""
    handlers = list(logging.getLogger().handlers)
    yield
    structlog.reset_defaults()
    logging.getLogger().handlers[:] = handlers


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "stack.json").write_text('{"kafka": "127.0.0.1:1", "redis": "redis://127.0.0.1:1/0"}')
    (tmp_path / "report.json").write_text("{}")
    (tmp_path / "updates.csv").write_text(UPDATES)
    (tmp_path / "evaluations.csv").write_text(EVALUATIONS)
    store = FileCheckpointStore(tmp_path / "checkpoints", "shop", keep=10)
    for term, version, applied, lr, code in ((1, 1, (1, 1), 0.5, "c1"), (2, 3, (3, 3), 0.1, "c2")):
        config = load(tmp_path / "job.yaml", [f"training.optimizer.lr={lr}"])
        state = {
            "version": version, "applied": applied, "origins": (100, 7), "records_per_batch": 8,
            "samples_total": 16 * version, "policy": "doll", "elapsed_s": 65.0,
            "init_from": "yesterday.safetensors" if version == 1 else "",
        }  # fmt: skip
        mark = make_fingerprint(config, parameters=4, buffers=0, shapes=1)
        weights = np.array([3, 4, 0, version], np.float32)
        users = np.array([[1, 1], [0, version], [0, 0]], np.float32)
        ids = np.array([7, 5, 11 if version == 1 else 12])
        layout = WeightsLayout((("w", (2,)), ("b", (2,))))
        store.save(
            Checkpoint(
                job="shop", fingerprint=mark, term=term, version=version, state=msgspec.msgpack.encode(state),
                tensors={"weights": weights, "table.users.ids": ids, "table.users.values": users}, layout=layout,
                code=code,
            )
        )  # fmt: skip
    return tmp_path


def versions(command: str, run: Path, *more: str) -> str:
    result = doll("versions", command, str(run), *more)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(command: str, run: Path, *more: str) -> str:
    result = doll("versions", command, str(run), *more)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def test_the_list_has_what_checkpoints_and_records_say(run: Path) -> None:
    assert versions("alias", run, "stable", "1") == "stable is version 1\n"
    assert versions("pin", run, "latest") == "version 3 is kept\n"
    lines = versions("list", run).splitlines()
    assert lines[0].split() == [
        "version", "saved", "(UTC)", "samples", "policy", "prequential", "held-out", "accuracy", "USD", "job", "marks",
    ]  # fmt: skip
    first, last = (line.split() for line in lines[1:])
    assert first[0] == "1"
    assert first[3:8] == ["16", "doll", "0.9", "0.8", "0.25"]
    assert first[-1] == "stable"
    assert last[3:8] == ["48", "doll", "0.7", "0.4", "0.75"], "the mean of updates 1 to 3, without the void one"
    assert last[-1] == "(pinned)"
    content = json.loads(versions("list", run, "--json"))
    assert [item["version"] for item in content] == [1, 3]
    assert content[1]["offsets"] == [[100, 124], [7, 31]]
    assert content[1]["prequential"]["accuracy"] == pytest.approx(0.3)
    assert content[1]["recipe"]["training.optimizer.lr"] == "0.1"
    assert content[0]["digest"] != content[1]["digest"]


def test_one_version_is_shown_with_its_lineage(run: Path) -> None:
    text = versions("show", run, "1")
    for words in (
        "version 1", "by term 1", "16, in 1:05 of learning", "0: 100..108, 1: 7..15", "loss 0.8, accuracy 0.25",
        "yesterday.safetensors", "optimizer.lr=0.5", "parameters=4", "c1", "not known",
    ):  # fmt: skip
        assert words in text
    assert versions("alias", run, "stable", "1")
    assert versions("show", run, "stable") != text, "it has an alias now"


def test_a_diff_has_offsets_samples_errors_settings_and_distances(run: Path) -> None:
    text = versions("diff", run, "1", "latest")
    for words in (
        "from version 1 to 3", "16 -> 48 (+32)", "0: 108..124, 1: 15..31", "loss 0.8 -> 0.4, accuracy 0.25 -> 0.75",
        "training.optimizer.lr 0.5 -> 0.1", "code of the task c1 -> c2", "b: changed by 2, 200.00% of its length",
        "w: changed by 0", "users: 1 of 2 rows differ, by 2 at most, most of all 5 (2); 1 new, 1 gone",
    ):  # fmt: skip
        assert words in text
    content = json.loads(versions("diff", run, "1", "3", "--json"))
    assert content["distances"]["w"] == {"change": 0.0, "length": 5.0}
    assert (content["tables"]["users"]["changed"], content["tables"]["users"]["most"]) == (1, [[5, 2.0]])
    assert "users: 0 of 3 rows differ" in versions("diff", run, "1", "1")


def test_the_version_of_a_rollback_has_the_errors_of_the_one_it_is(run: Path) -> None:
    store = FileCheckpointStore(run / "checkpoints", "shop", keep=10)
    newest = store.load_newest(None)
    assert newest is not None
    rollback = Rollback(to=1, grid=0, version=4, term=3, skipped=True)
    state = msgspec.msgpack.decode(newest.state) | {"version": 4, "rollbacks": [msgspec.to_builtins(rollback)]}
    store.save(
        Checkpoint(
            job="shop", fingerprint=newest.fingerprint, term=3, version=4, state=msgspec.msgpack.encode(state),
            tensors=newest.tensors, layout=newest.layout,
        )
    )  # fmt: skip
    content = json.loads(versions("show", run, "latest", "--json"))
    assert content["prequential"] == {"accuracy": 0.1, "loss": 0.9}
    assert "version 4 is version 1 again (doll rollback): the samples since then are skipped" in content["notes"]


def test_bad_names_are_refused_with_what_was_expected(run: Path) -> None:
    assert "expected a version that is kept (1, 3), an alias (none) or latest, got '2'" in refused("show", run, "2")
    assert "got 'stable'" in refused("pin", run, "stable")
    assert "got '../x'" in refused("diff", run, "1", "../x")
    for alias in ("7", "latest", "a/b", "..", "Stable", "v3"):
        assert "expected an alias of a-z" in refused("alias", run, alias, "1")
    assert "expected one of the aliases none, got 'stable'" in refused("alias", run, "stable", "--delete")
    assert "expected a version that gets the alias, or --delete" in refused("alias", run, "stable")
    assert "expected one of the pinned versions none, got 1" in refused("unpin", run, "1")
    versions("alias", run, "stable", "1")
    assert "an alias (stable (version 1))" in refused("show", run, "9")
    assert versions("alias", run, "stable", "--delete") == "stable is deleted\n"
    (run / "checkpoints" / "marks.json").write_text("{")
    result = doll("versions", "list", str(run))
    assert result.exit_code == 1
    assert "marks.json: expected aliases and pins as doll versions writes them" in result.output


def test_a_damaged_checkpoint_is_left_out_of_the_list(run: Path) -> None:
    (run / "checkpoints" / "checkpoint-00000001-0000000001.doll").write_bytes(b"DLCK")
    result = doll("versions", "list", str(run), "--json")
    assert [item["version"] for item in json.loads(result.stdout)] == [3]
    assert "version_left_out" in result.stderr


@pytest.mark.slow  # Kafka is given time to answer
def test_a_job_without_versions_says_so(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    job = (str(tmp_path / "job.yaml"), "--run-folder", str(tmp_path), "--set", "kafka.address=127.0.0.1:1")
    result = doll("versions", "list", *job)
    assert "nothing has been learned yet" in result.stdout
