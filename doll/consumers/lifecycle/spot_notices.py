"""EC2 instance metadata (IMDSv2): spot interruption notices, and the identity of this machine in the fleet, read from
its tags.

The metadata service is at a link-local address of the machine. `AWS_EC2_METADATA_SERVICE_ENDPOINT` sets another
address, as for boto3. Tags are available if the launch template has `InstanceMetadataTags=enabled`. The provisioner
reads notices from a queue (`doll.provisioner.fleets.ec2.notices`).

Source: Amazon EC2 User Guide, "Use the Instance Metadata Service" and "Spot Instance interruption notices".
"""

from __future__ import annotations

import http.client
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from datetime import datetime
from typing import Final

from doll.config import JobConfig
from doll.consumers.lifecycle.departure import Departure
from doll.errors import ConfigError, ServiceUnavailableError
from doll.records.bounded import json_object, short
from doll.telemetry import get_logger

log = get_logger(__name__)

ENDPOINT_ENV: Final = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
NOTICES_ENV: Final = "DOLL_SPOT_NOTICES"
_ENDPOINT: Final = "http://169.254.169.254"
_TOKEN_S: Final = 21_600
_TIMEOUT_S: Final = 2.0
_MAX_BYTES: Final = 65_536
_MAX_TAG_CHARS: Final = 256  # limit of a tag at AWS
POLL_S: Final = 5.0  # as AWS recommends
_ACTION: Final = "spot/instance-action"
_REBALANCE: Final = "events/recommendations/rebalance"

# Environment variables that `doll worker` reads, and the tags that hold their values.
_WORKER_ENV: Final = "DOLL_WORKER"
_FROM_TAGS: Final = {_WORKER_ENV: "doll:worker", "DOLL_INCARNATION": "doll:incarnation", "DOLL_MARKET": "doll:market"}
_INSTANCE_ENV: Final = "DOLL_INSTANCE"


class Imds:
    """A client of the instance metadata service, version 2."""

    def __init__(self, endpoint: str = "") -> None:
        self._endpoint = (endpoint or os.environ.get(ENDPOINT_ENV) or _ENDPOINT).rstrip("/")
        self._token = ""
        # Without a proxy, which would answer with the metadata of its own machine.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, path: str) -> str | None:
        """Return the text at `/latest/meta-data/<path>`; None if there is none (404). Raise ServiceUnavailableError if
        the service does not answer or refuses the request."""
        try:
            try:
                return self._read(path)
            except urllib.error.HTTPError as error:
                if error.code != 401:
                    raise
                self._token = ""  # it has expired
                return self._read(path)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise ServiceUnavailableError(f"{self._endpoint}: {path}: HTTP {error.code}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ServiceUnavailableError(
                f"the instance metadata service at {self._endpoint} does not answer: {error}"
            ) from error

    def _read(self, path: str) -> str:
        if not self._token:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
            self._token = self._request("/latest/api/token", headers, method="PUT")
        return self._request(f"/latest/meta-data/{path}", {"X-aws-ec2-metadata-token": self._token})

    def _request(self, path: str, headers: dict[str, str], method: str = "GET") -> str:
        request = urllib.request.Request(self._endpoint + path, headers=headers, method=method)
        with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
            text: str = answer.read(_MAX_BYTES).decode()
            return text


def set_identity_from_tags(imds: Imds, environment: MutableMapping[str, str] | None = None) -> None:
    """Set the environment variables for slot, incarnation, market and machine, and turn on spot notices. Variables that
    are already set do not change.

    Raises:
        ConfigError: this machine has no such tags, or a tag has no valid value.
        ServiceUnavailableError: the metadata service does not answer.
    """
    environment = os.environ if environment is None else environment
    for name, tag in _FROM_TAGS.items():
        if environment.get(name):
            continue
        value = imds.get(f"tags/instance/{tag}")
        if value is None:
            raise ConfigError(
                f"this machine shows no tag {tag}: launch it with `doll provision` from a template with "
                "InstanceMetadataTags=enabled, or name the slot with --worker"
            )
        environment[name] = _checked_text(value, f"tag {tag}")
    if not environment.get(_INSTANCE_ENV):
        environment[_INSTANCE_ENV] = _checked_text(imds.get("instance-id") or "", "instance-id")
    environment[NOTICES_ENV] = environment.get(NOTICES_ENV) or "imds"


