"""What a model server costs beside the model: `doll serve` against the same torch model in bare uvicorn, in one run.

    python -m benchmarks.serving [--seconds 0.3] [--rounds 60] [--connections 64] [--mlserver PYTHON]
        [--litserve PYTHON]

Each server is a process of its own, and so is what asks: connections that are kept open, each of which asks again as
soon as it is answered. The servers are measured in turn, in another order each round: in many short turns, because the
speed of a processor that is shared changes within seconds. `doll serve` follows versions that this program
publishes through shared memory, as a parameter server does: none, then 20 a second. `--mlserver` and `--litserve` name
interpreters of environments that have these packages.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

FEATURES, HIDDEN, CLASSES = 64, 128, 10
SWAPS_PER_S = 20.0
_VERSION = re.compile(rb'"model_version":"(\d+)"')
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)

TASK = f"""
import torch
from doll import Task


class Digits(Task):
    input_shape = ({FEATURES},)
    num_classes = {CLASSES}

    def build_model(self):
        return torch.nn.Sequential(
            torch.nn.Linear({FEATURES}, {HIDDEN}), torch.nn.ReLU(), torch.nn.Linear({HIDDEN}, {HIDDEN}),
            torch.nn.ReLU(), torch.nn.Linear({HIDDEN}, {CLASSES}),
        )

    def decode(self, record):
        raise NotImplementedError
"""
JOB = """
job: digits
task: {class: task.py:Digits}
data: {workers: 1, batch_size: 1}
training: {policy: {name: doll, group_size: 1}}
"""
# The same model as the smallest ASGI application that answers with it.
BARE = f"""
import sys
import msgspec
import torch
import uvicorn

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear({FEATURES}, {HIDDEN}), torch.nn.ReLU(), torch.nn.Linear({HIDDEN}, {HIDDEN}),
    torch.nn.ReLU(), torch.nn.Linear({HIDDEN}, {CLASSES}),
).eval()


async def app(scope, receive, send):
    body = b""
    while True:
        message = await receive()
        body += message["body"]
        if not message.get("more_body"):
            break
    tensor = msgspec.json.decode(body)["inputs"][0]
    with torch.inference_mode():
        output = model(torch.tensor(tensor["data"], dtype=torch.float32).reshape(tensor["shape"]))
    answer = {{"outputs": [{{"name": "output", "shape": list(output.shape), "data": output.reshape(-1).tolist()}}]}}
    data = msgspec.json.encode(answer)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
    await send({{"type": "http.response.start", "status": 200, "headers": headers}})
    await send({{"type": "http.response.body", "body": data}})


uvicorn.run(app, port=int(sys.argv[1]), http="httptools", loop="uvloop", lifespan="off", ws="none", log_level="error",
            access_log=False, proxy_headers=False, server_header=False)
"""
MLSERVER = f"""
import asyncio, sys
import numpy as np, torch
from mlserver import MLModel, MLServer
from mlserver.codecs import NumpyCodec
from mlserver.settings import ModelParameters, ModelSettings, Settings

torch.set_num_threads(1)


class Digits(MLModel):
    async def load(self):
        self.module = torch.nn.Sequential(
            torch.nn.Linear({FEATURES}, {HIDDEN}), torch.nn.ReLU(), torch.nn.Linear({HIDDEN}, {HIDDEN}),
            torch.nn.ReLU(), torch.nn.Linear({HIDDEN}, {CLASSES}),
        ).eval()
        return True

    async def predict(self, payload):
        x = self.decode(payload.inputs[0], default_codec=NumpyCodec)
        with torch.inference_mode():
            output = self.module(torch.from_numpy(np.asarray(x, np.float32))).numpy()
        from mlserver.types import InferenceResponse
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("output", output)])


async def main():
    settings = Settings(http_port=int(sys.argv[1]), grpc_port=int(sys.argv[1]) + 1, metrics_port=int(sys.argv[1]) + 2,
                        parallel_workers=0, debug=False, host="127.0.0.1")
    server = MLServer(settings)
    await server.start([ModelSettings(name="digits", implementation=Digits, parameters=ModelParameters(version="1"))])


