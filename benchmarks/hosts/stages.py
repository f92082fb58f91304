"""A virtual worker whose stages are on hosts of their own, while stages are killed, frozen and cut off.

    python -m benchmarks.hosts.stages --faults 40 --seed 1

Each fault hits one stage: its process is killed, or stops for some seconds, or its host is cut from another host of the
gang, from a service, or from all. The next fault comes when updates go on. The end is an audit. Needs root, TUN devices
and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from doll.errors import ServiceUnavailableError

from benchmarks.hosts.job import SERVICES, RunningJob, Site, host_names, paced_job
from benchmarks.hosts.network import Network
from benchmarks.hosts.router import Link
from doll_lab.drill.actions import children_of

_STAGES: Final = 3
_KINDS: Final = ("kill", "kill the machine", "freeze", "cut")
_HOLD_S: Final = (0.5, 12.0)
_RECOVERY_S: Final = 180.0
_RECORDS: Final = 400_000
_WAYS: Final = ("both ways", "to it", "from it")


@dataclass(frozen=True, slots=True)
class StageFault:
    """One fault of the stage `host`. `others`: hosts that it is cut from, in the direction `way`."""

    kind: str
    host: str
    hold_s: float = 0.0
    others: tuple[str, ...] = ()
    way: str = ""

    def cuts(self) -> list[tuple[str, str]]:
        """As of `Network.cut`."""
        pairs: list[tuple[str, str]] = []
        for other in self.others:
            pairs += [(self.host, other)] if self.way != "from it" else []
            pairs += [(other, self.host)] if self.way != "to it" else []
        return pairs

    def text(self) -> str:
        """What happens, in a few words."""
        where = f" from {' and '.join(self.others)}, {self.way}" if self.others else ""
        return f"{self.kind} {self.host}{where}" + (f", {self.hold_s:.1f} s" if self.hold_s else "")


def make_plan(number: int, seed: int) -> list[StageFault]:
    """So many faults, of each kind about as many."""
    rng = random.Random(seed)
    hosts = [f"stage-0-{stage}" for stage in range(_STAGES)]
    plan = []
    for at in range(number):
        kind, host = _KINDS[at % len(_KINDS)], rng.choice(hosts)
        hold_s = rng.uniform(*_HOLD_S) if kind in ("freeze", "cut") else 0.0
        if kind == "cut":
            rest = tuple(other for other in (*hosts, "worker-0", *SERVICES) if other != host)
            others = rest if rng.random() < 0.25 else (rng.choice(rest),)
            plan.append(StageFault(kind, host, hold_s, others, rng.choice(_WAYS)))
        else:
            plan.append(StageFault(kind, host, hold_s))
    return plan


def inject(job: RunningJob, plan: Sequence[StageFault], say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Carry out one fault after the other, each once the job has recovered from the one before; what each did.

    Raises:
        TimeoutError: no update came for a long time after a fault.
    """
    lines = []
    job.wait_for_updates(3)
    for number, fault in enumerate(plan, 1):
        before, handle = len(job.updates), job.supervisor.handles().get(fault.host)
        children = [] if handle is None else children_of(handle.pid)
        job.supervisor.reset_failures("worker-0")  # it ends with its stage
        if handle is not None and fault.kind == "kill the machine":
            job.supervisor.reset_failures(fault.host)
            handle.kill()
        for child in children if fault.kind in ("kill", "freeze") else ():
            os.kill(child, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        job.site.network.cut(fault.cuts())
        job.follow(fault.hold_s)
        meanwhile = len(job.updates) - before
        job.site.network.cut(())
        for child in children if fault.kind == "freeze" else ():
            os.kill(child, signal.SIGCONT)
        healed_s = time.monotonic()
        job.wait_for_updates(2, _RECOVERY_S)
        recovery_s = job.updates[-1][0] - healed_s
        lines.append({"fault": fault.text(), "updates_meanwhile": meanwhile, "recovery_s": round(recovery_s, 2)})
        say(
            f"{number} of {len(plan)}: {fault.text()}: {meanwhile} updates meanwhile, two more {recovery_s:.1f} s after"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts.stages", description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch-s", type=float, default=0.02, help="seconds of a batch")
    parser.add_argument("--delay-ms", type=float, default=1.0, help="of a packet, one way")
    parser.add_argument("--timeout-s", type=float, default=4.0, help="worker.pipeline.stage_timeout_s")
    parser.add_argument("--keep", type=Path, help="folder for the files of the run")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()

    def say(text: str) -> None:
        sys.stderr.write(f"{text}\n")

    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        config = paced_job(
            "apart", {"name": "wsp", "wave_batches": 4, "clock_distance": 1}, workers=1, batch_s=options.batch_s,
            worker={"pipeline": {"stages": _STAGES, "remote": True, "stage_timeout_s": options.timeout_s}},
        )  # fmt: skip
        try:
            with (
                Network(host_names(1, _STAGES), folder / "router.log", seed=options.seed) as network,
                Site(network, folder, say) as site,
            ):
                network.set_link(Link(delay_s=1e-3 * options.delay_ms))
                site.fill(config, _RECORDS)
                with RunningJob(site, config) as job:
                    lines = inject(job, make_plan(options.faults, options.seed), say)
                    report = job.stop()
        except ServiceUnavailableError as exc:
            raise SystemExit(str(exc)) from exc
    result = {"ok": report.ok, "summary": report.summary(), "faults": lines}
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1))
    sys.stdout.write(f"{report.summary()}\n")
    raise SystemExit(0 if report.ok else 4)


if __name__ == "__main__":
    main()
