"""When a job's processes do what makes up a round, so that its share of each step can be told.

`ps_role` and `worker_role` are those of `doll.run.local.roles`, which write a line for each step to `$DOLL_TIMELINE`.
Times are seconds of `time.monotonic()`, which all hosts of one machine share. Production code has none of this.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

FOLDER_ENV: Final = "DOLL_TIMELINE"


class _Log:
    def __init__(self, name: str) -> None:
        self._file = open(Path(os.environ[FOLDER_ENV]) / f"{name}.jsonl", "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        self._name = name

    def note(self, what: str, begin_s: float, end_s: float, **more: Any) -> None:
        line = {"who": self._name, "what": what, "begin_s": begin_s, "end_s": end_s, **more}
        self._file.write(json.dumps(line) + "\n")

    def wrap(self, owner: type, method: str, what: str, about: Callable[..., dict[str, Any]] = lambda *_: {}) -> None:
        """Note each call of a method."""
        call = getattr(owner, method)

        @functools.wraps(call)
        def timed(this: Any, *args: Any, **kwargs: Any) -> Any:
            begin_s = time.monotonic()
            try:
                return call(this, *args, **kwargs)
            finally:
                self.note(what, begin_s, time.monotonic(), **about(*args))

        setattr(owner, method, timed)


def ps_role(*arguments: Any) -> int:
    """The parameter server."""
    from doll.ps.channels.control_links import ControlLinks
    from doll.ps.model.model_host import ModelHost
    from doll.ps.server import ParameterServer
    from doll.records.control import Grant, Push
    from doll.run.local import roles

    log = _Log("server")

    def of_push(event: Any) -> dict[str, Any]:
        if not isinstance(event, Push):
            return {}
        return {"push": event.batches[-1].grant_id if event.batches else -1, "worker": event.worker}

    def of_send(worker: int, record: Any) -> dict[str, Any]:
        return {"grant": record.grant_ids[-1], "worker": worker} if isinstance(record, Grant) else {}

    log.wrap(ParameterServer, "feed", "feed", of_push)
    log.wrap(ControlLinks, "send", "send", of_send)
    for method in ("prefetch", "fetch", "apply", "publish", "tidy"):
        log.wrap(ModelHost, method, method)
    return roles.ps_role(*arguments)


def worker_role(*arguments: Any) -> int:
    """A worker."""
    from doll.consumers.channels.control_link import ControlLink
    from doll.consumers.compute.gradient import CachedVersion
    from doll.consumers.compute.gradient_engine import GrantHandler
    from doll.records.control import Grant, Push
    from doll.run.local import roles
    from doll.storage.redis_blobs import RedisBlobs

    log = _Log(f"worker-{arguments[-1]}")
    use = ControlLink.__dict__["run"]

    async def run(link: Any, deliver: Callable[[list[Any]], object], on_change: Callable[[], object]) -> None:
        def noted(records: list[Any]) -> object:
            now = time.monotonic()
            for record in records:
                if isinstance(record, Grant):
                    log.note("granted", now, now, grant=record.grant_ids[-1])
            return deliver(records)

        await use(link, noted, on_change)

    setattr(ControlLink, "run", run)  # noqa: B010
    log.wrap(ControlLink, "send", "pushed", lambda record: (
        {"push": record.batches[-1].grant_id} if isinstance(record, Push) and record.batches else {}))  # fmt: skip
    log.wrap(GrantHandler, "handle", "handle", lambda grant, *_: {"grant": grant.grant_ids[-1]})
    log.wrap(CachedVersion, "load", "load", lambda grant: {"grant": grant.grant_ids[-1]})
    log.wrap(RedisBlobs, "put", "put")
    return roles.worker_role(*arguments)


def rows(folder: Path) -> list[dict[str, Any]]:
    """All lines of all processes, by time."""
    lines = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    return sorted(lines, key=lambda line: line["begin_s"])


def steps(lines: Sequence[dict[str, Any]], from_s: float, to_s: float) -> dict[str, float]:
    """Mean seconds of each step of a round between two times, in their order."""
    spans: dict[str, list[float]] = defaultdict(list)
    inside = [line for line in lines if from_s <= line["begin_s"] < to_s]
    granted = {line["grant"]: line["begin_s"] for line in inside if line["what"] == "granted"}
    sent = {line["grant"]: line["begin_s"] for line in inside if line["what"] == "send" and "grant" in line}
    pushed = {line["push"]: line["end_s"] for line in inside if line["what"] == "pushed" and "push" in line}
    came = {line["push"]: line["begin_s"] for line in inside if line["what"] == "feed" and "push" in line}
    handled = {line["grant"]: line for line in inside if line["what"] == "handle"}
    for grant, at_s in sent.items():
        if grant in granted:
            spans["1 grant on its way"].append(granted[grant] - at_s)
        if grant in handled:
            spans["2 grant waits at the worker"].append(handled[grant]["begin_s"] - granted.get(grant, at_s))
    for line in inside:
        if line["what"] == "load":
            spans["3 weights read"].append(line["end_s"] - line["begin_s"])
        elif line["what"] == "put" and line["who"] != "server":
            spans["5 gradient stored"].append(line["end_s"] - line["begin_s"])
        elif line["what"] in ("fetch", "prefetch", "apply", "publish", "tidy"):
            spans[f"8 server: {line['what']}"].append(line["end_s"] - line["begin_s"])
    loads = {line["grant"]: line for line in inside if line["what"] == "load"}
    puts = sorted((line["begin_s"], line["who"]) for line in inside if line["what"] == "put")
    for grant, line in handled.items():
        if grant in loads:
            stored = next((at_s for at_s, who in puts if who == line["who"] and at_s > loads[grant]["end_s"]), None)
            if stored is not None and stored <= line["end_s"]:
                spans["4 computed"].append(stored - loads[grant]["end_s"])
        if grant in pushed:
            spans["6 push waits at the worker"].append(pushed[grant] - line["end_s"])
    for push, at_s in came.items():
        if push in pushed:
            spans["7 push on its way, and waits for the server"].append(at_s - pushed[push])
    applied = [line["begin_s"] for line in inside if line["what"] == "apply"]
    spans["9 round"] = [after - before for before, after in pairwise(applied)]
    last = [max((at_s for at_s in came.values() if at_s <= apply_s), default=apply_s) for apply_s in applied]
    spans["8 server: last push to apply"] = [apply_s - at_s for apply_s, at_s in zip(applied, last, strict=True)]
    return {name: statistics.fmean(spans[name]) for name in sorted(spans) if spans[name]}


def text(found: Iterable[tuple[str, float]]) -> str:
    """One step on each line."""
    return "\n".join(f"  {name:45} {1000 * seconds:7.0f} ms" for name, seconds in found)
