"""After `doll forget`, no file of a run has a removed record, its ids or their rows, but those that the command lists.

The run has its own Kafka in its folder, a plain and a bounded table, dead letters, an event log, an exported and a
replayed model, and a temporary file of a killed server. All files are searched, also inside of compressed batches.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pyarrow as pa
import pytest
from doll.run.target import open_target
from doll.storage.checkpoints import Checkpoint, CheckpointStore
from doll.storage.stores import open_store
from forked_commands import Program

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("startable_broker")]

USER, PLAIN_ID, BOUNDED_ID = "erased-user-7f3a91", 87_654, 0x0BADF00D5EEDC0DE
ROWS = 100_000  # a checkpoint of more than 1 MB, so that later ones are differential
JOB = """
job: rows
task: {class: task.py:Users}
data: {workers: 2, batch_size: 8}
source: {kind: jsonl, path: users.jsonl}
arrivals: {process: deterministic, rate_per_s: 300}
training:
  policy: {name: doll, group_size: 2}
  optimizer: {name: adam, lr: 0.05}
  tables: {of_hashes: {max_rows: 500}}
checkpoint: {every_updates: 3, every_s: 0.1, keep: 100, event_log: true}
evaluation: {enabled: false}
"""
TASK = f"""
import json
import numpy as np
import torch
import doll

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.of_users = torch.nn.EmbeddingBag({ROWS}, 3, mode="sum", sparse=True)
        self.of_hashes = doll.BoundedEmbeddingBag(2**60, 3, mode="sum")
        self.last = torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.last(self.of_users(x[:, :1]) + self.of_hashes(x[:, 1:]))

class Users(doll.Task):
    input_shape = (2,)
    num_classes = 2

    def build_model(self):
        return Model()

    def decode(self, record):
        fields = json.loads(record)
        if not fields["ids"]:
            raise ValueError("no ids: %r" % fields)
        return doll.Sample(np.array(fields["ids"], np.int64), fields["label"])

    def forward(self, model, x):
        return model(x)
