"""What a job keeps of its rate where its hosts are far from each other, and what it loses where they are cut apart.

    python -m benchmarks.hosts --policies doll,isp,essp,diloco --links none "1 ms, 1 Gbit/s" "20 ms, 100 Mbit/s"
    python -m benchmarks.hosts --policies doll --links "20 ms, 0.1 %" --faults 60

A job keeps running while its network changes, and each network has its turn several times: the rates are compared with
those of the same processes a minute before. Needs root, TUN devices and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from doll.errors import ServiceUnavailableError

from benchmarks.hosts import timeline
from benchmarks.hosts.faults import inject, make_plan
from benchmarks.hosts.job import RunningJob, Site, host_names, paced_job
from benchmarks.hosts.network import Network
from benchmarks.hosts.router import Link
from benchmarks.tables import Table

_UNITS: Final = {"ms": 1e-3, "Mbit/s": 1e6, "Gbit/s": 1e9, "%": 1e-2}
_RECORDS: Final = 200_000  # of a stream: a run must not come to its end


def link_of(text: str) -> Link:
    """From `none`, or `20 ms, 100 Mbit/s, 0.1 %` in any order: delay one way, of a host's card, of packets.

    Raises:
        argparse.ArgumentTypeError: it is something else.
    """
    values: dict[str, float] = {}
    for part in [] if text == "none" else text.split(","):
        match = re.fullmatch(r"\s*([0-9.]+) ?(ms|Mbit/s|Gbit/s|%)\s*", part)
        if match is None:
            raise argparse.ArgumentTypeError(f"expected none or '20 ms, 100 Mbit/s, 0.1 %', got {text!r}")
        number, unit = float(match[1]), match[2]
        key = {"ms": "delay_s", "%": "loss"}.get(unit, "bits_per_s")
        values[key] = number * _UNITS[unit]
    return Link(**values)


def policy_of(name: str, workers: int, batches: int) -> dict[str, Any]:
    """The section of a policy; with `batches` batches of each worker in an update, where it has such a number."""
    own = {"doll": {"group_size": workers * batches}, "diloco": {"local_batches": batches}}
    return {"name": name, **own.get(name, {})}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__.splitlines()[0])
    parser.add_argument("--policies", default="doll,isp,essp,diloco")
    parser.add_argument(
        "--links", nargs="+", default=["none", "1 ms, 1 Gbit/s", "20 ms, 1 Gbit/s", "20 ms, 100 Mbit/s"]
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batch-s", type=float, default=0.18, help="seconds of a batch")
    parser.add_argument(
        "--batches", type=int, default=4, help="of each worker in an update of doll, in a round of diloco"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement, at least")
    parser.add_argument("--rounds", type=int, default=2, help="how often each network has its turn")
    parser.add_argument("--faults", type=int, default=0, help="cut hosts apart and kill roles, on the first link")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--sysctl", action="append", default=[], metavar="NAME=VALUE",
        help="of net.ipv4 on every host, such as tcp_slow_start_after_idle=0; may be repeated",
    )  # fmt: skip
    parser.add_argument("--contributions", default="float32", help="blobs.contributions")
    parser.add_argument("--timeline", action="store_true", help="say how long each step of a round takes")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--keep", type=Path, help="folder for logs and job files; default: one that is deleted")
    options = parser.parse_args()
    links = {text: link_of(text) for text in options.links}
    try:
        with tempfile.TemporaryDirectory(prefix="doll-hosts-") as folder:
            results = run(options, links, options.keep or Path(folder))
    except ServiceUnavailableError as exc:
        sys.exit(str(exc))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results, options).markdown())
    if any(not result["audit"]["ok"] for result in results):
        sys.exit(4)


def run(options: argparse.Namespace, links: dict[str, Link], folder: Path) -> list[dict[str, Any]]:
    """One job after the other; the figures of each."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[timeline.FOLDER_ENV] = str(folder)
    names = host_names(options.workers)
    settings = dict(item.split("=", 1) for item in options.sysctl)
    results = []
    with (
        Network(names, folder / "router.log", seed=options.seed, settings=settings) as network,
        Site(network, folder, say) as site,
    ):
        for policy in options.policies.split(","):
            section = policy_of(policy, options.workers, options.batches)
            config = paced_job(
                f"hosts-{policy}", section, workers=options.workers, batch_s=options.batch_s,
                blobs={"contributions": options.contributions},
            )  # fmt: skip
            say(f"{policy}: filling its stream")
            network.set_link(Link())
            site.fill(config, _RECORDS // options.workers)
            with RunningJob(site, config, _timed() if options.timeline else None) as job:
                result: dict[str, Any] = {"policy": policy, "load": os.getloadavg()[0]}
                if options.faults:
                    network.set_link(next(iter(links.values())))
                    plan = make_plan(options.faults, options.seed, names[3:])
                    result["faults"] = inject(job, plan, say)
                else:
                    result["rates"] = measure(job, network, links, options)
                result["restarts"] = len(job.restarts)
                result["load_after"] = os.getloadavg()[0]
                network.set_link(Link())
                report = job.stop()
            result["audit"] = {"ok": report.ok, "summary": report.summary(), "violations": report.violations()}
            say(f"{policy}: {report.summary()}; packets: {network.counts()}")
            results.append(result)
    return results


def _timed() -> dict[str, str]:
    """Entry points of roles that log their steps."""
    return {role: f"benchmarks.hosts.timeline:{role}_role" for role in ("ps", "worker")}


def measure(
    job: RunningJob, network: Network, links: dict[str, Link], options: argparse.Namespace
) -> dict[str, list[float]]:
    """Samples per second on each link, in turn."""
    rates: dict[str, list[float]] = {text: [] for text in links}
    job.wait_for_updates(3)
    for _ in range(options.rounds):
        for text, link in links.items():
            network.set_link(link)
            rates[text].append(job.rate(options.seconds))
            if options.timeline:
                now_s = time.monotonic()
                lines = timeline.rows(Path(os.environ[timeline.FOLDER_ENV]))
                say(timeline.text(timeline.steps(lines, now_s - options.seconds, now_s).items()))
            say(f"  {job.config.job}, {text}: {rates[text][-1]:.0f} samples/s (load {os.getloadavg()[0]:.1f})")
    return rates


def table(results: Sequence[dict[str, Any]], options: argparse.Namespace) -> Table:
    """Rates, and the share of the first link's that a job keeps on the others; or recoveries."""
    if options.faults:
        shown = Table(
            f"{options.faults} faults on {options.links[0]}",
            ("policy", "faults", "median recovery s", "longest s", "restarts", "audit"), left=("policy", "audit"),
        )  # fmt: skip
        for result in results:
            seconds = [fault["recovery_s"] for fault in result["faults"]]
            cells = (f"{len(seconds)}", f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}")
            shown.rows.append((result["policy"], *cells, str(result["restarts"]), result["audit"]["summary"]))
        return shown
    shown = Table(
        f"samples/s, and the share of those on `{options.links[0]}`; {options.workers} workers, batches of "
        f"{options.batch_s:g} s, {options.batches} of each worker in an update of doll and a round of diloco",
        ("policy", "load", *options.links), left=("policy",),
    )  # fmt: skip
    for result in results:
        means = {text: statistics.fmean(rates) for text, rates in result["rates"].items()}
        base = means[options.links[0]]
        cells = [f"{mean:.0f} ({mean / base:.2f})" for mean in means.values()]
        shown.rows.append((result["policy"], f"{result['load']:.1f}", *cells))
    return shown


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