asyncio.run(main())
"""
LITSERVE = f"""
import sys
import litserve, torch


class Digits(litserve.LitAPI):
    def setup(self, device):
        torch.set_num_threads(1)
        self.module = torch.nn.Sequential(
            torch.nn.Linear({FEATURES}, {HIDDEN}), torch.nn.ReLU(), torch.nn.Linear({HIDDEN}, {HIDDEN}),
            torch.nn.ReLU(), torch.nn.Linear({HIDDEN}, {CLASSES}),
        ).eval()

    def decode_request(self, request):
        tensor = request["inputs"][0]
        return torch.tensor(tensor["data"], dtype=torch.float32).reshape(tensor["shape"])

    def predict(self, x):
        with torch.inference_mode():
            return self.module(x)

    def encode_response(self, output):
        return {{"outputs": [{{"name": "output", "shape": list(output.shape), "data": output.reshape(-1).tolist()}}]}}


if __name__ == "__main__":
    litserve.LitServer(Digits(), accelerator="cpu").run(port=int(sys.argv[1]), generate_client_file=False)
"""


class Load(NamedTuple):
    """What asking has shown.

    Attributes:
        first_seen: when each version was first answered, in monotonic seconds.
        cpu_us: processor time of the server for each request, which other programs of the machine change least.
    """

    per_s: float
    p50_ms: float
    p99_ms: float
    errors: int
    first_seen: dict[int, float]
    cpu_us: float = 0.0


class _Asker(asyncio.Protocol):
    """One connection that asks again and again."""

    def __init__(self, request: bytes, times: list[float], seen: dict[int, float], pause_s: float = 0.0) -> None:
        self._request = request
        self._pause_s = pause_s
        self._times = times
        self._seen = seen
        self._data = b""
        self.errors = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        if self._transport.is_closing():
            return
        self._asked_s = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._data += data
        head = self._data.find(b"\r\n\r\n")
        if head < 0 or (match := _LENGTH.search(self._data, 0, head)) is None:
            return
        if len(self._data) < head + 4 + int(match[1]):
            return
        self._times.append(time.perf_counter() - self._asked_s)
        if not self._data.startswith(b"HTTP/1.1 200"):
            self.errors += 1
        elif (version := _VERSION.search(self._data, head)) is not None and int(version[1]) not in self._seen:
            self._seen[int(version[1])] = time.monotonic()
        self._data = b""
        if self._pause_s:
            asyncio.get_running_loop().call_later(self._pause_s, self._ask)
        else:
            self._ask()


def request_to(path: str, samples: int) -> bytes:
    """A request of the Open Inference Protocol in JSON."""
    data = np.random.default_rng(0).normal(size=samples * FEATURES).round(3).tolist()
    tensor = {"name": "x", "datatype": "FP32", "shape": [samples, FEATURES], "data": data}
    body = json.dumps({"inputs": [tensor]}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def ask(port: int, request: bytes, connections: int, seconds: float, pause_s: float = 0.0) -> Load:
    """Ask for so long, in this process. `pause_s`: between an answer and the next request of its connection."""
    import uvloop

    times: list[float] = []
    seen: dict[int, float] = {}

    async def run() -> int:
        loop = asyncio.get_running_loop()
        askers = [
            (await loop.create_connection(lambda: _Asker(request, times, seen, pause_s), "127.0.0.1", port))
            for _ in range(connections)
        ]
        await asyncio.sleep(seconds)
        while not times:  # of a machine that others have for so long
            await asyncio.sleep(seconds)
        for transport, _ in askers:
            transport.abort()
        return sum(asker.errors for _, asker in askers)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        errors = runner.run(run())
    p50, p99 = np.percentile(times, [50, 99]) * 1e3
    return Load(len(times) / seconds, float(p50), float(p99), errors, seen)


def _answer_orders(pipe: Any) -> None:
    while True:
        pipe.send(ask(*pipe.recv()))


class Asking:
    """`ask` in a process of its own, one for all turns: a process that begins takes longer than a turn."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        context.Process(target=_answer_orders, args=(theirs,), daemon=True).start()

    def __call__(
        self, port: int, path: str, connections: int, seconds: float, samples: int = 1, pause_s: float = 0.0
    ) -> Load:
        self._pipe.send((port, request_to(path, samples), connections, seconds, pause_s))
        load: Load = self._pipe.recv()
        return load


