"""A program that trains with three stages on this machine, and on three hosts, and writes FOLDER/pushes.json.

python stages_apart.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.hosts.network import Network
from benchmarks.hosts.router import Link
from doll.pipeline.links.tcp import Address
from pipeline_rig import RemoteRig, Rig, trained

NETWORK: list[Network] = []


class Apart(RemoteRig):
    """Stages in network namespaces of their own."""

    def place(self, stage: int) -> Address:
        (network,) = NETWORK
        network.enter(f"host-{stage}")
        return Address(network.address(f"host-{stage}"), 0)


def main(folder: Path) -> None:
    arguments = (3, 4, "worker.pipeline.stage_timeout_s=120")
    here = Rig(folder, *arguments)
    pushes = {"here": trained(here)}
    here.engine.close()
    with Network(("worker", "host-0", "host-1", "host-2"), folder / "router.log") as network:
        NETWORK.append(network)
        network.set_link(Link(delay_s=0.002))
        network.enter("worker")
        apart = Apart(folder, *arguments, "worker.pipeline.remote=true")
        pushes["apart"] = trained(apart)
        packets = network.counts()
        apart.engine.close()
        apart.reap()
    result = {"pushes": pushes, "packets": packets, "addresses": list(map(str, apart.addresses))}
    (folder / "pushes.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
