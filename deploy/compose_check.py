"""docker-compose.yml on a real engine: build, a job with kills to its end, a refusal, two provisioners of which one is
killed, and nothing left behind.

    make compose-check

It needs a docker engine with compose v2 on this machine, and the registry of the base images (or images of these names
in the engine). It uses a project name and ports of its own, so that it meets no other stack, and takes about 15 minutes
after the build. Without an engine it fails, since what has not been run has not passed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from doll.local.processes import free_port

ROOT: Final = Path(__file__).resolve().parents[1]
DOCKER: Final = os.environ.get("DOCKER", "docker")
EXAMPLE: Final = ROOT / "examples" / "digits" / "job.yaml"
MARKET: Final = EXAMPLE.with_name("market.yaml")
PROVISION: Final = "provision:\n"
UPDATES: Final = 900
BETWEEN_KILLS: Final = 20  # updates
STEP_S: Final = 1800.0
# As SIGKILL of the process itself. `docker kill` would count as stopped by hand, and restart nothing.
KILL: Final = "import os, signal, sys; os.kill(int(sys.argv[1]), signal.SIGKILL)"


class CheckError(Exception):
    """What was expected did not come."""


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class Stack:
    """One compose project.

    Args:
        folder: of the job file; the log of each command goes there too.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.project = f"doll-check-{os.getpid()}"
        self.environment = {
            **os.environ, "COMPOSE_PROJECT_NAME": self.project, "JOB_FOLDER": str(folder), "JOB": "job.yaml",
            "KAFKA_PORT": str(free_port()), "REDIS_PORT": str(free_port()),
        }  # fmt: skip

    def start(self, *arguments: str, log: str, **variables: str) -> subprocess.Popen[bytes]:
        """`docker compose ARGUMENTS`, with its output in a file of the folder."""
        with (self.folder / log).open("wb") as output:
            return subprocess.Popen(
                [DOCKER, "compose", *arguments], cwd=ROOT, env={**self.environment, **variables}, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def run(self, *arguments: str, compose: bool = True) -> str:
        """Standard output of a command.

        Raises:
            CheckError: it fails.
        """
        command = [DOCKER, *(["compose"] if compose else []), *arguments]
        done = subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=STEP_S)
        if done.returncode:
            raise CheckError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        return done.stdout

    def log(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8", errors="replace")

    def version(self) -> int:
        """Newest version of the model; -1 while the parameter server does not answer."""
        try:
            status: dict[str, Any] = json.loads(self.run("exec", "-T", "evaluator", "doll", "status", "--json"))
        except (CheckError, json.JSONDecodeError):
            return -1
        return int(status.get("version", -1) or -1)

    def until_version(self, version: int, up: subprocess.Popen[bytes]) -> int:
        """Wait for a version; the newest.

        Raises:
            CheckError: `up` has ended before, or the version does not come.
        """
        deadline_s = time.monotonic() + STEP_S
        while (newest := self.version()) < version:
            if up.poll() is not None or time.monotonic() > deadline_s:
                raise CheckError(f"expected version {version}, the newest is {newest}")
            time.sleep(1.0)
        return newest

    def kill(self, service: str, index: int = 1) -> None:
        """SIGKILL to all processes of a container, as the kernel does when memory is short; it is restarted."""
        container = f"{self.project}-{service}-{index}"
        pid = self.run("inspect", "--format", "{{.State.Pid}}", container, compose=False).strip()
        image = os.environ.get("DOLL_IMAGE", "doll:local")
        self.run(
            "run", "--rm", "--pid=host", "--user=0", "--network=none", "--entrypoint=python", image,
            "-c", KILL, pid, compose=False,
        )  # fmt: skip

    def left(self) -> list[str]:
        """What the engine has of this project."""
        label = f"label=com.docker.compose.project={self.project}"
        kinds = {"container": ("ps", "--all"), "volume": ("volume", "ls"), "network": ("network", "ls")}
        return [
            f"{kind} {name}"
            for kind, command in kinds.items()
            for name in self.run(*command, "--quiet", "--filter", label, compose=False).split()
        ]

    def down(self) -> None:
        self.run("--profile", "*", "down", "--volumes", "--timeout", "30")


@contextlib.contextmanager
def stack() -> Iterator[Stack]:
    """A project in a folder of its own; everything of it is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="doll-compose-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # the containers' user reads the job file
        text, replaced = re.subn(r"(?m)^stop:\n(?:[ #].*\n)+", f"stop: {{updates: {UPDATES}}}\n", EXAMPLE.read_text())
        if not replaced:
            raise CheckError(f"expected a section `stop` in {EXAMPLE.name}")
        (folder / "job.yaml").write_text(text, encoding="utf-8")
        # A deadline that a busy machine meets, and a lease that ends soon.
        text = (
            MARKET.read_text()
            .replace("deadline_s: 190", "deadline_s: 1800")
            .replace(PROVISION, f"{PROVISION}  lease_s: 5\n")
        )
        (folder / "market.yaml").write_text(text, encoding="utf-8")
        for name in ("task.py", "digits.npz"):
            shutil.copy(EXAMPLE.with_name(name), folder)
        project = Stack(folder)
        try:
            yield project
        finally:
            project.down()


def wait_for(up: subprocess.Popen[bytes], limit_s: float) -> int:
    """The exit code of `up`; it is ended after `limit_s`.

    Raises:
        CheckError: it has not ended by itself.
    """
    try:
        return up.wait(limit_s)
    except subprocess.TimeoutExpired as exc:
        os.killpg(up.pid, signal.SIGKILL)
        raise CheckError(f"`docker compose up` still runs after {limit_s:g} s") from exc


def check_job(project: Stack, figures: dict[str, str]) -> None:
    """A job to its end, with two workers, the parameter server and Redis killed on the way."""
    began_s = time.monotonic()
    up = project.start("--profile", "once", "up", "--attach", "audit", "--exit-code-from", "audit", log="up.log")
    version = project.until_version(1, up)
    figures["first update after the start of `up`"] = f"{time.monotonic() - began_s:.0f} s"
    for service, index in (("worker", 1), ("worker", 2), ("ps", 1), ("redis", 1)):
        killed_s = time.monotonic()
        project.kill(service, index)
        version = project.until_version(version + BETWEEN_KILLS, up)
        name = f"{service} {index}" if service == "worker" else service
        figures[f"{BETWEEN_KILLS} updates after the kill of {name}"] = f"{time.monotonic() - killed_s:.0f} s"
    code = wait_for(up, STEP_S)
    figures["`up` to its end"] = f"{time.monotonic() - began_s:.0f} s, exit code {code}"
    audit = re.search(r"audit: .*produced.*|.*applied exactly once.*", project.log("up.log"))
    figures["audit"] = audit[0].split("|")[-1].strip() if audit else "none"
    if code or " 0 missing, 0 twice" not in figures["audit"]:
        raise CheckError(f"expected exit code 0 and 0 missing, 0 twice:\n{project.log('up.log')[-3000:]}")


def check_refusal(project: Stack, figures: dict[str, str]) -> None:
    """The topics are gone and the checkpoints are left: `up` ends and says what to do, and that works."""
    project.run("--profile", "*", "down", "--timeout", "30")
    project.run("volume", "rm", f"{project.project}_kafka", compose=False)
    began_s = time.monotonic()
    code = wait_for(project.start("up", log="refused.log"), 600.0)
    figures["checkpoints of deleted topics: `up` ends"] = f"{time.monotonic() - began_s:.0f} s, exit code {code}"
    if not code or "FRESH=1" not in project.log("refused.log"):
        raise CheckError(f"expected a failure that names FRESH=1:\n{project.log('refused.log')[-3000:]}")
    up = project.start(
        "--profile", "once", "up", "--attach", "audit", "--exit-code-from", "audit", log="fresh.log", FRESH="1"
    )
    code = wait_for(up, STEP_S)
    figures["then `FRESH=1 docker compose up`"] = f"exit code {code}"
    if code:
        raise CheckError(f"expected exit code 0:\n{project.log('fresh.log')[-3000:]}")


def check_two_provisioners(project: Stack, figures: dict[str, str]) -> None:
    """The provisioner that works is killed: the other one takes over, and the job ends as if nothing had been."""
    project.run("--profile", "*", "down", "--volumes", "--timeout", "30")
    up = project.start(
        "--profile", "once", "--profile", "provision", "up", "--attach", "audit", "--exit-code-from", "audit",
        log="provision.log", JOB="market.yaml", WORKERS="0", PROVISIONERS="2",
    )  # fmt: skip

    def log() -> str:
        return project.run("--profile", "*", "logs", "--no-color", "provisioner")

    version = project.until_version(BETWEEN_KILLS, up)
    working = re.findall(r"provisioner-(\d) .* decision ", log())
    killed_s = time.monotonic()
    project.kill("provisioner", int(working[-1]))
    while "taking over" not in log():
        if up.poll() is not None or time.monotonic() - killed_s > STEP_S:
            raise CheckError(f"expected the other provisioner to take over:\n{log()[-3000:]}")
        time.sleep(0.5)
    figures["the other provisioner takes over after a kill"] = f"{time.monotonic() - killed_s:.0f} s"
    project.until_version(version + BETWEEN_KILLS, up)
    code = wait_for(up, STEP_S)
    audit = re.search(r"audit: .*produced.*", project.log("provision.log"))
    figures["its audit"] = f"{audit[0] if audit else 'none'}, exit code {code}"
    if code or audit is None or " 0 missing, 0 twice" not in audit[0]:
        raise CheckError(f"expected exit code 0 and 0 missing, 0 twice:\n{project.log('provision.log')[-3000:]}")


def check_nothing_left(project: Stack, figures: dict[str, str]) -> None:
    project.down()
    left = project.left()
    figures["left after `down --volumes`"] = ", ".join(left) or "nothing"
    if left:
        raise CheckError(f"expected nothing of project {project.project}, found {', '.join(left)}")


def unavailable_reason() -> str | None:
    """None if this machine has an engine with compose v2; else what is missing, and how to get it."""
    if shutil.which(DOCKER) is None:
        return f"there is no {DOCKER} on PATH: install Docker Engine with its compose plugin (docs.docker.com/engine)"
    for words, advice in (
        (("info",), "no docker engine answers: start it, or let DOCKER_HOST name one"),
        (
            ("compose", "version"),
            "docker has no compose v2: install its compose plugin (docs.docker.com/compose)",
        ),
    ):
        if subprocess.run([DOCKER, *words], capture_output=True, check=False).returncode:
            return advice
    return None


def main(argv: Sequence[str] = ()) -> int:
    """Exit code 0: all is as expected. 1: it is not, or there is no engine with compose."""
    if (problem := unavailable_reason()) is not None:
        say(f"compose check: NOT checked, {problem}")
        return 1
    figures: dict[str, str] = {}
    try:
        with stack() as project:
            began_s = time.monotonic()
            if wait_for(project.start("build", log="build.log"), 2 * STEP_S):
                raise CheckError(f"the image does not build:\n{project.log('build.log')[-3000:]}")
            size = project.run("image", "inspect", "--format", "{{.Size}}", "doll:local", compose=False)
            figures["build"] = f"{time.monotonic() - began_s:.0f} s, {int(size) / 1e9:.1f} GB"
            check_job(project, figures)
            check_refusal(project, figures)
            check_two_provisioners(project, figures)
            check_nothing_left(project, figures)
    except CheckError as exc:
        say(f"compose check: FAILED: {exc}")
        return 1
    finally:
        for what, value in figures.items():
            say(f"| {what} | {value} |")
    say("compose check: passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
