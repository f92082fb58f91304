"""Every decoder of records, blobs, checkpoints and job files, against mutated and made-up inputs.

Refused with the decoder's own error, or accepted with a meaning that holds; never another error, never for long. Most
inputs are valid ones, changed a little (tests/support/fuzzing.py). A slice runs by default; `DOLL_FUZZ=1` runs 1e5
inputs over all decoders, `DOLL_FUZZ=<n>` others. What is no record has its place in test_outside.py.
"""

from __future__ import annotations

import hashlib
import json
import random
import struct
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import record_builders
import yaml
from doll.config import JobConfig, dump, parse
from doll.config.policy import POLICIES
from doll.consumers.intake.decoding import RawRecords, decode_records
from doll.consumers.protocol.worker_core import Batch, Compute, ComputedBatch, Exit, GradientDone, Send, WorkerCore
from doll.errors import BlobError, CheckpointError, ConfigError, RecordError, SampleError
from doll.ps.engine.engine import Engine
from doll.ps.engine.settings import EngineSettings
from doll.ps.policies import make_policy
from doll.records.control import (
    Alive,
    Announce,
    AnyRecord,
    DeadLetter,
    Durable,
    Evaluated,
    Fence,
    Finished,
    Hello,
    Join,
    Leave,
    Member,
    Metric,
    Nack,
    NewVersion,
    ProvisionDecision,
    Push,
    PushedBatch,
    Skip,
    Stop,
    TermStarted,
    Update,
    Welcome,
    decode,
    encode,
)
from doll.records.packing import pack, unpack
from doll.storage.blobs import Latest, blob_info, decode_blob, decode_latest, encode_blob, encode_latest
from doll.storage.checkpoints import Checkpoint, DamagedError, decode_checkpoint, encode_checkpoint
from doll.task.base import Task, load_task
from engine_invariants import check_engine
from fuzzing import MAX_INPUT_S, call_or_none, inputs
from paths import EXAMPLES
from record_builders import announce, welcome
from statuses import live_worker, server_status

pytestmark = pytest.mark.fuzz


# --- control records ------------------------------------------------------------------------------------------------

W: dict[str, Any] = {"worker": 1, "session": 1 << 20}
EVENTS: list[AnyRecord] = [
    Join(worker=1, process="a"),
    Join(worker=1, process="a", session=1 << 20),
    announce(1, 1 << 20, 0, 3),
    Push(**W, term=1, version=0, key="doll:j:g:1:1", market="spot", batches=(
        PushedBatch(batch=0, grant_id=1, n_samples=8, loss_sum=4.5, metric_sums={"accuracy": 3.0}, dead=(3,),
                    gaps=((5, 7),), dead_samples=1),
        PushedBatch(batch=1, grant_id=3, n_samples=8, loss_sum=4.5),
    )),
    Nack(**W, batch=0, term=1, grant_id=1, reason="weights"),
    Alive(**W, retained=2, next_offset=16, lag=3),
    Leave(**W, cause="sigterm"),
    Evaluated(term=1, version=1, loss=0.5, accuracy=0.9),
]  # fmt: skip
G: dict[str, Any] = {"term": 1, "worker": 1}
COMMANDS: list[AnyRecord] = [
    welcome(1, process="a", session=1 << 20, fingerprint="f"),
    record_builders.grant_of(
        **G, session=1 << 20, first=0, grant_ids=(1, 3), version=0, min_version=0, key="doll:j:w:1:0"
    ),
    NewVersion(**G, version=1, key="doll:j:w:1:1"),
    Durable(**G, until={1: 1}, batches=1),
    Hello(term=1),
    Fence(**G, process="a"),
    Stop(term=1, reason="updates"),
]
MEMBER = Member(worker=0, partition=0, batch=0, lo=0, hi=8, n_samples=8, base_version=0, dead=(2,), gaps=((3, 4),))
OTHERS: list[AnyRecord] = [
    TermStarted(term=1, resumed_version=0, origins=(0, 0), records_per_batch=8, time_s=1.0),
    Update(term=1, version=1, members=(MEMBER,), n_samples=8, loss=0.5, metrics={"accuracy": 0.5}),
    Finished(term=1, version=1, reason="updates", time_s=1.0),
    DeadLetter(worker=0, partition=0, offset=4, reason="no", payload=b"bytes", payload_bytes=5),
    Metric(source="worker-0", values={"compute_s": 1.0}, time_s=1.0),
    server_status([live_worker(0, market="spot")], counters={"joined": 1}),
    ProvisionDecision(
        turn=1,
        time_s=1.0,
        started_s=0.0,
        phase="run",
        binding="none",
        feasible=True,
        markets=("spot", ""),
        reasons=("a", "b"),
        reason_of=(0, 1),
        incarnations=(1, 2),
        actions=("slot 0: launch",),
    ),
]


