"""The cache of Kafka's jars: filled once, whole or not at all, and clear about what is missing.

Maven itself runs in `make setup`; here a script of that name takes its place, so that it can fail or be slow on demand.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from doll.errors import ServiceUnavailableError
from doll.local import kafka_jars

GOOD_MVN = """
for argument in "$@"; do case "$argument" in -DoutputDirectory=*) out="${argument#*=}";; esac; done
echo run >> "$DOLL_CACHE_DIR/../maven-runs"
sleep 0.3
mkdir -p "$out" && touch "$out/kafka_2.13-4.1.1.jar"
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a PATH of one folder with what the scripts need: what the test installs goes there too."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("mkdir", "touch", "sleep"):
        (programs / name).symlink_to(next(Path(d) / name for d in ("/bin", "/usr/bin") if (Path(d) / name).exists()))
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("DOLL_CACHE_DIR", str(tmp_path / "cache"))
    return programs


def install(programs: Path, name: str, script: str) -> None:
    program = programs / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def install_java(programs: Path, version: str) -> None:
    install(programs, "java", f"echo 'openjdk version \"{version}\" 2025-01-01' >&2")


def test_the_pom_pins_every_version_exactly() -> None:
    root = ET.parse(kafka_jars.pom_path()).getroot()
    versions = [node.text for node in root.iter() if node.tag.rpartition("}")[2] in ("version", "kafka.version")]
    assert len(versions) == 5
    assert all(text and (text == "${kafka.version}" or text[0].isdigit()) for text in versions)
    assert kafka_jars.folder().name == "kafka-4.1.1"


def test_without_java_the_error_says_what_to_install(machine: Path) -> None:
    expected = r"no Java >= 17 .*apt-get .*conda install .*DOLL_KAFKA_HOME.*docker run .*kafka\.address"
    with pytest.raises(ServiceUnavailableError, match=expected):
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


def test_without_maven_an_empty_cache_is_an_error_and_a_filled_one_is_not(machine: Path) -> None:
    install_java(machine, "17")
    with pytest.raises(ServiceUnavailableError, match=r"no Maven \(mvn\) on PATH"):
        kafka_jars.ensure(print)
    kafka_jars.folder().mkdir(parents=True)
    assert kafka_jars.ensure(print) == kafka_jars.folder()


def test_an_unpacked_kafka_takes_the_place_of_maven(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_java(machine, "17")
    home = tmp_path / "kafka_2.13-4.1.1"
    monkeypatch.setenv("DOLL_KAFKA_HOME", str(home))
    with pytest.raises(ServiceUnavailableError, match=r"DOLL_KAFKA_HOME: expected .* kafka_2\.13-\*\.jar"):
        kafka_jars.ensure(print)
    (home / "libs").mkdir(parents=True)
    (home / "libs" / "kafka_2.13-4.1.1.jar").touch()
    assert kafka_jars.ensure(print) == home / "libs"


def test_the_cache_is_filled_once(machine: Path, tmp_path: Path) -> None:
    install_java(machine, "17")
    install(machine, "mvn", GOOD_MVN)
    said: list[str] = []
    assert [path.name for path in kafka_jars.ensure(said.append).iterdir()] == ["kafka_2.13-4.1.1.jar"]
    kafka_jars.ensure(said.append)
    assert len(said) == 1
    assert (tmp_path / "maven-runs").read_text() == "run\n"


@pytest.mark.parametrize("script", ["echo 'no route to host'; exit 1", "echo 'no route to host'"])
def test_when_maven_fails_its_words_are_shown_and_the_cache_stays_empty(machine: Path, script: str) -> None:
    install_java(machine, "17")
    install(machine, "mvn", script)
    with pytest.raises(ServiceUnavailableError, match=r"(?s)Maven cannot fetch.*no route to host"):
        kafka_jars.ensure(print)
    assert [path.name for path in kafka_jars.folder().parent.iterdir()] == ["kafka-4.1.1.lock"]


def test_runs_side_by_side_take_turns(machine: Path, tmp_path: Path) -> None:
    install_java(machine, "17")
    install(machine, "mvn", GOOD_MVN)
    runs = [
        subprocess.Popen([sys.executable, "-m", "doll.local.kafka_jars"], env=dict(os.environ), stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    said = [run.communicate(timeout=300)[0].decode() for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert all(text.endswith(f"{kafka_jars.folder()}\n") for text in said)
    assert (tmp_path / "maven-runs").read_text() == "run\n"
