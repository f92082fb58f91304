"""Watches a model server (`doll serve`) through its metrics."""

from __future__ import annotations

import http
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, TypeVar
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from doll.dashboard.sources import JobSource, thread_within
from doll.errors import ConfigError
from doll.monitor.state.served_model import Reading, ServedModel
from doll.monitor.state.watched_job import KeptVersions, PageState
from doll.records.bounded import short
from doll.redaction import holds_credentials

T = TypeVar("T")

EVERY_S: Final = 2.0
_TIMEOUT_S: Final = 5.0
_MAX_BYTES: Final = 4_000_000
_PREFIX: Final = "doll_serve_"


class WithModelServer:
    """A source of a job's state that adds the state of its model server.

    Args:
        metrics: returns the text of the server's metrics; may raise OSError.
    """

    def __init__(self, source: JobSource, metrics: Callable[[], str]) -> None:
        self.is_live = source.is_live
        self._source = source
        self._metrics = metrics
        self._model = ServedModel()
        self._lock = threading.Lock()

    def read(self, view: Callable[[PageState], T]) -> T:
        with self._lock:
            return self._source.read(lambda state: view(replace(state, served=self._model)))

    def kept_versions(self) -> KeptVersions | None:
        return self._source.kept_versions()

    @contextmanager
    def watched(self, every_s: float = EVERY_S) -> Iterator[None]:
        """Watch the server within the context."""

        def watch(stopped: threading.Event) -> None:
            while not stopped.is_set():
                self.look(time.monotonic())
                stopped.wait(every_s)

        with thread_within(watch, "model-server"):
            yield

    def look(self, now_s: float) -> None:
        """Read the metrics once."""
        try:
            reading, problem = reading_of(self._metrics(), now_s), ""
        except Exception as error:  # after any error, the page shows old numbers
            reading, problem = None, f"the model server does not answer: {short(error)}"
        with self._lock:
            if reading is None:
                self._model.problem = problem
            else:
                self._model.add(reading)


def metrics_of(address: str, token: str) -> Callable[[], str]:
    """Return a function that reads the metrics of the server at `address`.

    Args:
        token: token for the server; "": none.

    Raises:
        ConfigError: `address` is not a valid address.
    """
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or holds_credentials(address):
        raise ConfigError(
            "--model-server: expected an address such as http://127.0.0.1:8000 (its token in DOLL_SERVE_TOKEN), got "
            f"{short(address, 100)!r}"
        )
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"{parts.scheme}://{parts.netloc}/metrics", headers=headers)

    def read() -> str:
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                text: str = answer.read(_MAX_BYTES).decode("utf-8", "replace")
            return text
        except urllib.error.HTTPError as exc:
            if exc.code == http.HTTPStatus.UNAUTHORIZED:
                raise PermissionError(f"it wants {'another' if token else 'a'} token: set DOLL_SERVE_TOKEN") from None
            raise
        except urllib.error.URLError as exc:
            if isinstance(exc.reason, ssl.SSLCertVerificationError):
                reason = exc.reason.verify_message
                raise PermissionError(f"its certificate is not trusted ({reason}): SSL_CERT_FILE names a CA") from None
            raise

    return read


def reading_of(text: str, now_s: float) -> Reading:
    """Parse a page of metrics.

    Raises:
        ValueError, KeyError: the page is not from a model server.
    """
    families = {family.name.removeprefix(_PREFIX): family.samples for family in text_string_to_metric_families(text)}

    def of_processes(name: str) -> list[float]:
        return [sample.value for sample in families[name]]

    return Reading(
        at_s=now_s,
        versions=[int(version) for version in of_processes("version") if version],
        requests={sample.labels["code"]: sample.value for sample in families["requests"]},
        buckets=[
            (float(sample.labels["le"]), sample.value)
            for sample in families["request_seconds"]
            if sample.name.endswith("_bucket")
        ],
        age_s=max(of_processes("version_age_seconds")),
        samples_behind=max(of_processes("samples_behind")),
        waiting=max(of_processes("waiting_requests")),
        is_stale=any(of_processes("stale")),
        swaps=sum(of_processes("swaps")),
        unlogged=sum(of_processes("unlogged_answers")),
    )
