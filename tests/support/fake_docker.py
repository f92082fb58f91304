#!/usr/bin/env python3
"""A likeness of docker 27's command line: the few commands that DOLL uses, with docker's words, states and exit codes.

Its engine is a JSON file in $FAKE_DOCKER: `state.json` holds containers and the time, and what to fail next. Each call
is appended to `calls.jsonl`. It runs nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

NEVER = "0001-01-01T00:00:00Z"
DAEMON = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"


class Refused(Exception):
    pass


def stamp(seconds: float) -> str:
    """As docker writes times: RFC 3339 with nanoseconds."""
    at = datetime.fromtimestamp(seconds, UTC)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond:06d}789Z"


def options(words: list[str], with_value: set[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Options up to the first other word, and the remaining words. An option that is not expected is an error, as it is
    in docker."""
    values: dict[str, list[str]] = {}
    while words and words[0].startswith("-"):
        name = words.pop(0)
        if name in with_value:
            values.setdefault(name, []).append(words.pop(0))
        elif name in ("--detach", "--no-deps", "--all", "--no-trunc", "--force"):
            values[name] = []
        else:
            raise Refused(f"unknown flag: {name}")
    return values, words


def compose(state: dict[str, Any], words: list[str]) -> str:
    top, words = options(words, {"--project-name", "--file"})
    if not Path(top["--file"][0]).is_file():
        raise Refused(f"open {top['--file'][0]}: no such file or directory")
    if words.pop(0) != "run":
        raise Refused("expected run")
    given, rest = options(words, {"--name", "--label", "--env"})
    service, name = rest[0], given["--name"][0]
    if service not in state["services"]:
        raise Refused(f"no such service: {service}")
    if name in state["containers"]:
        raise Refused(
            f'Error response from daemon: Conflict. The container name "/{name}" is already in use by container "'
            f'{state["containers"][name]["Id"]}". You have to remove (or rename) that container to be able to reuse '
            "that name."
        )
    id_ = f"{state['made']:064x}"
    state["made"] += 1
    labels = dict(label.split("=", 1) for label in given["--label"])
    labels |= {"com.docker.compose.project": top["--project-name"][0], "com.docker.compose.oneoff": "True"}
    state["containers"][name] = {
        "Id": id_,
        "Name": f"/{name}",
        "Created": stamp(state["now_s"]),
        "State": {
            "Status": "running", "Running": True, "OOMKilled": False, "ExitCode": 0,
            "StartedAt": stamp(state["now_s"]), "FinishedAt": NEVER,
        },
        "Config": {"Labels": labels, "Env": given["--env"]},
    }  # fmt: skip
    return id_


def find(state: dict[str, Any], word: str) -> dict[str, Any] | None:
    return next((container for name, container in state["containers"].items() if word in (name, container["Id"])), None)


def ps(state: dict[str, Any], words: list[str]) -> str:
    given, _ = options(words, {"--filter", "--format"})
    key, _, value = given["--filter"][0].removeprefix("label=").partition("=")
    lines = []
    for container in state["containers"].values():
        if container["Config"]["Labels"].get(key) == value and ("--all" in given or container["State"]["Running"]):
            labels = ",".join(f"{a}={b}" for a, b in container["Config"]["Labels"].items())
            status = container["State"]["Status"]
            row = {"ID": container["Id"], "Names": container["Name"][1:], "State": status, "Labels": labels}
            lines.append(json.dumps(row))
    return "\n".join(lines)


def over(state: dict[str, Any], verb: str, words: list[str]) -> tuple[str, str]:
    """A command on several containers goes on after containers on which it fails."""
    given, names = options(words, {"--signal", "--type", "--format"})
    done: list[Any] = []
    errors = []
    for word in names:
        container = find(state, word)
        if container is None:
            errors.append(f"Error: No such container: {word}" if verb == "inspect" else
                          f"Error response from daemon: No such container: {word}")  # fmt: skip
        elif verb == "inspect":
            done.append(container)
        elif verb == "rm":
            del state["containers"][container["Name"][1:]]
            done.append(word)
        elif verb == "start":
            container["State"] |= {"Status": "running", "Running": True, "StartedAt": stamp(state["now_s"])}
            done.append(word)
        elif not container["State"]["Running"]:
            errors.append(
                f"Error response from daemon: cannot kill container: {word}: container {container['Id']} is not running"
            )
        else:
            gentle = given.get("--signal", ["SIGKILL"])[0] == "SIGTERM"
            if not (gentle and container["Name"][1:] in state["stubborn"]):
                # A worker that is told to leave ends with 0; SIGKILL is 128 + 9.
                end(state, container, 0 if gentle else 137)
            done.append(word)
    out = json.dumps(done) if verb == "inspect" else "\n".join(done)
    return out, "\n".join(errors)


def end(state: dict[str, Any], container: dict[str, Any], code: int) -> None:
    container["State"] |= {"Status": "exited", "Running": False, "ExitCode": code, "FinishedAt": stamp(state["now_s"])}


def main(words: list[str]) -> int:
    folder = Path(os.environ["FAKE_DOCKER"])
    with (folder / "calls.jsonl").open("a") as calls:
        fcntl.flock(calls, fcntl.LOCK_EX)
        calls.write(json.dumps(words) + "\n")
        state = json.loads((folder / "state.json").read_text())
        verb = words.pop(0)
        out = err = ""
        before = state["fail_before"].pop(verb, None)
        after = state["fail_after"].pop(verb, None)
        if before:
            err = before
        else:
            try:
                if verb == "compose":
                    out = compose(state, words)
                elif verb == "ps":
                    out = ps(state, words)
                elif verb in ("inspect", "kill", "rm", "start"):
                    out, err = over(state, verb, words)
                else:
                    raise Refused(f"docker: '{verb}' is not a docker command.")
            except Refused as refusal:
                err = str(refusal)
            err = after or err
        (folder / "state.json").write_text(json.dumps(state))
    sys.stdout.write(f"{out}\n")
    sys.stderr.write(f"{err}\n")
    return 1 if err else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
