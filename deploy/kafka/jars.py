"""Resolve the jars of a version of Kafka, and write their coordinates and checksums to doll/local/kafka-jars.txt.

    .venv/bin/python deploy/kafka/jars.py 4.1.1

The jars come from Maven Central ($DOLL_MAVEN_REPOSITORY: from a mirror). Whoever fetches them later trusts the
checksums of this file, so look at what has changed in it before you commit it.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from pathlib import Path

from doll.local.kafka_jars import LIST, REPOSITORY_ENV
from jgo.maven import MavenContext

SLF4J = "1.7.36"  # Kafka logs through it; slf4j-simple writes to its standard error


def main() -> None:
    mirror = os.environ.get(REPOSITORY_ENV)
    with tempfile.TemporaryDirectory() as folder:
        context = MavenContext(repo_cache=Path(folder), remote_repos={"mirror": mirror} if mirror else None, timeout=60)
        wanted = [f"org.apache.kafka:kafka_2.13:{sys.argv[1]}", f"org.slf4j:slf4j-simple:{SLF4J}"]
        inputs, others = context.resolver.resolve([context.create_dependency(coordinates) for coordinates in wanted])
        lines = []
        for needed in (*inputs, *others):
            digest = hashlib.sha256(needed.artifact.resolve().read_bytes()).hexdigest()
            lines.append(f"{needed.groupId}:{needed.artifactId}:{needed.version} {digest}\n")
    head = [line for line in LIST.read_text().splitlines(keepends=True) if line.startswith("#")]
    LIST.write_text("".join((*head, *sorted(lines))))
    print(f"{LIST}: {len(lines)} jars")


if __name__ == "__main__":
    main()
