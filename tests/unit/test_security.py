"""What docs/security.md promises: nothing is unpickled, names stay inside, secrets stay out of sight."""

from __future__ import annotations

import ast
import json
import pickle
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from doll import GreyImageTask
from doll.config import dump, parse
from doll.consumers.intake.decoding import RawRecords, decode_records
from doll.errors import BlobError, CheckpointError, ConfigError, RecordError, SampleError
from doll.kafka.clients import kafka_settings
from doll.process.health import heartbeat_of
from doll.records import packing
from doll.records.control import decode
from doll.services import Services, redis_address, resolve
from doll.storage.blobs import decode_blob, decode_latest
from doll.storage.checkpoints import decode_checkpoint
from doll.storage.file_checkpoints import FileCheckpointStore
from doll.storage.redis_client import connect_redis
from paths import ROOT

JOB = "job: j\ntask: {class: 'a:B'}\n"


class LabelledImages(GreyImageTask):
    input_shape = (8, 8)
    num_classes = 10


# Modules whose readers run what they read, and calls that do.
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle"}
UNSAFE_CALLS = {
    *("torch.load", "torch.save", "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "yaml.Loader"),
    *("np.load", "numpy.load", "eval", "exec", "os.system", "os.popen"),
}


def unsafe_uses(source: str) -> list[str]:
    """What a module imports or names of the above, with its line."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names]
            case ast.ImportFrom():
                names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            case ast.Attribute() | ast.Name():
                names = [ast.unparse(node)]
            case ast.keyword(arg="allow_pickle") | ast.keyword(arg="shell"):
                names = [str(node.arg)] if ast.unparse(node.value) != "False" else []
            case _:
                continue
        for name in names:
            bad = name.split(".")[0] in UNSAFE_MODULES or name in UNSAFE_CALLS or name in ("allow_pickle", "shell")
            if bad and not (isinstance(node, ast.Name) and name in ("allow_pickle", "shell")):
                lines.append(f"line {getattr(node, 'lineno', '?')}: {name}")
    return lines


def test_the_search_finds_what_it_must() -> None:
    for source in (
        "import pickle", "from pickle import loads", "import torch\ntorch.load(x)", "import yaml\nyaml.load(f)",
        "from torch import load", "np.load(f, allow_pickle=True)", "import shelve as s", "eval(text)",
        "subprocess.run(x, shell=True)",
    ):  # fmt: skip
        assert unsafe_uses(source), source
    assert unsafe_uses("yaml.safe_load(x)\nmodel.eval()\nsubprocess.run(x, shell=False)") == []


@pytest.mark.slow
def test_no_module_of_doll_reads_what_could_run() -> None:
    modules = sorted((ROOT / "doll").rglob("*.py"))
    assert len(modules) > 50
    unsafe = {path: uses for path in modules if (uses := unsafe_uses(path.read_text(encoding="utf-8")))}
    # A task of a notebook, in the folder of its own run (ADR 78): tests/unit/api/test_shipping.py
    assert [path.name for path in unsafe] == ["shipping.py", "weight_sources.py"], unsafe


@pytest.mark.slow
def test_files_of_torch_are_read_as_tensors_only() -> None:
    source = (ROOT / "doll" / "storage" / "weight_sources.py").read_text(encoding="utf-8")
    (load,) = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and "torch.load" in ast.unparse(node.func)
    )
    assert "weights_only=True" in [ast.unparse(keyword) for keyword in load.keywords]
    assert len(unsafe_uses(source)) == 1


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_is_refused_wherever_it_comes_from(tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps(Trap(sprung), protocol)
        with pytest.raises(RecordError):
            decode(data)
        with pytest.raises(RecordError):
            decode(b"\xd0\x01" + data)
        with pytest.raises(BlobError):
            decode_blob(data, job="j", kind="w", version=1, numel=4)
        with pytest.raises(BlobError):
            decode_latest(data)
        with pytest.raises(CheckpointError):
            decode_checkpoint(data)
        with pytest.raises(SampleError):
            packing.unpack(data, 4)
        decoded = decode_records(LabelledImages(), RawRecords([0], [data]), samples_per_record=1, max_record_bytes=4096)
        assert (decoded.num_samples, len(decoded.refused)) == (0, 1)
        with pytest.raises(ConfigError):
            parse(data.decode("latin-1"))
        folder = tmp_path / f"checkpoints-{protocol}"
        folder.mkdir()
        (folder / "checkpoint-00000001-0000000001.doll").write_bytes(data)
        with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
            FileCheckpointStore(folder, "j").load_newest(None)
    assert not sprung.exists()
    pickle.loads(data)  # the trap works
    assert sprung.exists()


@pytest.mark.parametrize(
    "name",
    ["../x", "..", ".", "a/b", "a\\b", "/etc", "a.b", "", "A", "x" * 64, "j\n", "\nj", "j ", "-j", "_j", "ä", "j\0",
     "~", "%2e%2e", "j:k", "*", "{a}"],
)  # fmt: skip
def test_a_job_s_name_cannot_leave_its_folder_topic_or_key(name: str) -> None:
    with pytest.raises(ConfigError, match="job"):
        parse(f"job: {json.dumps(name)}\ntask: {{class: 'a:B'}}\n")


def test_a_server_that_does_not_ask_who_is_there_listens_on_loopback() -> None:
    config = parse("job: t\ntask: {class: 'a:B'}\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with heartbeat_of("producer", config, default_port=port):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=60)
        socket.create_connection(("127.0.0.1", port), timeout=60).close()


SECRETS = {"DOLL_KAFKA_PASSWORD": "k4-hush", "DOLL_REDIS_PASSWORD": "r3-hush", "AWS_SECRET_ACCESS_KEY": "aws-hush"}


def test_secrets_are_in_no_repr_dump_or_log(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SECRETS, "DOLL_KAFKA_USERNAME": "me", "DOLL_REDIS_USERNAME": "me"}.items():
        monkeypatch.setenv(name, value)
    config = parse(JOB, ["kafka.security=sasl_ssl", "kafka.address=k:1", "redis.address=redis://r:2/0"])
    services = resolve(config)
    settings = kafka_settings(config, services)
    client = connect_redis(services)
    with structlog.testing.capture_logs() as logs:
        structlog.get_logger().warning("trouble", settings=settings, client=client, services=services)
    said = [dump(config), repr(config), str(config), config.model_dump_json(), repr(services), repr(settings)]
    said += [str(settings), f"{settings}", repr(client), repr(client.connection_pool), repr(logs)]
    client.close()
    assert not [text for text in said if "hush" in text]
    assert settings["sasl.password"] == "k4-hush"


def test_credentials_in_an_address_are_refused_and_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    for override in (
        "redis.address=redis://me:hush@r:2/0",
        "redis.address=redis://r:2/0?password=hush",
        "kafka.address=me:hush@k:1",
    ):
        with pytest.raises(ConfigError, match="no credentials in the job file") as caught:
            parse(JOB, [override])
        assert "hush" not in str(caught.value)
    config = parse(JOB)
    monkeypatch.setenv("DOLL_KAFKA", "me:hush@k:1")
    with pytest.raises(ConfigError, match=r"\$DOLL_KAFKA holds credentials.*DOLL_KAFKA_PASSWORD") as caught:
        resolve(config)
    assert "hush" not in str(caught.value)
    monkeypatch.setenv("DOLL_REDIS", "redis://r:2/0?username=me&password=hush")
    with pytest.raises(ConfigError, match=r"\$DOLL_REDIS holds credentials") as caught:
        redis_address(config)
    assert "hush" not in str(caught.value)


def test_a_failing_redis_does_not_repeat_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    from doll.storage.redis_client import redis_problem

    monkeypatch.setenv("DOLL_REDIS_PASSWORD", "r3-hush")
    problem = redis_problem(Services("", "redis://127.0.0.1:1/0"), 0.5)
    assert problem is not None
    assert "hush" not in problem


def test_blobs_that_were_changed_on_the_way_are_refused() -> None:
    from doll.storage.blobs import encode_blob

    array = np.ones(4, np.float32)
    data = bytearray(b"".join(map(bytes, encode_blob(array, job="j", kind="w", version=1))))
    data[-1] ^= 1
    with pytest.raises(BlobError, match="changed on the way"):
        decode_blob(bytes(data), job="j", kind="w", version=1, numel=4)
