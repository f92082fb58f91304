"""What a shadow costs the users: `python -m benchmarks.shadow [--seconds 2] [--rounds 40]`.

Three model servers log their answers: one with a shadow (`--shadow`), one without, and another one without, which shows
the noise of the measurement. They are measured in turn, in another order each round, by connections that pause between
two requests. A ratio is the median over the rounds. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Final

from doll.config import parse
from doll.kafka.topics import ensure
from doll.local.processes import free_port
from doll.local.stack import local_stack

from benchmarks.serving import Asking, Load, Publisher, server

GOAL: Final = 1.03
CONNECTIONS: Final = 4
PAUSE_S: Final = 0.02
SERVERS: Final = {"shadow": ["--shadow", "1"], "none": [], "none again": []}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as started:
        folder = Path(temporary)
        answers = parse(json.dumps({"job": "answers", "task": {"class": "a:B"}, "data": {"workers": 1}}))
        stack = started.enter_context(local_stack(answers, folder / "stack", lambda text: None))
        ensure(answers, stack.services)
        publisher = Publisher(folder, stack.services.kafka)
        ports = {name: free_port() for name in SERVERS}
        for name, more in SERVERS.items():
            words = [str(publisher.folder), "--port", str(ports[name]), "--log-answers", answers.topic("samples")]
            words += more
            started.enter_context(server([sys.executable, "-m", "doll", "serve", *words], ports[name]))
        asked, orders = Asking(), random.Random(0)
        loads: dict[str, list[Load]] = {name: [] for name in SERVERS}
        for turn in range(options.rounds + 1):
            for name in orders.sample(list(SERVERS), len(SERVERS)):
                seconds = options.seconds if turn else 1.0
                load_of = asked(ports[name], "/v2/models/digits/infer", CONNECTIONS, seconds, pause_s=PAUSE_S)
                if load_of.errors:
                    raise SystemExit(f"{name}: {load_of.errors} requests failed")
                if turn:  # the first one warms
                    loads[name].append(load_of)
    for field in ("p50_ms", "p99_ms"):
        values = {name: [getattr(each, field) for each in of] for name, of in loads.items()}
        medians = ", ".join(f"{name} {statistics.median(of):.2f}" for name, of in values.items())
        with_shadow, noise = (
            statistics.median(a / b for a, b in zip(values[name], values["none"], strict=True))
            for name in ("shadow", "none again")
        )
        print(f"{field}: {medians}; with a shadow {with_shadow:.3f} of without, noise {noise:.3f} (goal: {GOAL})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