def slot_of_this_machine(slot: int | None) -> int:
    """Return `slot`, or the slot in the tags of this EC2 machine if `slot` is None. Set the other values of the tags in
    the environment in both cases, unless the environment already has them.

    Raises:
        ConfigError: a tag whose value is needed is missing or not valid.
        ServiceUnavailableError: this is not an EC2 machine, or its metadata service is off.
    """
    if slot is not None:
        os.environ[_WORKER_ENV] = str(slot)
    set_identity_from_tags(Imds())
    tag = os.environ[_WORKER_ENV]
    if not tag.isdecimal():
        raise ConfigError(f"tag doll:worker: expected a slot, 0 or more, got {tag!r}")
    return int(tag)


def _checked_text(value: str, what: str) -> str:
    if len(value) > _MAX_TAG_CHARS or not value.isprintable():
        raise ConfigError(f"{what}: expected at most {_MAX_TAG_CHARS} printable characters, got {short(value, 60)!r}")
    return value


class NoticeWatcher:
    """A thread that polls for a spot interruption notice, and calls `on_notice` once, with the remaining seconds."""

    def __init__(
        self,
        imds: Imds,
        on_notice: Callable[[float], object],
        *,
        every_s: float = POLL_S,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._imds = imds
        self._on_notice = on_notice
        self._every_s = every_s
        self._wall = wall
        self._stop = threading.Event()
        self._is_unavailable = False
        self._rebalance = ""
        self._thread = threading.Thread(target=self._run, name="notices", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop polling, and wait a short time for the current request."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_TIMEOUT_S)

    def poll(self) -> bool:
        """Ask once. Return whether there is a notice, after reporting it."""
        try:
            text = self._imds.get(_ACTION)
            hint = self._imds.get(_REBALANCE) if text is None else None
        except ServiceUnavailableError as error:
            if not self._is_unavailable:
                log.warning("spot_notices_unavailable", reason=str(error))
            self._is_unavailable = True
            return False
        self._is_unavailable = False
        if hint is not None and hint != self._rebalance:
            self._rebalance = hint
            # A hint with many false alarms (docs/aws.md): logged, never acted on.
            log.info("rebalance_recommended", recommendation=hint[:200])
        if text is None:
            return False
        left_s = self._left_s(text)
        log.info("interruption_notice", notice=text[:200], left_s=round(left_s, 1))
        self._on_notice(left_s)
        return True

    def _left_s(self, text: str) -> float:
        try:
            return max(0.0, datetime.fromisoformat(json_object(text)["time"]).timestamp() - self._wall())
        except (ValueError, KeyError, TypeError, OverflowError):
            log.warning("interruption_notice_without_time", notice=text[:200])
            return 0.0  # it is still a notice, and may be old: leave now

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                if self.poll():
                    return
            except Exception:  # a thread that ends here would never see the notice
                log.exception("spot_notice_poll_failed", action="asking again")
            self._stop.wait(self._every_s)


@contextmanager
def watch_spot_notices(config: JobConfig, departure: Departure) -> Iterator[None]:
    """While the context is open, make this process leave after a spot notice, if the job file or $DOLL_SPOT_NOTICES
    enables this. Raise ConfigError if $DOLL_SPOT_NOTICES is neither `none` nor `imds`."""
    source = config.worker.spot_notices or os.environ.get(NOTICES_ENV) or "none"
    if source not in ("none", "imds"):
        raise ConfigError(f"{NOTICES_ENV}: expected none or imds, got {source!r}")
    if source == "none":
        yield
        return
    watcher = NoticeWatcher(
        Imds(), lambda left_s: departure.leave_within(min(left_s, config.worker.notice_s), "notice")
    )
    watcher.start()
    try:
        yield
    finally:
        watcher.close()
