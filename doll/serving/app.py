"""The HTTP interface of a model server: the Open Inference Protocol V2, `POST /predict`, health and metrics.

Every request gets an answer with a status. The answer to an error has a reason in JSON (`{"error": ...}`). No request
can end the server.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import hashlib
import itertools
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Final

import msgspec
import numpy as np
import torch
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

import doll
from doll.errors import RetryLater, SampleError, SkipRecord
from doll.process.connections import ServerAccess
from doll.process.http_access import Right, bearer, host_name, is_loopback, is_of_a_foreign_page
from doll.records.bounded import MalformedError, short
from doll.serving.answer_log import AnswerLog
from doll.serving.batcher import Batcher, QueueFullError
from doll.serving.metrics import CONTENT_TYPE, ServeMetrics
from doll.serving.model_copies import Lane, ServedVersion
from doll.serving.predictor import Answer
from doll.serving.protocol import LENGTH_HEADER, OutputTensor, decode_request, encode_answer
from doll.serving.shadow import Copied, ShadowLink
from doll.serving.tensors import Features, Signature
from doll.task import trees
from doll.task.base import Task, described
from doll.telemetry import get_logger
from doll.theory.off_policy import probabilities_of

log = get_logger(__name__)

_JSON: Final = "application/json"
_HEALTH: Final = "/v2/health/"  # needs no token, because a load balancer has none
_LONGEST_REASON: Final = 2000
_LONGEST_ID: Final = 200
_DISCARD_S: Final = 2.0
_BODIES: Final = 8  # limit of all bodies in memory, as a multiple of the largest body
_LENGTH: Final = LENGTH_HEADER.lower().encode()
_PATHS: Final = 256
_LATER: Final = {"Retry-After": "1"}


class RequestError(Exception):
    """An error that is returned to the client with an HTTP status."""

    def __init__(self, status: int, reason: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.headers = headers


class ServeRequest(Request):
    """An HTTP request.

    Attributes:
        held_bytes: bytes of its body that are in memory.
        after: called when the answer has been sent.
    """

    held_bytes = 0
    after: Callable[[], object] | None = None

    @cached_property
    def _header_values(self) -> dict[bytes, bytes]:
        return dict(self.scope["headers"])  # Starlette's mapping compares all names at each access

    def header(self, name: bytes) -> str:
        """Return the value of a header by its name in lower case; "" if the request does not have it."""
        return self._header_values.get(name, b"").decode("latin-1")


Endpoint = Callable[[ServeRequest], Awaitable[Response]]


class ServeApp:
    """The endpoints of one process.

    Args:
        name: name of the model.
        newest_samples: returns the number of usable samples in the newest known version; -1: not known.
        max_body_bytes: maximum size of a request body.
        time_limit_s: time limit of the batcher in seconds, for error messages.
        answers: log of the answers. None: answers are not logged.
        shadow: the process that computes each request with another version too, for the log. None: there is none.
        access: checks which clients may send requests.
        split_by: header whose value decides which of several versions answers; "": each request is drawn.
    """

    def __init__(
        self, task: Task, signature: Signature, lanes: Sequence[Lane], batcher: Batcher, metrics: ServeMetrics, *,
        name: str, newest_samples: Callable[[], int], max_body_bytes: int, time_limit_s: float,
        access: ServerAccess, answers: AnswerLog | None = None, shadow: ShadowLink | None = None, split_by: str = "",
    ) -> None:  # fmt: skip
        self._task = task
        self._signature = signature
        self._lanes = lanes
        self._limits = list(itertools.accumulate(lane.share for lane in lanes))
        self._answers = answers
        self._shadow = shadow
        self._batcher = batcher
        self._metrics = metrics
        self._name = name
        self._newest_samples = newest_samples
        self._max_body_bytes = max_body_bytes
        self._time_limit_s = time_limit_s
        self._access = access
        self._split_by = split_by.lower().encode()
        self._rng = np.random.default_rng()
        self._held_bytes = 0  # bytes of the bodies of all requests
        model, version = "/v2/models/{name}", "/v2/models/{name}/versions/{version}"
        act = [
            *(Route(f"{path}/infer", self._infer, methods=["POST"]) for path in (model, version)),
            Route("/predict", self._predict, methods=["POST"]),
        ]
        read = [
            *(Route(f"{path}/ready", self._model_ready) for path in (model, version)),
            *(Route(path, self._model_metadata) for path in (model, version)),
            Route("/v2", self._server_metadata),
            Route("/metrics", self._page),
        ]
        # A load balancer has no token.
        health = [Route("/v2/health/live", self._live), Route("/v2/health/ready", self._ready)]
        self.routes = {Right.ACT: act, Right.READ: read, Right.OPEN: health}
        self._route = lru_cache(_PATHS)(self._found)  # clients request the same few paths repeatedly

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, also after an error."""
        started_s = time.perf_counter()
        request = ServeRequest(scope, receive)
        try:
            self._refuse_strangers(request)
            needed, endpoint, scope["path_params"] = self._route(scope["method"], scope["path"])
            if self._access.tokens and needed is Right.ACT and self._right_of(request) < Right.ACT:
                raise RequestError(403, "this token may only read: expected the token with which answers are asked for")
            reply = await endpoint(request)
        except ClientDisconnect:  # or the connection was closed because the body was late
            self._metrics.answered(408, time.perf_counter() - started_s)
            return
        except Exception as exc:
            reply = _reply_to(exc, scope)
        finally:
            self._held_bytes -= request.held_bytes
        await reply(scope, receive, send)
        self._metrics.answered(reply.status_code, time.perf_counter() - started_s)
        if request.after is not None:
            request.after()

    def _found(self, method: str, path: str) -> tuple[Right, Endpoint, Mapping[str, str]]:
        """Return the endpoint for a request with the right that it needs, and the parameters in its path."""
        scope = {"type": "http", "method": method, "path": path, "root_path": ""}
        matches = [(right, route, *route.matches(scope)) for right, routes in self.routes.items() for route in routes]
        for right, route, match, child in matches:
            if match is Match.FULL:
                return right, route.endpoint, child["path_params"]
        if any(match is Match.PARTIAL for _, _, match, _ in matches):
            raise RequestError(405, f"Method Not Allowed: {method} {path:.200}")
        raise RequestError(404, f"Not Found: {method} {path:.200}")

    def _refuse_strangers(self, request: ServeRequest) -> None:
        if self._access.tokens:
            if request.scope["path"].startswith(_HEALTH):
                return
            if self._right_of(request) < Right.READ:
                reason = "expected the header Authorization: Bearer TOKEN"
                raise RequestError(401, reason, {"WWW-Authenticate": "Bearer"})
            return
        host, origin = request.header(b"host"), request.header(b"origin")
        if not self._access.by_certificate and not _names_this_machine(host):
            raise RequestError(421, f"expected localhost or 127.0.0.1 as Host, got {host!r:.60}: others need a token")
        # A browser would also send the certificate with requests of a foreign page.
        if is_of_a_foreign_page(origin, request.header(b"sec-fetch-site"), host):
            raise RequestError(
                403, "expected a request of a program, got one of a web site: a page has to ask its own server"
            )

    def _right_of(self, request: ServeRequest) -> Right:
        return self._access.tokens.right_of(bearer(request.header(b"authorization")))

    # --- answers

    async def _infer(self, request: ServeRequest) -> Response:
        lane = self._lane(request)
        body, json_bytes = await self._body(request), request.header(_LENGTH) or None
        wanted, tensors = decode_request(body, json_bytes)
        features = self._signature.of_tensors(tensors)
        answer = await self._computed(lane, features)
        self._require_version(request, lane, answer)
        outputs = list(map(OutputTensor, trees.dotted_names("output", answer.structure), answer.leaves))
        version = str(answer.version.place.version)
        if self._answers is not None:
            wanted.id = wanted.id or _new_id()
            self._log(request, lane, Copied(wanted.id, False, json_bytes), body, answer, _tensors_of(answer))
        data, length = encode_answer(wanted, self._name, version, outputs, self._facts(lane, answer.version))
        if length is None:
            return Response(data, media_type=_JSON)
        return Response(data, headers={LENGTH_HEADER: str(length)}, media_type="application/octet-stream")

    async def _predict(self, request: ServeRequest) -> Response:
        lane = self._lane(request)
        body = await self._body(request)
        records, features = self._of_records(body)
        answer = await self._computed(lane, features)
        predictions = _rows(self._predicted(answer), features.num_samples)
        content = {"model": self._name, "version": answer.version.place.version, "predictions": predictions}
        if self._answers is not None:
            request_id = request.header(b"x-request-id")[:_LONGEST_ID] or _new_id()
            self._log(request, lane, Copied(request_id, True), body, answer, predictions, records)
            content["id"] = request_id
        return _json(content | self._facts(lane, answer.version))

    def _log(
        self, request: ServeRequest, lane: Lane, copied: Copied, body: bytes | bytearray, answer: Answer, content: Any,
        records: Sequence[bytes] = (),
    ) -> None:  # fmt: skip
        """Log an answer, and send the request to the shadow after the user has this answer."""
        assert self._answers is not None
        named = request.path_params.get("version") is not None or len(self._lanes) == 1
        probability = 1.0 if named else lane.share / self._limits[-1]
        self._answers.write(copied.id, answer.version, content, records, probability=probability)
        if (shadow := self._shadow) is not None:
            request.after = lambda: shadow.send(copied, body)

    async def compute_copy(self, copied: Copied, body: bytes) -> bool:
        """Compute a request of another server, and log the answer. Return False if it cannot be computed."""
        assert self._answers is not None
        try:
            if copied.has_records:
                _, features = self._of_records(body)
            else:
                features = self._signature.of_tensors(decode_request(body, copied.json_bytes)[1])
            answer = await self._computed(self._lanes[0], features)
            if copied.has_records:
                content: Any = _rows(self._predicted(answer), features.num_samples)
            else:
                content = _tensors_of(answer)
            self._answers.write(copied.id, answer.version, content, probability=0.0)
        except (RequestError, MalformedError, SampleError, SkipRecord):
            return False
        except Exception as exc:
            log.error("copied_request_failed", exc_info=exc)
            return False
        return True

    def _of_records(self, body: bytes | bytearray) -> tuple[list[bytes], Features]:
        records = _records(body)
        return records, self._signature.of_records([self._features(record) for record in records])

    def _features(self, record: bytes) -> Any:
        try:
            return self._task.decode_features(record)
        except (SampleError, SkipRecord):
            raise
        except RetryLater as exc:
            raise RequestError(503, f"the task cannot decode records now: {exc}", _LATER) from exc
        except Exception as exc:  # the user's code may raise anything
            raise SampleError(f"{type(exc).__name__}: {exc}") from exc

    def _predicted(self, answer: Answer) -> Mapping[str, Any]:
        output = trees.tree_of(answer.structure, [torch.from_numpy(leaf) for leaf in answer.leaves])
        try:
            return {**self._task.predict(output), **self._choice(output)}
        except Exception as exc:  # the user's code may raise anything
            raise SampleError(f"the task does not predict from this output: {described(exc)}") from exc

    def _choice(self, output: Any) -> Mapping[str, Any]:
        """Draw an action for each sample, if the answers are choices."""
        if (chosen := self._task.choose(output)) is None:
            return {}
        probabilities = probabilities_of(chosen)
        # The first action at which the sum is above the number that was drawn.
        sums = probabilities.cumsum(axis=1)
        actions = (sums <= self._rng.random((len(sums), 1)) * sums[:, -1:]).sum(axis=1)
        return {"action": actions, "probability": probabilities[np.arange(len(actions)), actions]}

    async def _computed(self, lane: Lane, features: Features) -> Answer:
        try:
            return await self._batcher.submit(lane, features)
        except TimeoutError:
            raise RequestError(503, f"not computed within {self._time_limit_s:g} s", _LATER) from None
        except QueueFullError as exc:
            raise RequestError(429, f"{exc}: send fewer at a time, or start more processes", _LATER) from None
        except LookupError:
            raise RequestError(503, f"no version can answer: {lane.problem}", _LATER) from None

    def _facts(self, lane: Lane, version: ServedVersion) -> dict[str, Any]:
        """Return the facts about its version that each answer contains."""
        newest = self._newest_samples()
        left = lane.left if lane.left and version.place == lane.place else ""
        is_known = newest >= 0 and version.samples >= 0 and not left
        facts: dict[str, Any] = {
            "term": version.place.term,
            "age_s": round(max(0.0, time.time() - version.made_s), 3),
            "samples_behind": max(0, newest - version.samples) if is_known else None,
            "newest_event_s": version.events.newest_ms / 1000 if version.events.count else None,
            "stale": bool(lane.stale),
        }
        if lane.stale:
            facts["stale_because"] = lane.stale
        if left:
            facts["left_behind"] = left
        return facts

    def _lane(self, request: ServeRequest) -> Lane:
        """Return the lane that answers. It is the lane of the path's version, otherwise one drawn by the shares."""
        name, wanted = request.path_params.get("name"), request.path_params.get("version")
        if name not in (self._name, None):
            raise RequestError(404, f"expected the model {self._name}, got {name!r:.60}")
        if wanted is None:
            return self._lanes[0] if len(self._lanes) == 1 else self._drawn(request)
        for lane in self._lanes:
            if wanted == lane.wanted or (lane.place is not None and wanted == str(lane.place.version)):
                return lane
        raise RequestError(404, f"expected one of the versions {', '.join(self._versions())}, got {wanted!r:.60}")

    def _drawn(self, request: ServeRequest) -> Lane:
        """Draw a lane by the shares. Requests with the same value of the header `split_by` get the same lane."""
        key = request.header(self._split_by) if self._split_by else ""
        hashed = hashlib.blake2b(key.encode("latin-1"), digest_size=8, person=b"doll-split").digest()
        drawn = int.from_bytes(hashed) / 2**64 if key else random.random()
        return self._lanes[min(bisect.bisect(self._limits, drawn * self._limits[-1]), len(self._lanes) - 1)]

    def _require_version(self, request: ServeRequest, lane: Lane, answer: Answer) -> None:
        """Refuse an answer whose version differs from the number in the request's path."""
        wanted = request.path_params.get("version", lane.wanted)
        if wanted not in (lane.wanted, str(answer.version.place.version)):
            now = ", ".join(self._versions())
            raise RequestError(404, f"version {wanted!r:.60} was replaced meanwhile: expected one of {now}")

    def _versions(self) -> list[str]:
        served = {str(lane.place.version) for lane in self._lanes if lane.place is not None}
        return sorted({*served, *(lane.wanted for lane in self._lanes)})

    async def _body(self, request: ServeRequest) -> bytes | bytearray:
        """Return the whole body. If it does not arrive in time, the connection is closed (`BoundedProtocol`)."""
        if request.header(b"content-encoding") not in ("", "identity"):
            raise RequestError(415, "expected a body that is not compressed", {"Connection": "close"})
        limit, length = self._max_body_bytes, request.header(b"content-length")
        is_too_long = length.isdecimal() and int(length[:18]) > limit
        body: bytes | bytearray = b""
        is_whole = False
        while not is_whole and not is_too_long:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk, is_whole = message.get("body", b""), not message.get("more_body", False)
            self._hold(len(chunk), request)
            if body:
                body = body if isinstance(body, bytearray) else bytearray(body)
                body += chunk
            else:
                body = chunk
            is_too_long = len(body) > limit
        if is_too_long:
            if request.header(b"expect").lower() != "100-continue":  # else the client has sent no body yet
                await _discard(request.receive)
            raise RequestError(413, f"expected a body of at most {limit} bytes", {"Connection": "close"})
        return body

    def _hold(self, count: int, request: ServeRequest) -> None:
        """Count bytes that were received for a request."""
        if self._held_bytes + count > _BODIES * self._max_body_bytes:
            reason = f"other requests have {self._held_bytes} bytes in memory: send fewer at a time"
            raise RequestError(429, reason, {**_LATER, "Connection": "close"})
        self._held_bytes += count
        request.held_bytes += count

    # --- health and metadata

    async def _live(self, request: ServeRequest) -> Response:
        return _json({"live": True})

    async def _ready(self, request: ServeRequest) -> Response:
        reasons = {lane.wanted: lane.problem for lane in self._lanes if lane.copy is None}
        return _json({"ready": False, "reasons": reasons}, 503) if reasons else _json({"ready": True})

    async def _model_ready(self, request: ServeRequest) -> Response:
        lane = self._lane(request)
        if lane.copy is None:
            return _json({"name": self._name, "ready": False, "reason": lane.problem}, 503)
        return _json({"name": self._name, "ready": True})

    async def _server_metadata(self, request: ServeRequest) -> Response:
        return _json({"name": "doll", "version": doll.__version__, "extensions": ["binary_tensor_data"]})

    async def _model_metadata(self, request: ServeRequest) -> Response:
        self._lane(request)
        tensors = {"inputs": self._signature.inputs, "outputs": self._signature.outputs}
        infos = {key: [info._asdict() for info in each] for key, each in tensors.items()}
        return _json({"name": self._name, "versions": self._versions(), "platform": "doll", **infos})

    async def _page(self, request: ServeRequest) -> Response:
        return Response(self._metrics.page(), media_type=CONTENT_TYPE)