def test_control_records() -> None:
    """What is accepted is a record: it is written and read again as the same bytes."""
    accepted = 0
    for data in inputs("records", 30_000, [encode(record) for record in (*EVENTS, *COMMANDS, *OTHERS)]):
        record = call_or_none(RecordError, data, decode, data)
        if record is not None:
            accepted += 1
            assert encode(decode(encode(record))) == encode(record)
    assert accepted > 0


def engine(policy: str) -> Engine:
    config = parse("job: j\ntask: {class: 'm:C'}\ntraining: {policy: {name: %s}}" % policy)  # noqa: UP031
    settings = EngineSettings(
        num_workers=2, records_per_batch=8, max_pending_batches=4, lease_s=8, grant_timeout_s=5,
        checkpoint_every_updates=5, checkpoint_every_s=1e9,
    )  # fmt: skip
    return Engine(settings, make_policy(config.training.policy), term=1, now=0.0, origins=(0, 0))


@pytest.mark.parametrize("policy", POLICIES.names())
def test_the_engine_takes_any_record_that_decodes(policy: str) -> None:
    """A stranger's record in `events` may be refused; it never ends the parameter server or breaks its counters."""
    seeds = [encode(record) for record in EVENTS]
    subject, fed = engine(policy), 0
    for number, data in enumerate(inputs(f"engine {policy}", 7_000, seeds)):
        if number % 100 == 0:
            subject = engine(policy)
            for worker in (0, 1):
                subject.handle(Join(worker=worker, process="a"), 0.0)
                session = subject.worker(worker).session
                subject.handle(announce(worker, session, 0, 3), 0.0)
        record = call_or_none(RecordError, data, decode, data)
        if isinstance(record, Join | Announce | Skip | Push | Nack | Alive | Leave | Evaluated):
            fed += 1
            call_or_none(RecordError, data, subject.handle, record, 0.0)
            check_engine(subject)
    assert fed > 0


def test_a_worker_takes_any_record_that_decodes() -> None:
    welcome = COMMANDS[0]
    assert isinstance(welcome, Welcome)
    seeds = [encode(record) for record in COMMANDS]
    core = WorkerCore(welcome, max_pending=4, now=0.0)
    for number, data in enumerate(inputs("worker", 8_000, seeds)):
        if number % 50 == 0:
            core = WorkerCore(welcome, max_pending=4, now=0.0)
            for j in range(3):
                core.batch_ready(Batch(j, None, 8, 0.0, partition=1))
        record = call_or_none(RecordError, data, decode, data)
        if record is None:
            continue
        for action in call_or_none(RecordError, data, core.on_record, record, 1.0):
            if isinstance(action, Compute):
                assert all(0 <= batch.number < 3 for batch in action.batches)
                done = GradientDone("k", action.grant.version, (ComputedBatch(8),) * len(action.batches))
                answer = core.gradient_done(action.grant, action.batches, done, 1.0)
                assert all(isinstance(item, Send) for item in answer)
            assert not isinstance(action, Exit) or action.reason
        assert core.retained <= 3


# --- records of users -----------------------------------------------------------------------------------------------


