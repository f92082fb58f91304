"""The places that still hold records that `doll forget` has removed from a model, and how to remove them there.

A file of the run that can hold a removed record, its id or its rows has a line here: tests/e2e/test_forgotten_rows.py
searches all files of a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from doll.config import HistorySource, JobConfig
from doll.kafka.range_reader import RangeReader
from doll.local.stack import has_kafka_data
from doll.run.folder import RunFolder, display_path
from doll.storage.checkpoints import CheckpointStore

_OWNER: Final = "its owner must delete them"
_DELETE: Final = "kafka-delete-records.sh deletes them"


def purge(run: RunFolder, store: CheckpointStore, newest: tuple[int, int]) -> None:
    """Delete all checkpoints but `newest`, (term, version), with their aliases and pins, and the event logs of the run.
    Raise CheckpointError or OSError if one of them cannot be deleted."""
    if others := _others(store, newest):
        store.change_marks(lambda marks: marks.only({newest[1]}))
        store.delete(others)
    for path in run.path.glob("events/*.log"):
        path.unlink()


def still_held(
    config: JobConfig, run: RunFolder, store: CheckpointStore, newest: tuple[int, int], reader: RangeReader
) -> Iterator[str]:
    """Yield a line for each place that still holds the records, or what was learned from them before `newest`, (term,
    version). Raise CheckpointError or ServiceUnavailableError if the store or Kafka cannot be read."""
    yield from _in_kafka(config, run)
    yield (
        "the model, if doll up --fresh or a new job begins at the start of the topic: it learns again what is not "
        "deleted there"
    )
    if others := _others(store, newest):
        numbers = ", ".join(str(number) for _, number in others[:8]) + (", ..." if len(others) > 8 else "")
        yield f"{len(others)} other versions ({numbers}) in {store.location}: doll forget --purge deletes them"
    if aliases := [f"{name} ({at})" for name, at in store.read_marks().aliases.items() if at != newest[1]]:
        yield f"aliases of other versions: {', '.join(aliases)}; doll versions alias moves them to {newest[1]}"
    if logs := [*run.path.glob("events/*.log")]:
        yield f"{len(logs)} event logs in {display_path(logs[0].parent)}: doll forget --purge deletes them"
    if run.model.is_dir():
        yield f"{display_path(run.model)}: an earlier version; doll export {display_path(run.path)} writes the new one"
    if (replayed := run.path / "replayed").is_dir():
        yield f"{display_path(replayed)}: an earlier version; rm -r {display_path(replayed)}"
    yield from _refused(config, run, reader)
    yield "backups, answer logs, model registries, and models exported to other folders, which DOLL does not know"


def _others(store: CheckpointStore, newest: tuple[int, int]) -> list[tuple[int, int]]:
    # An earlier term can have a higher version, which was damaged when the later term began.
    return [key for key in store.versions() if key != newest]


def _in_kafka(config: JobConfig, run: RunFolder) -> Iterator[str]:
    samples, join, source = config.topic("samples"), config.data.join, config.source
    retention = (
        f"Kafka deletes them after {config.data.retention_hours:g} hours (data.retention_hours); {_DELETE} at once"
    )
    yield f"topic {samples}: the records themselves; {retention if config.data.topic is None else _OWNER}"
    if join is not None:
        given = ", ".join([join.features.topic, *(label.topic for label in join.labels)])
        yield f"topics {given}: their features and labels; {_OWNER}"
        yield f"topics {config.topic('join')} and {config.topic('joins')}: what joiners keep of them; {_DELETE}"
    if isinstance(source, HistorySource):
        yield f"topic {source.topic} and {source.table}: the records of the source; {_OWNER}"
        yield f"topic {config.topic('history')}: records of the source that were refused; {_DELETE}"
    elif (path := getattr(source, "path", None)) is not None:
        yield f"{config.path(path)}: the records of the source; {_OWNER}"
    if has_kafka_data(run.path):
        data = display_path(run.path / "services" / "kafka")
        yield f"{data}: all topics of the job; rm -r {data} deletes them, and the run cannot go on or be audited then"


def _refused(config: JobConfig, run: RunFolder, reader: RangeReader) -> Iterator[str]:
    """Yield what holds dead letters, which contain the record, and their reasons, which can quote it."""
    topic, others = config.topic("dead"), f"{config.topic('events')} and {config.topic('metrics')}"
    low, end = reader.bounds(topic, 0) if reader.num_partitions(topic) else (0, 0)
    if low == end and not run.dead.exists():
        return
    yield f"topic {topic}: {end - low} dead letters, among them those of these records; {_DELETE}"
    yield f"topics {others}: reasons of dead letters, which can quote a record; Kafka deletes them after 6 hours"
    paths = (run.dead, run.logs, run.report, run.path / "report.previous.json", run.page)
    if files := " ".join(display_path(path) for path in paths if path.exists()):
        yield f"{files}: dead letters and their reasons; rm -r {files}"