async def _discard(receive: Receive) -> None:
    """Read the remaining part of a body for a short time, because a sending client does not read the answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            while (await receive()).get("more_body"):
                pass


@lru_cache(64)
def _names_this_machine(host: str) -> bool:
    """Return whether a `Host` header names this machine. A page of a foreign web site would send another name."""
    return not host or is_loopback(host_name(host))


def _tensors_of(answer: Answer) -> dict[str, Any]:
    names = trees.dotted_names("output", answer.structure)
    return {name: leaf.tolist() for name, leaf in zip(names, answer.leaves, strict=True)}


def _new_id() -> str:
    return uuid.uuid4().hex


def _json(content: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, _JSON)


def _reply_to(error: Exception, scope: Scope) -> Response:
    """Return the answer that a client gets for an error."""
    match error:
        case RequestError():
            return _json({"error": str(error)[:_LONGEST_REASON]}, error.status, error.headers)
        case MalformedError():
            return _json({"error": str(error)[:_LONGEST_REASON]}, 400)
        case SampleError() | SkipRecord():
            return _json({"error": str(error)[:_LONGEST_REASON]}, 422)
    log.error("request_failed", path=scope["path"][:200], exc_info=error)
    return _json({"error": "the server has failed; its log says why"}, 500)


def _records(body: bytes | bytearray) -> list[bytes]:
    """Return the records in the body of `POST /predict`: a JSON object, or a list of records."""
    try:
        if body.lstrip()[:1] != b"[":
            return [bytes(msgspec.json.decode(body, type=msgspec.Raw))]
        records = [bytes(record) for record in msgspec.json.decode(body, type=list[msgspec.Raw])]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise MalformedError(f"expected a record in JSON, or a list of records: {short(exc)}") from None
    if not records:
        raise SampleError("expected at least one record, got an empty list")
    return records


def _rows(columns: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return one prediction for each sample."""
    lists = {}
    for name, column in columns.items():
        lists[name] = column.tolist() if isinstance(column, torch.Tensor) else np.asarray(column).tolist()
        if not isinstance(lists[name], list) or len(lists[name]) != count:
            raise SampleError(f"Task.predict: expected {count} values of {name!r}, one for each sample")
    return [{name: column[at] for name, column in lists.items()} for at in range(count)]
