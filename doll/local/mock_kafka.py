"""librdkafka's mock broker in a child process: a fallback for trying DOLL without Java.

Limits: it keeps about 5 MB per partition in memory and then drops the oldest records; it has no retention, transactions
or access control; topics are created through this module, not by an admin client; a fetch without new records always
waits for its full timeout. Do not use it for data that must not be lost.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

from doll.errors import ServiceUnavailableError
from doll.kafka.clients import librdkafka_path
from doll.local import processes

KEPT_BYTES_PER_PARTITION: Final = 5 * 1024 * 1024


class MockKafka(processes.LocalServer):
    """One mock broker.

    Args:
        folder: folder of its log.
        topics: topics to create at the start, with their numbers of partitions.
    """

    _grace_s: ClassVar[float] = 2.0

    def __init__(self, folder: Path, topics: Mapping[str, int]) -> None:
        super().__init__(folder / "mock-kafka.log")
        self._topics = dict(topics)
        self.address = ""

    def start(self) -> None:
        """Start it and create its topics; needs a build of confluent-kafka with a mock cluster."""
        command = [sys.executable, "-m", "doll.local.mock_kafka"]
        self._process = processes.spawn(command, self.log_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.address = self._answer()["address"]
        for name, partitions in self._topics.items():
            self.create_topic(name, partitions)

    def create_topic(self, name: str, partitions: int) -> None:
        """Create a topic.

        Raises:
            ServiceUnavailableError: it exists already, or the process has ended.
        """
        if self._process is None or self._process.stdin is None:
            raise ServiceUnavailableError("the mock broker is not running")
        self._process.stdin.write(json.dumps({"name": name, "partitions": partitions}).encode() + b"\n")
        self._process.stdin.flush()
        if "error" in (answer := self._answer()):
            raise ServiceUnavailableError(f"the mock broker cannot create topic {name}: {answer['error']}")

    def _answer(self) -> dict[str, Any]:
        stdout = self._process.stdout if self._process is not None else None
        if stdout is None or not (line := stdout.readline()):
            self.stop()
            raise ServiceUnavailableError(f"the mock broker does not start:\n{processes.tail(self.log_path)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self, grace_s: float | None = None) -> None:
        """Stop it; its records are lost. It may be called again."""
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
        super().stop(grace_s)


def main() -> int:
    """The child process: writes one JSON line with the address and one for each input line; exits at end of input."""
    lib = ctypes.CDLL(librdkafka_path())
    for function in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_mock_cluster_new"):
        getattr(lib, function).restype = ctypes.c_void_p
    lib.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
    lib.rd_kafka_err2str.restype = ctypes.c_char_p
    reason = ctypes.create_string_buffer(512)
    producer, conf = 0, ctypes.c_void_p(lib.rd_kafka_conf_new())
    client = ctypes.c_void_p(lib.rd_kafka_new(producer, conf, reason, len(reason)))
    cluster = ctypes.c_void_p(lib.rd_kafka_mock_cluster_new(client, 1))
    if not cluster:
        raise ServiceUnavailableError(
            f"librdkafka cannot create a mock cluster: {reason.value.decode() or 'no reason given'}"
        )
    _write({"address": lib.rd_kafka_mock_cluster_bootstraps(cluster).decode()})
    for line in sys.stdin:
        topic = json.loads(line)
        error = lib.rd_kafka_mock_topic_create(cluster, topic["name"].encode(), topic["partitions"], 1)
        _write({"error": lib.rd_kafka_err2str(error).decode()} if error else {"created": topic["name"]})
    return 0


def _write(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
