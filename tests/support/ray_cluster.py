"""A real Ray cluster on this machine, whose nodes are raylets with the labels of a market."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final, Self

MARKET_LABEL: Final = "ray.io/market-type"
_PREEMPTION: Final = "DRAIN_NODE_REASON_PREEMPTION"
_MEMORY_BYTES: Final = 80_000_000  # of a node's store of objects, the least that Ray takes
# A node that died is known after about three seconds in place of fifteen.
_HEALTH: Final = {
    "health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3,
}  # fmt: skip


def unavailable_reason() -> str | None:
    """None if a cluster can be started here; else what is missing."""
    if importlib.util.find_spec("ray") is None:
        return "ray is not installed: pip install 'doll-online[ray]'"
    return None


class RayCluster:
    """A head without CPUs, and nodes that are added; all end with this process."""

    def __init__(self) -> None:
        from ray._private.state import GlobalState
        from ray._raylet import GcsClientOptions  # type: ignore[attr-defined]
        from ray.cluster_utils import Cluster

        os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # other tests use this machine's memory, too
        os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
        os.environ.setdefault("RAY_usage_stats_enabled", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # of 15 otherwise: on a busy machine nothing is left for them
        self._folder = Path(tempfile.mkdtemp(prefix="ray-"))
        # Else Ray writes the address where everybody on this machine looks for a cluster.
        (self._folder / "ray").mkdir()
        self._tmpdir_before = os.environ.get("RAY_TMPDIR")
        os.environ["RAY_TMPDIR"] = str(self._folder)
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0, "object_store_memory": _MEMORY_BYTES, "include_dashboard": False,
                "_system_config": _HEALTH, "temp_dir": str(self._folder),
            },
        )  # fmt: skip
        self._nodes: dict[str, tuple[str, Any]] = {}  # market and handle, by id
        self._draining: set[str] = set()
        self.address = str(self._cluster.address)
        self._tables = GlobalState()
        self._tables._initialize_global_state(GcsClientOptions.create(self.address, None, True, False))

    def add(self, market: str, cpus: int = 1) -> str:
        """Add a node; its id."""
        labels = {MARKET_LABEL: market}
        node = self._cluster.add_node(
            num_cpus=cpus, object_store_memory=_MEMORY_BYTES, labels=labels, env_vars={"RAY_TMPDIR": str(self._folder)}
        )
        self._nodes[node.node_id] = (market, node)
        return str(node.node_id)

    def ensure(self, market: str, count: int, cpus: int = 8) -> None:
        """Add nodes until so many of this market will stay."""
        there = [id_ for id_, (of, _) in self._nodes.items() if of == market and id_ not in self._draining]
        for _ in range(count - len(there)):
            self.add(market, cpus)

    def drain(self, node: str, in_s: int, why: str = "spot notice") -> None:
        """Tell the cluster that a node will be taken in so many seconds; its owner takes it with `kill`."""
        argv = [str(Path(sys.executable).with_name("ray")), "drain-node", f"--address={self.address}"]
        argv += [f"--node-id={node}", f"--reason={_PREEMPTION}", f"--reason-message={why}"]
        subprocess.run([*argv, f"--deadline-remaining-seconds={in_s}"], check=True, stdout=subprocess.DEVNULL)
        self._draining.add(node)

    def nodes_of_actors(self) -> list[str]:
        """The nodes on which actors run that were neither drained nor killed, the oldest actor's first."""
        alive = [row for row in self._tables.actor_table(None).values() if row["State"] == "ALIVE"]
        nodes = [row["Address"]["NodeID"] for row in sorted(alive, key=lambda row: row["StartTime"])]
        return [node for node in dict.fromkeys(nodes) if node in self._nodes and node not in self._draining]

    def kill(self, node: str) -> None:
        """End a node at once, with all that runs on it."""
        self._cluster.remove_node(self._nodes.pop(node)[1], allow_graceful=False)

    def take_drained(self) -> None:
        """The owner of the drained nodes takes them."""
        for node in self._draining & set(self._nodes):
            self.kill(node)

    def close(self) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()
        if self._tmpdir_before is None:
            os.environ.pop("RAY_TMPDIR", None)
        else:
            os.environ["RAY_TMPDIR"] = self._tmpdir_before
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