def test_packed_records() -> None:
    rng = random.Random(0)
    seeds = [
        pack([rng.randbytes(6) for _ in range(4)]),
        pack([rng.randbytes(n) for n in (1, 20, 3)]),
        pack([b"x"]),
        pack([rng.randbytes(65) for _ in range(16)]),
    ]
    for data in inputs("packing", 10_000, seeds):
        packed = call_or_none(SampleError, data, unpack, data, 16)
        if packed is not None:
            samples = packed.samples()
            assert len(samples) == packed.num_samples <= 16
            assert all(samples)
            assert b"".join(samples) == bytes(packed.body)
            assert data.endswith(bytes(packed.body))
            assert unpack(pack(samples), 16).samples() == samples


def _tasks() -> dict[str, tuple[Task, list[bytes]]]:
    from examples.clicks import task as clicks
    from examples.clicks.task import Clicks
    from examples.digits.task import Digits
    from examples.emnist.task import Emnist
    from examples.intrusion.task import Intrusion
    from examples.lda.task import Topics
    from examples.ratings import task as ratings
    from examples.ratings.task import MatrixFactorization
    from examples.synthetic.task import Gaussian
    from examples.words.task import SkipGram

    rng = random.Random(1)
    row = b"0,tcp,http,SF,215,45076,0,0,0,0,0,1" + b",0" * 10 + b",1,1" + b",0.0" * 7 + b",0,0" + b",0.0" * 8
    gaussian = [np.array([*(rng.gauss(0, 1) for _ in range(4)), y], "<f4").tobytes() for y in (0, 1)]
    events = [
        b'{"age": 40.5, "visits": 3, "spend": 1e1, "left": true}',
        b'{"left":false,"spend":0,"visits":0,"age":18}',
    ]
    click = b"\t".join([b"1", *[b"-3", b"", b"2147483647"] * 4, b"7", *[b"68fd1e64", b""] * 13])
    texts = [
        b'{"text": "cocoa and tea"}',
        b'{"text":""}',
        '{"text": "gr\u00f6\u00dfe caf\u00e9 \\u6771", "id": 7}'.encode(),
    ]
    return {
        "digits": (Digits(), [bytes([n]) + rng.randbytes(64) for n in range(10)]),
        "emnist": (Emnist(), [bytes([46]) + rng.randbytes(784)]),
        "gaussian": (Gaussian(features=4), gaussian),
        "intrusion": (Intrusion(), [row + b",normal.", row + b",smurf.", row.replace(b"215", b"1e300") + b",nmap."]),
        "families": (Intrusion(classes="families"), [row + b",normal.", row + b",smurf."]),
        "clicks": (Clicks(), [click, clicks.pack_line(click)]),
        "ratings": (MatrixFactorization(10, 10), [b"1,2,3.5", b"9\t9\t1\t0", b"1::0::5", ratings.pack(1, 2, 3.5)]),
        "topics": (Topics(vocabulary_size=50, max_tokens=5, stop_words="english"), texts),
        "words": (SkipGram(vocabulary_size=50, max_tokens=5), texts),
        "json": (load_task(parse(f"job: t\ntask: {{class: '{EXAMPLES}/stdin/task.py:Churn'}}")), events),
    }


