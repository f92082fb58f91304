"""A host of the stack, played in a folder: its boot scripts run as they are, on programs that stand in for AWS's."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from paths import ROOT

FILES = ROOT / "deploy" / "terraform" / "modules" / "boot" / "files"
PROGRAMS = Path(__file__).parent / "programs"
CLIENTS = {"DOLL_KAFKA_USERNAME": "doll", "DOLL_KAFKA_PASSWORD": "k4fka-hush-hush"}
CACHE = {"DOLL_REDIS_USERNAME": "doll", "DOLL_REDIS_PASSWORD": "r3dis-hush-hush"}
WORKER = {"DOLL_KAFKA_USERNAME": "doll-worker", "DOLL_KAFKA_PASSWORD": "w0rker-hush-hush"}
PRODUCER = {"DOLL_KAFKA_USERNAME": "doll-producer", "DOLL_KAFKA_PASSWORD": "pr0ducer-hush-hush"}
IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/doll-t:v1"
ENVIRONMENT = {
    "DOLL_BOOT_CERT_AUTHORITIES": "",
    "DOLL_BOOT_BUCKET": "bucket",
    "DOLL_BOOT_CACHE_IMAGE": "",
    "DOLL_BOOT_CACHE_MB": "64",
    "DOLL_BOOT_IMAGE": IMAGE,
    "DOLL_BOOT_KAFKA_IMAGE": "apache/kafka:4.1.1",
    "DOLL_BOOT_LOG_GROUP": "/doll/t/roles",
    "DOLL_BOOT_SCHEMA_REGISTRY_LOGIN": "",
    "DOLL_KAFKA": "10.0.0.11:9092",
    "DOLL_REDIS": "rediss://10.0.0.10:6379/0",
}
SETTINGS = {
    "fleet.cluster": "t",
    "fleet.instance_types": '["c5.xlarge","c5a.xlarge","m5.xlarge"]',
    "fleet.kind": "ec2",
    "fleet.launch_template": "lt-0123456789abcdef0",
    "fleet.launch_template_version": "3",
    "fleet.queue_url": "https://sqs.us-east-1.amazonaws.com/123456789012/doll-t-notices",
    "fleet.region": "us-east-1",
    "fleet.subnets": '["subnet-0123456789abcdef0","subnet-0123456789abcdef1"]',
    "kafka.producer_user": "doll-producer",
    "kafka.replication_factor": "3",
    "kafka.security": "sasl_ssl",
    "kafka.worker_user": "doll-worker",
    "ps.shards": "2",
}


def lines(values: Mapping[str, str]) -> str:
    return "".join(f"{key}={value}\n" for key, value in values.items())


class Host:
    """A machine whose file system is `root`, and the AWS account that it sees: files in `account`.

    Attributes:
        calls: what `aws`, `docker`, `systemctl` and the like were called with, one line each.
    """

    def __init__(self, root: Path, account: Path, boot: Mapping[str, str]) -> None:
        self.root, self.account, self.calls_path = root, account, root / "calls"
        (root / "opt").mkdir(parents=True)
        shutil.copytree(FILES, root / "opt" / "doll")
        (root / "etc" / "doll").mkdir(parents=True)
        values = {"AWS_REGION": "us-east-1", "DOLL_STACK_NAME": "t", "DOLL_PRIVATE_IP": "127.0.0.1", **boot}
        (root / "etc" / "doll" / "boot.env").write_text(lines(values))
        self.environment = {
            "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
            "DOLL_ROOT": str(root),
            "DOLL_RETRY_INTERVAL_S": "0.05",
            "FAKE_ACCOUNT": str(account),
            "FAKE_CALLS": str(self.calls_path),
        }

    def start(self, script: str, *words: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(self.root / "opt" / "doll" / f"{script}.sh"), *words],
            env={**self.environment, **environment}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def run(self, script: str, *words: str, **environment: str) -> tuple[int, str]:
        """Exit code and output."""
        process = self.start(script, *words, **environment)
        try:
            output = process.communicate(timeout=240)[0]
        finally:
            process.kill()
        return process.returncode, output

    @property
    def calls(self) -> list[str]:
        return self.calls_path.read_text().splitlines() if self.calls_path.exists() else []

    def calls_of(self, words: str) -> list[str]:
        return [call for call in self.calls if call.startswith(words)]


@pytest.fixture
def account(tmp_path: Path) -> Path:
    """Parameters, secrets and the bucket, as `terraform apply` and a user who has pushed a job leave them."""
    folder = tmp_path / "account"
    for name, text in (
        ("parameters/doll/t/environment", lines(ENVIRONMENT)),
        ("parameters/doll/t/settings", lines(SETTINGS)),
        ("secrets/doll/t/clients", lines(CLIENTS)),
        ("secrets/doll/t/cache", lines(CACHE)),
        ("secrets/doll/t/worker", lines(WORKER)),
        ("secrets/doll/t/producer", lines(PRODUCER)),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "bucket" / "job").mkdir(parents=True)
    (folder / "bucket" / "ca").mkdir()
    push_job(folder, {"job.yaml": b"job: t\n", "task.py": b"# a task\n"})
    return folder


def push_job(folder: Path, files: Mapping[str, bytes]) -> None:
    with tarfile.open(folder / "bucket" / "job" / "job.tar.gz", "w:gz") as archive:
        for name, content in files.items():
            about = tarfile.TarInfo(f"./{name}")
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))


@pytest.fixture
def make_host(tmp_path: Path, account: Path) -> Callable[..., Host]:
    def make(name: str = "host", **boot: str) -> Host:
        return Host(tmp_path / name, account, boot)

    return make
