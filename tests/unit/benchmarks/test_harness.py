"""CPU time is counted once, of the processes that run."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from benchmarks.harness import Bench
from doll.local.forks import ForkServer
from doll.local.stack import Stack
from doll.services import Services
from waiting import WAIT_TIMEOUT_S, until

pytestmark = pytest.mark.slow  # starts a fork server


def test_a_thread_with_the_id_of_a_role_that_has_ended_is_not_counted(tmp_path: Path) -> None:
    bench = Bench(print)
    bench.folder, bench.stack = tmp_path, Stack(Services("", ""), "given", "given")
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    with ForkServer(tmp_path / "server.log", preload=[]) as bench.forks:
        role = bench.start("ps", "sys:exit", [0])
        assert role.wait(WAIT_TIMEOUT_S) == 0
        spinning = bench.start("stubs-0", "timeit:main", [["-n", "1000000000000", "pass"]])
        thread.start()
        try:
            assert thread.native_id is not None
            bench._names[thread.native_id] = bench._names.pop(role.pid)  # the kernel has given the id again
            sampler = bench.sampler()
            until(lambda: {"stubs", "bench"} <= sampler.read().cpu_s.keys(), "both processes use CPU time")
            assert sampler.read().cpu_s.keys() == {"stubs", "bench", "others"}
        finally:
            end.set()
            thread.join()
            spinning.kill()