@pytest.mark.parametrize(
    "name",
    ["digits", "emnist", "gaussian", "intrusion", "families", "clicks", "ratings", "topics", "words", "json"],
)
@pytest.mark.parametrize("per_record", [1, 4])
def test_records_of_the_shipped_tasks(name: str, per_record: int) -> None:
    """All samples are used or refused; what is used fits the model; a batch gives what its records give one by one."""
    task, seeds = _tasks()[name]
    if per_record > 1:
        seeds = [pack([seed] * per_record) for seed in seeds]
    used = 0
    rng = random.Random(2)
    batch: list[tuple[int, bytes | None]] = []

    def take(records: list[tuple[int, bytes | None]]) -> Any:
        raw = RawRecords([offset for offset, _ in records], [value for _, value in records])
        decoded = decode_records(task, raw, samples_per_record=per_record, max_record_bytes=4096)
        assert decoded.num_samples == len(decoded.x) == len(decoded.y)
        if decoded.num_samples:
            assert decoded.x.shape[1:] == task.input_shape
            assert np.isfinite(decoded.x.astype(np.float64)).all()
            assert task.num_classes is None or 0 <= decoded.y.min() <= decoded.y.max() < task.num_classes
        offsets = [offset for offset, _ in records]
        assert [item.offset for item in decoded.refused] == sorted({item.offset for item in decoded.refused})
        assert all(item.offset in offsets and item.reason and item.samples >= 1 for item in decoded.refused)
        assert decoded.num_samples + sum(item.samples for item in decoded.refused) >= len(records)
        return decoded

    for number, data in enumerate(inputs(f"{name} {per_record}", 2_500, seeds)):
        batch.append((number, data if rng.random() < 0.5 else rng.choice(seeds)))
        if len(batch) == 24:  # so many that bulk decoding divides it
            together = take(batch)
            alone = [take([item]) for item in batch]
            rows = [(x, y) for decoded in alone for x, y in zip(decoded.x, decoded.y, strict=True)]
            used += len(rows)
            assert together.num_samples == len(rows)
            for (x, y), x2, y2 in zip(rows, together.x, together.y, strict=True):
                np.testing.assert_array_equal(x, x2)
                assert y == y2
            assert [item for decoded in alone for item in decoded.refused] == together.refused
            batch.clear()
    assert used > 0


# --- blobs and checkpoints ------------------------------------------------------------------------------------------


def test_blobs() -> None:
    """A blob that is accepted is the one that was written, to the bit."""
    array = np.random.default_rng(0).standard_normal(40).astype(np.float32)
    valid = b"".join(map(bytes, encode_blob(array, job="j", kind="g", version=3)))
    foreign = b"".join(map(bytes, encode_blob(array, job="other", kind="w", version=4)))
    pointer = b"".join(map(bytes, encode_latest(Latest(term=1, version=3, key="doll:j:w:1:3"))))
    for data in inputs("blobs", 10_000, [valid, valid, foreign]):
        vector = call_or_none(BlobError, data, decode_blob, data, job="j", kind="g", version=3, numel=40)
        assert vector is None or (data == valid and vector.tobytes() == array.tobytes())
        call_or_none(BlobError, data, blob_info, data)
    for data in inputs("pointers", 3_000, [pointer]):
        latest = call_or_none(BlobError, data, decode_latest, data)
        assert latest is None or decode_latest(b"".join(map(bytes, encode_latest(latest)))) == latest


def _checkpoint() -> Checkpoint:
    tensors: dict[str, npt.NDArray[Any]] = {
        "weights": np.arange(16, dtype=np.float32),
        "optimizer.step": np.array(3, np.int64),
    }
    return Checkpoint(job="j", fingerprint="f", term=1, version=3, state=b"state", tensors=tensors)


def test_checkpoints() -> None:
    """A checkpoint that is accepted is the one that was written."""
    valid = b"".join(encode_checkpoint(_checkpoint()))
    for data in inputs("checkpoints", 5_000, [valid]):
        checkpoint = call_or_none(CheckpointError, data, decode_checkpoint, data)
        assert checkpoint is None or data == valid


def test_checkpoints_with_a_right_checksum_and_wrong_contents() -> None:
    """As another build, or somebody with access to the folder, could write them: refused, or whole in themselves."""
    valid = b"".join(encode_checkpoint(_checkpoint()))[:-32]
    seeds = [valid, valid.replace(b'"F32"', b'"F16"'), valid.replace(b'"F32"', b'"F4" '), valid.replace(b"16", b"04")]
    for data in inputs("signed checkpoints", 8_000, seeds):
        signed = data + hashlib.sha256(data).digest()
        checkpoint = call_or_none(CheckpointError, signed, decode_checkpoint, signed)
        if checkpoint is not None:
            assert decode_checkpoint(b"".join(encode_checkpoint(checkpoint))).state == checkpoint.state


