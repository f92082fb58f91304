"""How clients of Redis pack and parse."""

from __future__ import annotations

from typing import Any

from doll.local.redis_server import LocalRedis
from doll.services import Services
from doll.storage.redis_client import connect_redis, server_pid


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
