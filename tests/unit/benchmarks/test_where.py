"""CPU time by thread adds up to all cores, and samples of py-spy are counted by function."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from benchmarks.probes import set_kernel_name
from benchmarks.threads import ThreadSampler, ThreadUse, plain_name, read_threads
from benchmarks.where import by_function, by_thread, function_table, thread_table


def test_the_rows_add_up_to_all_cores() -> None:
    uses = {
        ("worker-0", "torch"): ThreadUse(8.0, 0.5),
        ("worker-1", "torch"): ThreadUse(7.0, 0.5),
        ("worker-0", "main"): ThreadUse(0.4, 0.1),
        ("worker-1", "main"): ThreadUse(0.2),
        ("worker-1", "rdk:main"): ThreadUse(0.05),
        ("worker-1", "rdk:broker"): ThreadUse(0.05),
        ("kafka", "data-plane-kaf"): ThreadUse(1.0),
        ("ps", "main"): ThreadUse(0.5),
    }
    rows = by_thread(uses, gradient_s=14.0, others_s=0.3, seconds=10.0, cores=2)
    cpu_s = {(process, thread): use.cpu_s for process, thread, use in rows}
    assert sum(cpu_s.values()) == pytest.approx(20.0)
    assert cpu_s["worker", "torch: gradients"] == pytest.approx(14.0)
    assert cpu_s["worker", "torch: weights, sums, blobs"] == pytest.approx(1.0)
    assert cpu_s["worker", "event loop"] == pytest.approx(0.6)
    assert cpu_s["worker", "librdkafka"] == pytest.approx(0.1)
    assert cpu_s["idle", ""] == pytest.approx(2.5)
    assert next(process for process, _, _ in rows) == "worker"
    waits = {thread: use.wait_s for process, thread, use in rows if process == "worker"}
    assert waits["torch: gradients"] == pytest.approx(1.0)
    table = thread_table(rows, "title", 10.0, 2, batches=1000)
    assert ("worker", "torch: gradients", "70.0%", "14.00", "1.00") in table.rows


def test_samples_are_counted_by_the_function_that_ran() -> None:
    lines = [
        "thread (0x7F01): torch_0;run (threading.py);compute (gradient.py);backward (graph.py) 30",
        "thread (0x7F01): torch_0;run (threading.py);compute (gradient.py) 5",
        "thread (0x7F02): MainThread;run (loop.py);backward (graph.py) 10",
        "not a stack",
    ]
    counts = by_function(lines)
    assert sum(counts.values()) == 45
    assert sorted(function for _, function in counts) == [
        "backward (graph.py)",
        "backward (graph.py)",
        "compute (gradient.py)",
    ]
    table = function_table({"worker-0": counts}, "title")
    assert table.rows[0][2:] == ("`backward (graph.py)`", "30", "66.7%")


def test_a_name_has_no_number() -> None:
    assert [plain_name(name) for name in ("rdk:broker12\n", "torch_0", "GC Thread#1", "G1 Conc#0", "42")] == [
        "rdk:broker", "torch", "GC Thread", "G1 Conc", "42",
    ]  # fmt: skip


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs Linux's scheduler statistics")
def test_the_sampler_sees_a_named_thread_that_works() -> None:
    begun, stop = threading.Event(), threading.Event()

    def work() -> None:
        set_kernel_name(threading.get_native_id(), "busy_0")
        begun.set()
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait(10.0)
    sampler = ThreadSampler()
    try:
        sampler.begin({os.getpid(): "tests", 2**22 + 1: "ended before"})
        before_s = sampler_cpu_s()
        while sampler_cpu_s() < before_s + 0.05:
            pass
        sampler.end()
    finally:
        stop.set()
        thread.join()
    assert sampler.uses["tests", "busy"].cpu_s > 0
    assert ("tests", "main") in sampler.uses
    assert sampler.seconds > 0


def sampler_cpu_s() -> float:
    """CPU time of this process's thread `busy`."""
    return sum(use.cpu_s for _, name, use in read_threads(Path("/proc/self")) if name == "busy")