def _signed(*, state_bytes: int = 5, dtype: str = "F32", shape: tuple[int, ...] = (16,), more: bytes = b"") -> bytes:
    """A checkpoint made by hand, with a right checksum."""
    numel = 64 if all(shape) else 0
    header = json.dumps({"weights": {"dtype": dtype, "shape": shape, "data_offsets": [0, numel]}}).encode()
    tensors = struct.pack("<Q", len(header)) + header + bytes(numel)
    facts: dict[str, Any] = {"job": "j", "fingerprint": "f", "term": 1, "version": 3}
    head = msgspec.msgpack.encode({**facts, "state_bytes": state_bytes, "tensors_bytes": len(tensors)})
    data = struct.pack("<4sB3xQ", b"DLCK", 2, len(head)) + head + b"state" + tensors + more
    return data + hashlib.sha256(data).digest()


def test_checkpoints_of_a_stranger_are_damaged_ones() -> None:
    assert decode_checkpoint(_signed()).state == b"state"
    for data in (
        _signed(dtype="BF16", shape=(32,)),  # safetensors knows it, numpy does not
        _signed(dtype="F8_E4M3", shape=(64,)),
        _signed(shape=(0, 2**62)),
        _signed(shape=(2**62, 2**62)),
        _signed(state_bytes=-3),
        _signed(state_bytes=2**63),
        _signed(more=b"appended"),
    ):
        with pytest.raises(DamagedError, match="do not fit the schema"):
            decode_checkpoint(data)


# --- job files ------------------------------------------------------------------------------------------------------


_YAML_WORDS = [
    *(f"!!{tag} ".encode() for tag in ("bool", "int", "float", "null", "str", "seq", "map", "timestamp", "binary",
                                      "set", "omap", "pairs", "python/name:os.system")),
    b"!!bool x", b"!!int ''", b"!!float .", b"? ", b"&a ", b"*a", b"<<: ", b"[" * 50, b"{a: " * 50, b"- " * 50, b"!",
    b"!!", b".inf", b"1e999", b"0x", b"0b", b"1:1:1", b"2020-01-01", b"\xc2\x85", b"\xef\xbb\xbf",
    b"---\n", b"%YAML 9.9\n",
]  # fmt: skip


def test_job_files() -> None:
    """A job file that is accepted says the same when it is written out and read again."""
    seeds = [path.read_bytes() for path in sorted(EXAMPLES.glob("*/*.yaml"))]
    assert seeds
    accepted = 0
    for data in inputs("job files", 1_500, seeds, _YAML_WORDS):
        text = data.decode("utf-8", "replace")
        config = call_or_none(ConfigError, data, parse, text)
        if isinstance(config, JobConfig):
            accepted += 1
            assert parse(dump(config)) == config.model_copy(update={"base_folder": Path()})
    assert accepted > 0


_LOL = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)
_MERGE = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 9))


@pytest.mark.parametrize(
    "text",
    [
        f"{_LOL}job: *a8",
        f"{_LOL}job: j\ntask: {{class: 'm:C', args: {{a: *a8}}}}",
        "job: &a [*a]",
        "job: j\ntask: {class: 'm:C', args: &a {b: *a}}",
        "[" * 100_000,
        "a: " + "{b: " * 5_000,
        "job: j\ntask: {class: 'm:C', args: {a: " + "[" * 300 + "]" * 300 + "}}",
        "job: !!python/object/apply:os.system ['true']",
        "job: " + "9" * 100_000,
        "job: 1" + ":1" * 50_000,
        "x" * 3_000_000,
        f"{_MERGE}job: *a8",
    ],
    ids=["laughs", "laughs in args", "itself", "itself in args", "deep", "deep maps", "deep args", "python", "digits",
         "sixties", "long", "merges"],
)  # fmt: skip
def test_job_files_that_are_made_to_hang_are_refused_at_once(text: str) -> None:
    began_s = time.process_time()
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert time.process_time() - began_s < MAX_INPUT_S
    assert len(str(caught.value)) < 10_000


def test_the_yaml_reader_makes_plain_values_only() -> None:
    with pytest.raises(yaml.YAMLError):
        yaml.safe_load("!!python/name:os.system")
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(b"\xd4\x01x", type=Latest)
