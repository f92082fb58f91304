"""A model host in the server's own process: one updater, one blob store."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from doll.config import JobConfig
from doll.errors import BlobError
from doll.process.fault_points import fault_point
from doll.ps.events import ApplyUpdate, FetchGradient, GradientFetched, GradientLost
from doll.ps.model_host import FetchOutcome
from doll.ps.updater import ContributionBuffer, Updater
from doll.storage.blobs import Blobs, Latest, decode_blob, encode_blob, encode_latest, latest_key, weights_key
from doll.telemetry import get_logger

log = get_logger(__name__)


class LocalModelHost:
    """`ModelHost` of one process."""

    def __init__(self, config: JobConfig, term: int, updater: Updater, blobs: Blobs) -> None:
        self._job = config.job
        self._term = term
        self._ttl_s = config.blobs.ttl_s
        self._keep_versions = config.blobs.keep_versions
        self._updater = updater
        self._blobs = blobs
        self._contributions = ContributionBuffer(updater)
        self._published: deque[int] = deque()

    @property
    def num_values(self) -> int:
        return int(self._updater.weights.size)

    def fetch(self, order: FetchGradient) -> FetchOutcome:
        blob = self._blobs.get(order.key)
        try:
            if blob is None:
                raise BlobError("not in the blob store (any more)")
            gradient = decode_blob(blob, job=self._job, kind="g", version=order.version, numel=self.num_values)
        except BlobError as exc:
            log.warning("gradient_lost", key=order.key, reason=str(exc), action="its batch is computed again")
            return FetchOutcome(GradientLost(grant_id=order.grant_id, reason=str(exc)))
        self._contributions.put(order.grant_id, gradient, in_order=order.in_order)
        return FetchOutcome(GradientFetched(grant_id=order.grant_id), blob)

    def apply(self, update: ApplyUpdate) -> int:
        num_samples = self._contributions.apply(update)
        fault_point("ps.after_apply")
        self._blobs.delete(*(item.push.key for item in update.sets if item.push.key))
        return num_samples

    def publish(self, version: int) -> str:
        key = weights_key(self._job, self._term, version)
        if version not in self._published:
            weights = self._updater.weights
            self._blobs.put(key, encode_blob(weights, job=self._job, kind="w", version=version), self._ttl_s)
            latest = Latest(term=self._term, version=version, key=key)
            self._blobs.put(latest_key(self._job), encode_latest(latest), self._ttl_s)
            self._published.append(version)
            while len(self._published) > self._keep_versions:
                self._blobs.delete(weights_key(self._job, self._term, self._published.popleft()))
        return key

    def republish(self, version: int) -> str:
        if version in self._published:
            self._published.remove(version)
        return self.publish(version)

    def drop(self, key: str) -> None:
        self._blobs.delete(key)

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        return self._updater.tensors()

    def load(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        self._updater.load(tensors)
