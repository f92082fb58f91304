"""How clients of Redis pack and parse."""

from __future__ import annotations

from typing import Any

import pytest
from doll.control.redis_streams import streams_pattern
from doll.local.redis_server import LocalRedis
from doll.services import Services
from doll.storage.redis_client import connect_redis, delete_keys, server_pid

pytestmark = pytest.mark.slow  # starts servers


def test_redis_client_packs_in_python_parses_with_hiredis_and_keeps_bytes(redis_server: LocalRedis) -> None:
    from redis._parsers.hiredis import _HiredisParser
    from redis.connection import PythonRespSerializer

    client = connect_redis(Services("", redis_server.address))
    value = bytes(range(256)) * 40_000
    try:
        client.set("blob", memoryview(value))
        assert client.get("blob") == value
        connection: Any = client.connection_pool.make_connection()
        assert isinstance(connection._command_packer, PythonRespSerializer)
        assert connection._parser.__class__ is _HiredisParser
    finally:
        client.delete("blob")
        client.close()


def test_a_server_is_known_by_its_process_and_silence_by_none(redis_server: LocalRedis) -> None:
    assert server_pid(Services("", redis_server.address)) == redis_server.pid
    assert server_pid(Services("", "redis://127.0.0.1:1/0")) is None


def test_keys_of_a_glob_are_deleted_and_counted(redis_server: LocalRedis) -> None:
    services = Services("", redis_server.address)
    client = connect_redis(services)
    kept = ("doll:{one}:g:1", "doll:{one}:ab:g:1", "doll:{onemore}:ab:control:1")
    for key in ("doll:{one}:ab:control:1", "doll:{one}:ab:control:1:cd", "doll:{one}:ef:control:1", *kept):
        client.set(key, b"")
    assert delete_keys(services, streams_pattern("one")) == 3
    assert delete_keys(services, streams_pattern("one")) == 0
    assert [client.exists(key) for key in kept] == [1, 1, 1]
    client.delete(*kept)
    assert delete_keys(Services("", "redis://127.0.0.1:1/0"), "*") == 0
