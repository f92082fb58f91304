"""AWS Lambda on this machine: moto's control plane, and AWS's runtime interface emulator behind an Invoke endpoint.

Each environment of the function is one emulator with the real `awslambdaric`, which starts the handler of
`doll.run.function`. As on AWS an environment takes one event at a time, and is used again; asynchronous events wait
while the concurrency is used up.

The emulator is a Go program: `go install` of `cmd/aws-lambda-rie@latest` in the module
github.com/aws/aws-lambda-runtime-interface-emulator (in PATH, or `DOLL_RIE` is its path). awslambdaric is in the extra
`lambda`. Without them the tests are skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, Self

from doll.local import processes
from doll.local.processes import free_port
from waiting import until

NAME: Final = "doll-worker"
_RESET_S: Final = 5.0
# The emulator's child ends with it, also by SIGKILL. The last argument is the handler, as in a function's image.
_RUNTIME: Final = """
import os, sys
from doll.local.launcher import die_with_parent
die_with_parent(os.getppid())
os.execv(sys.executable, [sys.executable, "-m", "awslambdaric", sys.argv[1]])
"""


def unavailable_reason() -> str | None:
    """Why functions cannot run here; None if they can."""
    if _emulator() is None:
        return "no aws-lambda-rie in PATH or $DOLL_RIE"
    return None if importlib.util.find_spec("awslambdaric") else "no awslambdaric (extra lambda)"


def _emulator() -> str | None:
    return os.environ.get("DOLL_RIE") or shutil.which("aws-lambda-rie")


@dataclass
class Environment:
    """One emulator with one runtime."""

    process: subprocess.Popen[bytes]
    url: str
    busy: bool = True


@dataclass
class Answered:
    """One invocation that has ended: what the handler answered, and when it ran, in monotonic seconds."""

    name: str
    answer: dict[str, Any]
    started_s: float
    ended_s: float
    cold: bool


@dataclass
class FunctionWorld:
    """The endpoint at `url`, for `AWS_ENDPOINT_URL_LAMBDA`, with one function `NAME`.

    Args:
        timeout_s: limit of an invocation.
        concurrency: of the function; further events wait.
    """

    folder: Path
    env: Mapping[str, str]
    timeout_s: int = 60
    concurrency: int = 20
    answered: list[Answered] = field(default_factory=list)
    environments: list[Environment] = field(default_factory=list)

    def __enter__(self) -> Self:
        from moto.server import ThreadedMotoServer

        self._room = threading.Semaphore(self.concurrency)
        self._lock = threading.Lock()
        self._starter = ThreadPoolExecutor(1)  # Linux kills environments with the thread that started them
        self.folder.mkdir(exist_ok=True)
        self._closed = False
        self._moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._moto.start()
        host, port = self._moto.get_host_and_port()
        self._control = f"http://{host}:{port}"
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self._make_function()
        return self

    def __exit__(self, *exc: object) -> None:
        self._closed = True
        for environment in self.environments:
            environment.process.kill()
            environment.process.wait()
        self._starter.shutdown(wait=False)
        self._server.shutdown()
        self._server.server_close()
        self._moto.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def client(self, service: str) -> Any:
        """A client of moto's control plane."""
        import boto3

        keys = {"aws_access_key_id": "none", "aws_secret_access_key": "none"}
        return boto3.client(service, "us-east-1", endpoint_url=self._control, **keys)

    def _make_function(self) -> None:
        urllib.request.urlopen(f"{self._control}/moto-api/reset", b"").close()  # moto's state is the process's
        iam, functions = self.client("iam"), self.client("lambda")
        role = iam.create_role(RoleName="worker", AssumeRolePolicyDocument="{}", Path="/")["Role"]["Arn"]
        functions.create_function(
            FunctionName=NAME, Role=role, PackageType="Image", MemorySize=1769, Timeout=self.timeout_s,
            Code={"ImageUri": "123456789012.dkr.ecr.us-east-1.amazonaws.com/doll:latest"},
        )  # fmt: skip
        functions.put_function_concurrency(FunctionName=NAME, ReservedConcurrentExecutions=self.concurrency)

    def _invoke(self, event: bytes) -> None:
        """Run one event when there is room, in a free environment or a new one."""
        with self._room:
            if self._closed:
                return
            environment, cold = self._environment()
            started_s = time.monotonic()
            try:
                request = urllib.request.Request(f"{environment.url}/2015-03-31/functions/function/invocations", event)
                with urllib.request.urlopen(request, timeout=self.timeout_s + _RESET_S) as response:
                    text = response.read().decode(errors="replace")
            except (OSError, urllib.error.URLError) as error:
                text = repr(error)
            try:
                answer = json.loads(text)
            except ValueError:
                answer = {"cause": text}
            name = json.loads(event).get("name", "")
            self.answered.append(Answered(name, answer, started_s, time.monotonic(), cold))
            if isinstance(answer, dict) and answer.get("cause") != text:
                environment.busy = False  # one whose time was over is not used again
            else:
                environment.process.kill()

    def _environment(self) -> tuple[Environment, bool]:
        with self._lock:
            for environment in self.environments:
                if not environment.busy and environment.process.poll() is None:
                    environment.busy = True
                    return environment, False
            environment = self._starter.submit(self._start).result()
            self.environments.append(environment)
        self._await(environment)
        return environment, True

    def _start(self) -> Environment:
        address, api = (f"127.0.0.1:{free_port()}" for _ in range(2))
        emulator = _emulator()
        assert emulator is not None
        command = [
            emulator, "--runtime-interface-emulator-address", address, "--runtime-api-address", api,
            sys.executable, "-c", _RUNTIME, "doll.run.function.handle",
        ]  # fmt: skip
        env = {
            **os.environ, **self.env, "AWS_LAMBDA_FUNCTION_TIMEOUT": str(self.timeout_s),
            "AWS_LAMBDA_FUNCTION_NAME": NAME, "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": "1769",
        }  # fmt: skip
        with (self.folder / f"environment-{len(self.environments)}.log").open("wb") as log:
            process = subprocess.Popen(
                processes.tied(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, cwd=self.folder
            )
        return Environment(process, f"http://{address}")

    @staticmethod
    def _await(environment: Environment) -> None:
        def answers() -> bool:
            try:
                urllib.request.urlopen(environment.url, timeout=5).close()
            except urllib.error.HTTPError:
                return True
            except OSError:
                pass
            return False

        until(answers, "the runtime interface emulator")

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        world = self

        class Handler(BaseHTTPRequestHandler):
            """Invoke, and everything else as moto answers it."""

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.path.endswith("/invocations") and self.headers.get("X-Amz-Invocation-Type") == "DryRun":
                    self._send(204, {"x-amzn-RequestId": uuid.uuid4().hex}, b"")
                elif self.path.endswith("/invocations"):
                    threading.Thread(target=world._invoke, args=(body,), daemon=True).start()
                    self._send(202, {"x-amzn-RequestId": uuid.uuid4().hex}, b"")
                else:
                    self._pass_on(body)

            def do_GET(self) -> None:
                self._pass_on(None)

            def _pass_on(self, body: bytes | None) -> None:
                headers = {key: value for key, value in self.headers.items() if key.lower() != "host"}
                request = urllib.request.Request(world._control + self.path, body, headers, method=self.command)
                try:
                    with urllib.request.urlopen(request, timeout=30) as response:
                        self._send(response.status, dict(response.headers), response.read())
                except urllib.error.HTTPError as error:
                    self._send(error.code, dict(error.headers), error.read())

            def _send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
                self.send_response(status)
                for key, value in headers.items():
                    if key.lower() not in ("content-length", "transfer-encoding", "connection", "server", "date"):
                        self.send_header(key, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        return Handler
