"""The stages of a virtual worker on other machines: processes `doll stage`, which the worker connects to (ADR 0140).

A gang is formed of all stages or of none: the worker first claims each of them, and tells them to begin when it holds
all. If one is away, it lets the others go, and tries again.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import redis

from doll.config import JobConfig
from doll.consumers.pipeline.stage_places import StagePlaces
from doll.consumers.pipeline.stage_processes import (
    READY_S,
    greet,
    reported,
    stage_fingerprint,
)
from doll.errors import ConfigError, DollError, StageLostError
from doll.kafka.reader import has_finished, on_finish
from doll.kafka.topics import cluster_id
from doll.model.flat_model import FlatModel
from doll.pipeline.links.frames import LinkFrameError
from doll.pipeline.links.link import LinkClosedError, StageLink, socket_pair
from doll.pipeline.links.tcp import Address, Claim, LinkRefusedError, connect
from doll.pipeline.profiling.layers import Layer
from doll.pipeline.runtime.messages import Begin, Part, StageAlive, StopStage, decode, encode
from doll.pipeline.runtime.stage_process import ALIVE_EVERY_S, SharedVectors, checked_part
from doll.pipeline.runtime.vectors import PIECE, VectorFile
from doll.services import Services
from doll.storage.blobs import scope_of
from doll.storage.redis_client import connect_redis, reason_of
from doll.telemetry import get_logger

log = get_logger(__name__)

_RETRY_S: Final = 0.2
_ALIVE: Final = encode(StageAlive(stage=-1))


class RemoteStages:
    """The stages of one gang, for the pipeline's engine.

    A thread reads what the stages send, so that a stage never waits for an engine that waits for Redis. It copies parts
    of vectors into the shared file, and passes other messages on. Another thread sends weights.
    """

    def __init__(
        self, links: Sequence[StageLink], chain: StageLink, addresses: Sequence[Address],
        ranges: Sequence[tuple[tuple[int, int], ...]], numel: int,
    ) -> None:  # fmt: skip
        """
        Args:
            links, addresses: control link and address of each stage.
            ranges: first position and length of each stage's parts of the model's vector of `numel` numbers.
        """
        self._links, self._addresses, self._ranges = tuple(links), tuple(addresses), tuple(ranges)
        pairs = [socket_pair() for _ in links]
        self._ends = tuple(pair[1] for pair in pairs)
        self.controls = tuple(pair[0] for pair in pairs)
        self.chain = chain
        self.shared = SharedVectors(*(VectorFile(numel) for _ in range(2)))
        self._pulled, self._pushed = self.shared.pulled.mapped(), self.shared.pushed.mapped()
        self._to_send: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for run, name in ((self._relay, "from-stages"), (self._send, "to-stages"))
        ]
        for thread in self._threads:
            thread.start()

    def name_of(self, number: int) -> str:
        return f"stage {number + 1} (at {self._addresses[number]})"

    def deliver(self, term: int, version: int) -> None:
        """Send the weights in the shared file to the stages, in the background. The file must not change before all
        stages have adopted them."""
        self._to_send.put((term, version))

    def why_closed(self, number: int) -> DollError:
        """Return the error that explains why the link to this stage is closed."""
        for _ in range(20):  # the reason may come from another stage, and a little later
            if (error := reported(self.controls)) is not None:
                return error
            self._closing.wait(0.05)
        return StageLostError(f"{self.name_of(number)} has closed its link: its worker ends with it")

    def close(self) -> None:
        """Let the stages go: they wait for the next gang. This method may be called again."""
        self._closing.set()
        self._to_send.put(None)
        for link in self._links:
            with contextlib.suppress(LinkClosedError):
                link.try_send(encode(StopStage()))
            link.close()
        for link in self._ends:
            link.close()
        for thread in self._threads:
            thread.join()
        for link in (*self.controls, self.chain):
            link.close()

    def _send(self) -> None:
        try:
            while (sent := self._to_send.get()) is not None:
                term, version = sent
                for link, ranges in zip(self._links, self._ranges, strict=True):
                    for first, length in ranges:
                        for at in range(first, first + length, PIECE):
                            link.send(encode(Part(at=at)), [self._pulled[at : min(at + PIECE, first + length)]])
                    link.send(encode(Part(at=0, term=term, version=version)), [self._pulled[:0]])
        except LinkClosedError:
            pass  # the other thread learns it, too

    def _relay(self) -> None:
        alive_at_s = time.monotonic()
        with selectors.DefaultSelector() as selector:
            for number, link in enumerate(self._links):
                selector.register(link, selectors.EVENT_READ, number)
            while not self._closing.is_set() and selector.get_map():
                for key, _ in selector.select(ALIVE_EVERY_S):
                    try:
                        self._pass_on(key.data)
                    except (LinkClosedError, LinkFrameError, ValueError) as exc:
                        if not self._closing.is_set():
                            log.warning("stage_link_ended", stage=key.data + 1, reason=str(exc))
                        selector.unregister(key.fileobj)
                        self._ends[key.data].close()  # the engine learns it
                if time.monotonic() - alive_at_s >= ALIVE_EVERY_S:
                    alive_at_s = time.monotonic()
                    for link in self._links:
                        with contextlib.suppress(LinkClosedError):
                            link.try_send(_ALIVE)

    def _pass_on(self, number: int) -> None:
        header, arrays = self._links[number].receive()
        message = decode(header)
        if isinstance(message, Part):
            array = checked_part(message, arrays, len(self._pushed))
            self._pushed[message.at : message.at + len(array)] = array
        elif isinstance(message, StageAlive):
            self._ends[number].try_send(header)  # an engine that waits for its server does not read
        else:
            self._ends[number].send(header)


def gather(
    config: JobConfig, services: Services, worker: int, model: FlatModel, parts: Sequence[Sequence[Layer]], *,
    give_up: Callable[[], bool], waiting_for: Callable[[str], None],
) -> RemoteStages | None:  # fmt: skip
    """Wait until all stages of this worker are free, and form a gang of them.

    Args:
        parts: layers of each stage.
        give_up: function that returns whether to stop waiting.
        waiting_for: function that is told what this process waits for.

    Returns:
        None: the job has ended, or `give_up` returned True.

    Raises:
        ConfigError: a stage runs another job file or version, or cannot be created.
    """
    if has_finished(config, services, give_up):
        log.info("job_finished", action="no gang is formed")
        return None
    finished, said = threading.Event(), ""
    with on_finish(config, services, finished.set), connect_redis(services) as client:
        places = StagePlaces(client, scope_of(config.job, cluster_id(config, services)))
        while not (give_up() or finished.is_set()):
            try:
                offered = places.find(worker, len(parts))
                addresses = [address for address in offered if address is not None]
                if len(addresses) == len(parts):
                    return form_gang(config, places.secret(), worker, model, parts, addresses)
                away = ", ".join(str(number) for number, address in enumerate(offered) if address is None)
                reason = f"no free stage {away}: start it (doll stage --worker {worker} --stage {away.split(',')[0]})"
            except redis.RedisError as exc:
                reason = f"Redis does not answer: {reason_of(exc)}"
            except (LinkRefusedError, LinkClosedError, StageLostError) as exc:
                reason = str(exc)
            if reason != said:
                log.info("waiting_for_stages", worker=worker, reason=reason)
                waiting_for(reason)
                said = reason
            finished.wait(_RETRY_S)
    return None


def form_gang(
    config: JobConfig, secret: bytes, worker: int, model: FlatModel, parts: Sequence[Sequence[Layer]],
    addresses: Sequence[Address],
) -> RemoteStages:  # fmt: skip
    """Form a gang of the stages at these addresses.

    Raises:
        ConfigError: a stage runs another job file or version, or cannot be created.
        LinkRefusedError, LinkClosedError, StageLostError: a stage is away or not free, or ends; all others are free
            again.
    """
    pipeline = config.worker.pipeline
    assert pipeline is not None
    gang, silent_s, numel = secrets.token_hex(8), pipeline.stage_timeout_s, model.flat.numel()

    def connected(stage: int, *, is_control: bool) -> StageLink:
        link = connect(addresses[stage], secret, Claim(config.job, worker, stage, gang, is_control), silent_s)
        opened.callback(link.close)
        return link

    with contextlib.ExitStack() as opened:
        controls = [connected(stage, is_control=True) for stage in range(len(parts))]
        for control, layers, following in zip(controls, parts, [*addresses[1:], Address("", 0)], strict=True):
            names = tuple(layer.name for layer in layers)
            control.send(encode(Begin(host=following.host, port=following.port, layers=names)))
        chain = connected(0, is_control=False)
        ranges = _wait_until_ready(controls, stage_fingerprint(config, model), numel)
        stages = RemoteStages(controls, chain, addresses, ranges, numel)
        opened.pop_all()
    log.info("gang_formed", worker=worker, gang=gang, stages=[str(address) for address in addresses])
    return stages


def _wait_until_ready(controls: Sequence[StageLink], expected: str, numel: int) -> list[tuple[tuple[int, int], ...]]:
    """Return the ranges of each stage when all are ready, and tell the others meanwhile that this process runs."""
    ranges: dict[int, tuple[tuple[int, int], ...]] = {}
    until_s = time.monotonic() + READY_S
    with selectors.DefaultSelector() as selector:
        for number, link in enumerate(controls):
            selector.register(link, selectors.EVENT_READ, number)
        while len(ranges) < len(controls):
            if time.monotonic() > until_s:
                away = min(set(range(len(controls))) - set(ranges))
                raise StageLostError(f"stage {away + 1} is not ready after {READY_S:g} s")
            for key, _ in selector.select(ALIVE_EVERY_S):
                message = decode(controls[key.data].receive()[0])
                if not isinstance(message, StageAlive):
                    ranges[key.data] = greet(message, key.data, expected).ranges
            for link in controls:
                link.try_send(_ALIVE)
    _check_ranges([part for parts in ranges.values() for part in parts], numel)
    return [ranges[number] for number in range(len(controls))]


def _check_ranges(ranges: Sequence[tuple[int, int]], numel: int) -> None:
    """Raise ConfigError if parts of the model's vector overlap, or are not inside it."""
    end = 0
    for first, length in sorted(ranges):
        if first < end or length < 1:
            raise ConfigError(f"the stages have cut the model differently: position {first} is in two of them")
        end = first + length
    if end > numel:
        raise ConfigError(f"expected stages of a model of {numel} numbers, got one with {end}")