@contextlib.contextmanager
def server(command: list[str], port: int) -> Iterator[psutil.Process]:
    """A server that listens while the context lasts, and no longer than this process."""
    import socket

    from doll.local.processes import tied

    process = subprocess.Popen(tied(command), stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline_s = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"{command[:3]} does not serve")
            time.sleep(0.1)
        yield psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):  # LitServe goes on waiting for its own processes
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Publisher:
    """Publishes versions as a parameter server does, through shared memory; a context manager."""

    def __init__(self, folder: Path, kafka: str = "127.0.0.1:1") -> None:
        import msgspec
        from doll.config import load
        from doll.model.flat_model import build, fingerprint
        from doll.optim.recipe import make_optimizer
        from doll.services import Services
        from doll.storage.checkpoints import Checkpoint
        from doll.storage.stores import open_blobs, open_store
        from doll.task.base import load_task

        (folder / "task.py").write_text(TASK)
        (folder / "job.yaml").write_text(JOB)
        config = load(folder / "job.yaml")
        model = build(config, load_task(config))
        self.weights = model.flat.detach().numpy().copy()
        store = open_store(config, folder / "runs" / "digits")
        store.save(
            Checkpoint(
                job="digits", fingerprint=fingerprint(config, model), term=store.claim_term(), version=1,
                state=msgspec.msgpack.encode({"run_id": "r", "samples_total": 0}),
                tensors=make_optimizer(config.training, model).tensors(),
            )
        )  # fmt: skip
        # `doll serve` finds them as those of a run.
        self.folder = folder / "runs" / "digits"
        services = Services(kafka, "redis://127.0.0.1:1/0", str(folder / "blobs"))
        self.blobs = open_blobs(config, services, give_up=lambda: True)
        from doll.run.folder import RunFolder

        run = RunFolder(self.folder)
        run.write_job(config)
        run.write_stack(services)
        self.version = 1
        self.published: dict[int, float] = {}

    def publish(self) -> None:
        from doll.storage.blobs import Latest, encode_blob, encode_latest, latest_key, weights_key

        self.version += 1
        scope = "digits:r"
        key = weights_key(scope, 1, self.version)
        self.weights += 1e-6
        self.blobs.put(key, encode_blob(self.weights, job=scope, kind="w", version=self.version), 600.0)
        self.published[self.version] = time.monotonic()
        latest = Latest(term=1, version=self.version, key=key)
        self.blobs.put(latest_key(scope), encode_latest(latest), 600.0)

    @contextlib.contextmanager
    def publishing(self) -> Iterator[None]:
        """Meanwhile versions come."""
        stop = threading.Event()

        def run() -> None:
            while not stop.wait(1 / SWAPS_PER_S):
                self.publish()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def cpu_s(process: psutil.Process) -> float:
    """Processor time of a server and its processes."""
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def row(name: str, loads: list[Load]) -> str:
    """A line of the table: medians, and the range of requests/s."""
    per_s, p50, p99 = ([getattr(load, field) for load in loads] for field in ("per_s", "p50_ms", "p99_ms"))
    errors = sum(load.errors for load in loads)
    median = statistics.median
    return (
        f"| {name} | {median(per_s):,.0f} ({min(per_s):,.0f} to {max(per_s):,.0f}) | {median(p50):.2f} "
        f"| {median(p99):.2f} | {median(load.cpu_us for load in loads):.0f} | {errors} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.3, help="of a turn")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--mlserver")
    parser.add_argument("--litserve")
    options = parser.parse_args()
    from doll.local.processes import free_port

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        publisher = Publisher(folder)
        ports = {name: free_port() for name in ("doll", "bare", "mlserver", "litserve")}
        (folder / "bare.py").write_text(BARE)
        (folder / "ml.py").write_text(MLSERVER)
        (folder / "lit.py").write_text(LITSERVE)
        doll_command = [sys.executable, "-m", "doll", "serve", str(publisher.folder), "--port", str(ports["doll"])]
        servers: dict[str, list[str]] = {"bare": [sys.executable, str(folder / "bare.py"), str(ports["bare"])]}
        if options.mlserver:
            servers["mlserver"] = [options.mlserver, str(folder / "ml.py"), str(ports["mlserver"])]
        if options.litserve:
            servers["litserve"] = [options.litserve, str(folder / "lit.py"), str(ports["litserve"])]
        paths = {"litserve": "/predict"}
        processes: dict[str, psutil.Process] = {}
        loads: dict[str, list[Load]] = {}

        def measure(name: str, port: int, connections: int, path: str = "/v2/models/digits/infer") -> Load:
            before_s = cpu_s(processes[name.split()[0]])
            load = asked(port, path, connections, options.seconds)
            used_s = cpu_s(processes[name.split()[0]]) - before_s
            load = load._replace(cpu_us=1e6 * used_s / max(1.0, load.per_s * options.seconds))
            loads.setdefault(f"{name}, {connections} connections", []).append(load)
            return load

        asked = Asking()
        orders = random.Random(0)
        delays: list[float] = []
        with contextlib.ExitStack() as started:
            for name, command in {"doll": doll_command, **servers}.items():
                processes[name] = started.enter_context(server(command, ports[name]))
            for name in ("doll", *servers):
                asked(ports[name], paths.get(name, "/v2/models/digits/infer"), 4, 1.0)
            for _ in range(options.rounds):
                turns = [(name, connections) for name in ("doll", *servers) for connections in (1, options.connections)]
                for name, connections in orders.sample(turns, len(turns)):
                    measure(name, ports[name], connections, paths.get(name, "/v2/models/digits/infer"))
                began_s = time.monotonic()
                with publisher.publishing():
                    load = measure("doll while versions come", ports["doll"], options.connections)
                delays += [
                    at_s - publisher.published[version]
                    for version, at_s in load.first_seen.items()
                    if publisher.published.get(version, 0.0) >= began_s  # not at the end of the turn before
                ]
    print("| server | requests/s | p50 ms | p99 ms | CPU us | errors |\n|---|---|---|---|---|---|")
    for name, measured in sorted(loads.items(), key=lambda each: each[0].split(", ")[::-1]):
        print(row(name, measured))

    def ratio(field: str, name: str, reference: str) -> float:
        values = [[getattr(load, field) for load in loads[key]] for key in (name, reference)]
        return statistics.median(a / b for a, b in zip(*values, strict=True))

    many, one = f"{options.connections} connections", "1 connections"
    print(f"\nrequests/s against bare, {one}: {ratio('per_s', f'doll, {one}', f'bare, {one}'):.2f} (goal: 0.6)")
    print(f"requests/s against bare, {many}: {ratio('per_s', f'doll, {many}', f'bare, {many}'):.2f} (goal: 0.85)")
    print(f"processor time against bare, {one}: {ratio('cpu_us', f'doll, {one}', f'bare, {one}'):.2f}")
    print(f"processor time against bare, {many}: {ratio('cpu_us', f'doll, {many}', f'bare, {many}'):.2f}")
    print(f"p50 against bare, {many}: {ratio('p50_ms', f'doll, {many}', f'bare, {many}'):.2f} (goal: below 1.2)")
    print(f"p50 against bare, {one}: {ratio('p50_ms', f'doll, {one}', f'bare, {one}'):.2f}")
    swaps = ratio("p99_ms", f"doll while versions come, {many}", f"doll, {many}")
    print(f"p99 with {SWAPS_PER_S:g} versions/s against none: {swaps:.2f} (goal: below 2)")
    if delays:
        p50, p99 = np.percentile(delays, [50, 99]) * 1e3
        print(f"from an update to its first answer: p50 {p50:.1f} ms, p99 {p99:.1f} ms of {len(delays)} (goal: 100)")
    if options.mlserver:
        ratio_ml = ratio("per_s", f"doll, {many}", f"mlserver, {many}")
        print(f"requests/s against MLServer: {ratio_ml:.1f} (goal: 5)")


if __name__ == "__main__":
    main()