"""


def written(folder: Path) -> None:
    """Write the job: 480 records of 40 users, of which one comes late, and once without ids."""
    rows = [
        {"user": f"user-{n % 40}", "ids": [n % 40, 5_000 + n % 40], "label": n % 2} for n in range(480)
    ]  # fmt: skip
    for n in (300, 301, 350, 420):
        rows[n] = {"user": USER, "ids": [PLAIN_ID, BOUNDED_ID], "label": 1}
    rows[310] = {"user": USER, "ids": [], "label": 1}
    (folder / "users.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "job.yaml").write_text(JOB)
    (folder / "task.py").write_text(TASK)
    (folder / "keys").write_text(USER + "\n")


def rows_of(tensors: Mapping[str, Any]) -> set[bytes]:
    """The rows of the ids in one version: values and optimizer state."""
    rows = set()
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or tensor.dtype != np.float32:
            continue
        if len(tensor) == ROWS:
            rows.add(tensor[PLAIN_ID].tobytes())
            continue
        prefix = name.removesuffix(".values").rpartition(".state.")[0] or name.removesuffix(".values")
        ids = tensors.get(f"{prefix}.touched", tensors.get(f"{prefix}.ids"))
        if ids is not None and len(ids) == len(tensor):
            rows |= {row.tobytes() for row in tensor[np.isin(ids, (PLAIN_ID, BOUNDED_ID))]}
    return {row for row in rows if any(row)}


def versions_of(store: CheckpointStore) -> dict[int, Checkpoint]:
    loaded = {version: store.load_newest(None, version) for _, version in store.versions()}
    return {version: checkpoint for version, checkpoint in loaded.items() if checkpoint is not None}


def contents(path: Path) -> Iterator[bytes]:
    """The bytes of a file, and those of its compressed parts."""
    data = path.read_bytes()
    yield data
    for codec, magic in (("gzip", b"\x1f\x8b"), ("zstd", b"\x28\xb5\x2f\xfd"), ("lz4", b"\x04\x22\x4d\x18")):
        at = data.find(magic)
        while at >= 0:  # also inside of a file, as the batches of a log of Kafka
            try:
                yield pa.input_stream(io.BytesIO(data[at:]), compression=codec).read()
            except OSError:
                with pa.input_stream(io.BytesIO(data[at:]), compression=codec) as stream:
                    yield _until_error(stream)
            at = data.find(magic, at + 1)


def _until_error(stream: Any) -> bytes:
    """What follows a compressed part is none."""
    parts = []
    try:
        while part := stream.read(256):
            parts.append(part)
    except OSError:
        pass
    return b"".join(parts)


def having(run: Path, needles: set[bytes]) -> set[str]:
    """The files of a run that have one of the needles."""
    files = [path for path in run.rglob("*") if path.is_file()]
    return {
        str(path.relative_to(run)) for path in files
        if any(needle in content for content in contents(path) for needle in needles)
    }  # fmt: skip


def listed(certificate: dict[str, Any], run: Path, file: str) -> bool:
    """Whether a line of the certificate, of a command that ran in the folder, names the file or a folder above it. A
    file of Kafka must be named by its topic, too."""
    words = {word.rstrip(":,;") for line in certificate["still_held"] for word in line.split()}
    places = [Path(file), *Path(file).parents][:-1]
    is_named = any(str(path) in words or str(run / path) in words for path in places)
    topic = re.fullmatch(r"services/kafka/data/(.+)-\d+/.+", file)
    return is_named and (topic is None or topic[1] in words)


def test_no_file_of_the_run_has_a_forgotten_row_that_is_not_listed(tmp_path: Path, doll: Program) -> None:
    written(tmp_path)
    # The services of the test session are not those of this run.
    own = {"DOLL_KAFKA": "", "DOLL_REDIS": ""}
    done = doll("up", "job.yaml", "--parent-folder", tmp_path / "runs", "--json", cwd=tmp_path, **own)
    assert done.returncode == 0, done.stderr
    audit = json.loads(done.stdout)["audit"]
    assert (audit["ok"], audit["applied"], audit["dead"]) == (True, 479, 1)
    (run,) = (tmp_path / "runs").iterdir()
    store = open_store(open_target(run, []).config, run)
    before = versions_of(store)
    newest, (term, _) = max(before), store.versions()[-1]
    assert any(store.read_head(*key).base is not None for key in store.versions()), "differential"
    replayed = commands.doll("replay", run, "--to", str(newest))
    assert replayed.exit_code == 0, replayed.output
    aliased = commands.doll("versions", "alias", run, "stable", str(newest))
    assert aliased.exit_code == 0, aliased.output
    checkpoint = run / "checkpoints" / f"checkpoint-{term:08d}-{newest:010d}.doll"
    shutil.copy(checkpoint, checkpoint.with_name(f"{checkpoint.name}.77.tmp"))
    # A term that was not continued, because its versions were damaged.
    shutil.copy(checkpoint, checkpoint.with_name(f"checkpoint-00000000-{newest + 900:010d}.doll"))

    initial = rows_of(before[0].tensors)
    rows = set[bytes]().union(*(rows_of(each.tensors) for each in before.values())) - initial
    assert len(rows) > 4
    ids = {struct.pack("<q", BOUNDED_ID), struct.pack(">q", BOUNDED_ID), str(BOUNDED_ID).encode()}
    needles = {USER.encode(), struct.pack("<q", PLAIN_ID), *ids, *rows}
    held = having(run, needles)
    assert {"dead.json", "model/model.safetensors", "replayed/model.safetensors"} <= held, held
    assert any(name.startswith("services/kafka/") for name in held), held
    assert any(name.startswith("events/") for name in held), held
    assert checkpoint.name in {Path(name).name for name in held}

    def forget(*options: str) -> dict[str, Any]:
        called = doll("forget", run, "--keys", tmp_path / "keys", "--field", "user", *options, "--json", cwd=run, **own)
        assert called.returncode == 0, called.stderr
        certificate: dict[str, Any] = json.loads(called.stdout)
        held = having(run, needles)
        assert [name for name in sorted(held) if not listed(certificate, run, name)] == [], certificate["still_held"]
        return {**certificate, "found": held}

    first = forget()
    assert (first["records"], first["others"], first["version"]) == (4, 1, newest + 1)
    saved = store.load_newest(None)
    assert saved is not None
    without = saved.tensors
    assert rows_of(without) == initial
    assert BOUNDED_ID not in without["table.of_hashes.weight.ids"]
    assert PLAIN_ID not in without["table.of_users.weight.touched"]
    name = f"checkpoint-{saved.term:08d}-{saved.version:010d}.doll"
    assert f"checkpoints/{name}" not in first["found"]
    assert not [name for name in first["found"] if name.endswith(".tmp")]
    assert any(name.endswith(f"{newest + 900:010d}.doll") for name in first["found"]), "not yet purged"

    # What is listed can be followed, also by a second call, which finds nothing to compute.
    second = forget("--purge")
    assert (second["records"], second["others"], second["version"]) == (0, 5, -1)
    assert not [name for name in second["found"] if name.startswith(("checkpoints/", "events/"))]
    exported = commands.doll("export", run)
    assert exported.exit_code == 0, exported.output
    for name in ("replayed", "dead.json", "logs", "report.json", "report.html"):
        path = run / name
        assert f"rm -r {name}" in " ".join(second["still_held"]) or f" {name}" in " ".join(second["still_held"])
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert {name.split("/")[0] for name in having(run, needles)} == {"services"}
    shutil.rmtree(run / "services" / "kafka")
    assert having(run, needles) == set()
