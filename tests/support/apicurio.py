"""A real schema registry on loopback: Apicurio, from Maven Central. `python tests/support/apicurio.py` fetches it.

It speaks Confluent's API under `/apis/ccompat/v7`. Its data is in memory: a restart forgets it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Final

from doll.errors import ServiceUnavailableError
from doll.local import processes
from doll.local.kafka_jars import CACHE_ENV, JAVA_VERSION
from waiting import until

VERSION: Final = "3.3.3"
MIN_JAVA: Final = 21
_ARTIFACT: Final = f"io.apicurio:apicurio-registry-app:{VERSION}:tar.gz:all"


def folder() -> Path:
    """The unpacked registry, which may not exist yet."""
    root = os.environ.get(CACHE_ENV)
    return (Path(root) if root else Path.home() / ".cache" / "doll") / f"apicurio-{VERSION}"


def find_java() -> str | None:
    """A Java of at least `MIN_JAVA`."""
    fitting = (java for java in _candidates() if processes.version_of(java, "-version", JAVA_VERSION) >= (MIN_JAVA,))
    return next(fitting, None)


def _candidates() -> Iterator[str]:
    if home := os.environ.get("JAVA_HOME"):
        yield f"{home}/bin/java"
    if (java := shutil.which("java")) is not None:
        yield java
    yield from map(str, sorted(Path("/usr/lib/jvm").glob("*/bin/java")))


def unavailable_reason() -> str | None:
    """None if a registry can be started here; else what is missing."""
    if find_java() is None:
        return f"no Java >= {MIN_JAVA} in JAVA_HOME, on PATH or in /usr/lib/jvm"
    if not folder().is_dir():
        return f"Apicurio is not in {folder()}: python tests/support/apicurio.py fetches it (159 MB)"
    return None


def fetch() -> None:
    """Fetch and unpack the registry with Maven."""
    target = folder()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as temporary:
        command = ["mvn", "--batch-mode", "--quiet", "dependency:copy", f"-Dartifact={_ARTIFACT}"]
        subprocess.run([*command, f"-DoutputDirectory={temporary}"], check=True, cwd=temporary)
        (archive,) = Path(temporary).glob("*.tar.gz")
        unpacked = Path(temporary) / "unpacked"
        with tarfile.open(archive) as tar:
            tar.extractall(unpacked, filter="data")
        unpacked.rename(target)


class Apicurio(processes.LocalServer):
    """One registry. Its port persists across `stop` and `start`."""

    _grace_s: ClassVar[float] = 10.0

    def __init__(self, work: Path) -> None:
        super().__init__(work / "apicurio.log")
        self._work = work
        self._port = processes.free_port()

    @property
    def url(self) -> str:
        """For `data.format.registry`."""
        return f"http://{processes.LOOPBACK}:{self._port}/apis/ccompat/v7"

    def start(self) -> None:
        java = find_java()
        assert java is not None, "unavailable_reason has checked for it"
        self._work.mkdir(parents=True, exist_ok=True)
        options = ["-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", f"-Dquarkus.http.port={self._port}"]
        options += [f"-Dquarkus.http.host={processes.LOOPBACK}", "-Dquarkus.management.enabled=false"]
        self._process = processes.spawn([java, *options, "-jar", str(folder() / "quarkus-run.jar")], self.log_path)
        until(lambda: self.pid is None or self._answers(), lambda: processes.tail(self.log_path))
        if self.pid is None:
            raise ServiceUnavailableError(f"Apicurio does not start:\n{processes.tail(self.log_path)}")

    def register(self, subject: str, schema: Any) -> int:
        """Register an Avro schema; its id."""
        body = json.dumps({"schema": json.dumps(schema)}).encode()
        request = urllib.request.Request(
            f"{self.url}/subjects/{subject}/versions", body, {"Content-Type": "application/vnd.schemaregistry.v1+json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return int(json.load(response)["id"])

    def freeze(self) -> None:
        """It answers nothing until `thaw`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """It answers again."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/subjects", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False


if __name__ == "__main__":
    fetch()
    sys.stdout.write(f"{folder()}\n")
