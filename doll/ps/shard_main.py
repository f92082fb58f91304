"""`doll shard`: one process that holds a slice of the model, for one parameter server after another."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy.typing as npt
import torch

from doll.config import JobConfig
from doll.config.fingerprint import difference
from doll.errors import CheckpointError, ConfigError, VersionUnknownError
from doll.kafka.topics import cluster_id
from doll.model.flat_model import FlatModel, build, counted, fingerprint
from doll.model.model_slice import ModelSlice
from doll.optim.optimizer import SLICED, slice_of_tensors
from doll.process.health import heartbeat_of
from doll.process.signals import stop_requested
from doll.ps.model.model_host import ModelHost
from doll.ps.model.updater import make_parts
from doll.ps.shards import messages as m
from doll.ps.shards.redis_pipes import RedisShardEnd, take_number
from doll.ps.shards.shard import Shard, ShardTerm
from doll.ps.start import matched
from doll.service_checks import require_services
from doll.services import Services
from doll.storage.blobs import Blobs, scope_of
from doll.storage.checkpoints import Checkpoint, CheckpointStore
from doll.storage.redis_client import connect_redis
from doll.storage.slice_blobs import SliceBlobs
from doll.storage.stores import open_blobs, open_store
from doll.tables.checkpointed import part_of_tables
from doll.tables.row_slices import RowSlice
from doll.task.base import Task, load_task

_LOOK_S: Final = 1.0


def run_shard(config: JobConfig, services: Services, run_folder: Path, number: int | None) -> int:
    """Hold slice `number` of the model, or one that no other process holds. Return the exit code 0 after the end of the
    job or SIGTERM, or if another process has taken the number.

    Raises:
        ConfigError: the job has no shard of this number, or its model cannot be divided.
        ServiceUnavailableError: a service does not answer.
    """
    shards = counted(config, load_task(config)).ps.num_shards
    if shards == 1:
        raise ConfigError("doll shard: expected a job with ps.shards above 1, got 1")
    if number is not None and number >= shards:
        raise ConfigError(f"--shard: expected 0 to {shards - 1}, got {number}")
    name = "shard" if number is None else f"shard-{number}"
    with stop_requested() as stop, heartbeat_of(name, config) as heartbeat:
        torch.set_num_threads(1)
        require_services(config, services)
        task = load_task(config)
        store = open_store(config, run_folder)

        def give_up() -> bool:
            heartbeat.beat("loop")  # the shard waits for Redis; a restart would not help
            return stop.is_set()

        def beat(waits_for: str) -> None:
            heartbeat.beat("loop")
            heartbeat.set_waiting_for(waits_for)

        blobs = open_blobs(config, services, give_up=give_up)
        job = scope_of(config.job, cluster_id(config, services))
        client, process = connect_redis(services, retries=0), uuid.uuid4().hex
        while number is None:
            if stop.is_set():
                return 0
            if (number := take_number(client, job, shards, process)) is None:
                beat(f"the end of one of {shards} shards that run")
                stop.wait(_LOOK_S)
        end = RedisShardEnd(client, job, number, process)
        try:
            heartbeat.expect("loop")
            open_term = TermOpener(config, task, store, blobs)
            Shard(end, store, open_term, leave=lambda: stop.is_set() or end.is_replaced, beat=beat).run()
        finally:
            end.close()
            blobs.close()
    return 0


class TermOpener:
    """Opens the slice of a shard in one term. Raises ConfigError or CheckpointError if it cannot be opened."""

    def __init__(self, config: JobConfig, task: Task, store: CheckpointStore, blobs: Blobs) -> None:
        self._config, self._task, self._store, self._blobs = config, task, store, blobs

    def __call__(self, begin: m.Begin) -> ShardTerm:
        config, number = self._config, begin.shard
        model = build(config, self._task, in_files=True)  # the memory of the other slices can be reclaimed at once
        if (own := fingerprint(config, model)) != begin.fingerprint:
            raise ConfigError(f"the parameter server runs another job file: {difference(begin.fingerprint, own)}")
        if begin.place is None and (initial := matched(config, model)) is not None:
            initial.load_into(model)
        part = ModelSlice(model, number)
        parts = make_parts(config.training, model, part)
        if begin.place is not None:
            parts.load(self._tensors(begin.place, model, number))
        blobs = SliceBlobs(self._blobs, model.slices, number)
        host = ModelHost(config, begin.term, parts.updater, blobs, parts.tables, run_id=begin.run_id, is_shard=True)
        tables = () if parts.tables is None else tuple(parts.tables.tables)
        empty = Checkpoint(
            job=config.job, fingerprint=begin.fingerprint, term=begin.term, version=0, state=b"", tensors={},
            sliced=SLICED, row_slices_of=tables,
        )  # fmt: skip
        return ShardTerm(host, parts.updater, empty)

    def _tensors(self, place: tuple[int, int], model: FlatModel, number: int) -> Mapping[str, npt.NDArray[Any]]:
        """Return the tensors of this slice in a checkpoint, also if it has other parts, or none."""
        try:
            head = self._store.read_head(*place)
            if len(head.parts) == len(model.slices):
                return self._store.read_part(*place, head.parts[number]).tensors
        except (VersionUnknownError, FileNotFoundError) as exc:  # only a person deletes the newest checkpoint
            raise CheckpointError(str(exc)) from exc
        checkpoint = self._store.load_newest(None, place[1], in_place=True)
        if checkpoint is None or checkpoint.term != place[0]:
            raise CheckpointError(f"expected the checkpoint of term {place[0]}, version {place[1]}, got another one")
        tables = () if model.tables is None else model.tables.shapes
        try:
            rows = part_of_tables(checkpoint.tensors, tables, RowSlice(number, len(model.slices)))
        except KeyError as exc:
            raise CheckpointError(f"version {place[1]}: expected rows of the model's tables, got no {exc}") from exc
        return slice_of_tensors(checkpoint.tensors, model.slices[number]) | rows
