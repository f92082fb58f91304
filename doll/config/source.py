"""The source of the samples, and the process by which they arrive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from doll.config.format import CsvFormat, FormatSection, JsonFormat
from doll.config.join import Time
from doll.config.section import LONGEST_S, Section
from doll.config.variants import Variants


class ArrivalsConfig(Section):
    """When samples arrive on each stream."""

    process: Literal["poisson", "deterministic", "asap", "trace"] = "poisson"
    rate_per_s: PositiveFloat | list[PositiveFloat] = 125.0
    """samples per second and stream; or a list with the rate of each stream. If a task makes several samples of one
    record, it is the rate of records"""
    trace: Path | None = None
    """text file with one gap in seconds per line; at its end, it is repeated from its beginning"""
    while_down: Literal["queue", "pause"] = "queue"
    """what `doll produce` does while the worker of a stream is down: queue continues to send; pause sends nothing until
    the worker is live again (the model of the DOLL paper, which its formulas for cost and runtime assume)"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.while_down == "pause" and self.process == "asap":
            raise ValueError("while_down: pause: expected process poisson, deterministic or trace, got asap")
        if (self.process == "trace") != (self.trace is not None):
            raise ValueError("expected 'trace' (a file of gaps in seconds) exactly when process is 'trace'")
        return self


class SourceSection(Section, ABC):
    """The keys that all sources have in common."""

    kind: str
    limit_samples: PositiveInt | None = None
    """end the stream after this many samples; default: the stream has no end"""

    @abstractmethod
    def position_identity(self) -> list[Any] | None:
        """Return, as JSON, the values that identify this source. A restarted producer continues from its last position
        if these values have not changed.

        Return None if the source has no positions, because it draws at random or is a pipe. Every source must define
        this method. Without it, a restarted producer would send a file again from its start.
        """

    def format_problem(self, given: FormatSection | None) -> str:
        """Return the reason why `data.format` cannot decode this source's records; "" if it can, or if the task
        does."""
        return ""


def _require_different(names: list[str]) -> None:
    if len(set(names)) < len(names):
        raise ValueError(f"columns: expected different names, got {', '.join(names)}")


class CsvSource(SourceSection):
    """The lines of a CSV file in order, complete or with only some of the columns; sample i goes to stream i mod N."""

    kind: Literal["csv"]
    path: Path
    header: bool = False
    """the first line is a header and not a sample"""
    columns: list[str] = Field(default_factory=list)
    """send only these columns, in this order, by their names in the header. Default: the lines are sent unchanged"""
    delimiter: str = Field(default=",", min_length=1, max_length=1)
    """character between two cells, used with `columns`"""
    repeat: bool = False
    """start again at the beginning when the file ends"""

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.columns and not self.header:
            raise ValueError("columns: expected header: true, a file whose first line names its columns")
        _require_different(self.columns)
        return self

    def format_problem(self, given: FormatSection | None) -> str:
        if self.columns and isinstance(given, CsvFormat) and (given.columns, given.delimiter) != (
            self.columns, self.delimiter
        ):  # fmt: skip
            return f"expected columns {', '.join(self.columns)} and delimiter {self.delimiter!r}, as the source has"
        return ""

    def position_identity(self) -> list[Any] | None:
        return ["csv", str(self.path), self.header]


class JsonlSource(SourceSection):
    """The lines of a JSON Lines file in order, unchanged; sample i goes to stream i mod N."""

    kind: Literal["jsonl"]
    path: Path
    repeat: bool = False
    """start again at the beginning when the file ends"""

    def position_identity(self) -> list[Any] | None:
        return ["jsonl", str(self.path)]


class RowsSource(SourceSection, ABC):
    """The keys that sources of tabular data have in common: each row is sent as a JSON object."""

    columns: list[str] = Field(default_factory=list)
    """names of the columns to read; default: all"""
    repeat: bool = False
    """start again at the beginning when the data end"""

    @model_validator(mode="after")
    def _named(self) -> Self:
        _require_different(self.columns)
        return self

    def format_problem(self, given: FormatSection | None) -> str:
        if given is None or isinstance(given, JsonFormat):
            return ""
        return f"expected none, or {{kind: json}}, because the source sends JSON objects; got kind: {given.kind}"


class ParquetSource(RowsSource):
    """The rows of Parquet files in order, as JSON objects; row i goes to stream i mod N. Dates and times become text
    (ISO 8601), bytes become base64, NaN becomes null. The source needs `doll-online[parquet]`."""

    kind: Literal["parquet"]
    path: Path
    """a file, or a folder whose files `*.parquet` are read in the order of their names; files whose names begin with
    `.` or `_` are omitted"""

    def position_identity(self) -> list[Any] | None:
        return ["parquet", str(self.path)]


class DatasetSource(RowsSource):
    """The rows of a Hugging Face data set that `Dataset.save_to_disk` has written; they are sent like rows of Parquet
    files. The source needs `doll-online[datasets]`."""

    kind: Literal["dataset"]
    path: Path
    """the folder that was given to `save_to_disk`"""
    split: str | None = None
    """the data set of a `DatasetDict` to read, such as `train`"""

    def position_identity(self) -> list[Any] | None:
        return ["dataset", str(self.path), self.split]


class TextSource(SourceSection):
    """The texts of a file, one in each line, as JSON objects `{"text": "..."}`; line i goes to stream i mod N."""

    kind: Literal["text"]
    path: Path
    fields: list[str] = Field(default_factory=list)
    """fields of the JSON object in each line whose texts are joined; default: each line is plain text"""
    tokens_per_record: PositiveInt = Field(default=256, le=1_000_000)
    """maximum number of tokens (runs of letters) in a record; a longer text is cut into several records"""
    skip: int = Field(default=0, ge=0)
    """number of lines to skip at the beginning, for a held-out set"""
    repeat: bool = False
    """when the file ends, start again after the skipped lines"""
    numbered: bool = False
    """add a `number` to each record, which is the same in each repetition: record k of stream n has k N + n"""

    def position_identity(self) -> list[Any] | None:
        return ["text", str(self.path), self.fields, self.tokens_per_record, self.skip]


class StdinSource(SourceSection):
    """The lines of standard input, unchanged; sample i goes to stream i mod N."""

    kind: Literal["stdin"]

    def position_identity(self) -> list[Any] | None:
        return None


class FeedSource(SourceSection):
    """The records that a Python program provides while the job runs (`doll.train`); sample i goes to stream i mod N."""

    kind: Literal["feed"]
    socket: Path
    """the Unix socket on which the program listens"""

    def position_identity(self) -> list[Any] | None:
        return ["feed", str(self.socket)]


class PythonSource(SourceSection):
    """The records that a function returns. The function is called once for each stream, as `function(stream, **args)`.
    It returns an iterator of bytes or of texts; texts are sent in UTF-8. `stream` is a
    `doll.producers.sources.Stream`."""

    kind: Literal["python"]
    of: str = Field(pattern=r"[^:]:[A-Za-z_]\w*$")
    """`module:function`, or `file.py:function` relative to the job file"""
    args: dict[str, Any] = Field(default_factory=dict)
    """arguments of the function. Paths (`..._path`, `..._folder`, `..._file`) are relative to the job file"""
    in_order: bool = False
    """the function returns the same records at each start, and the producer skips the records that it has already sent.
    Default: the function returns other records after each start, as a function does that draws at random
    (`stream.rng()`)"""

    def position_identity(self) -> list[Any] | None:
        return ["python", self.of, self.args] if self.in_order else None


class HandoverConfig(Section):
    """How DOLL finds the first record of the topic that is not in the table: by the columns `partition` and `offset`;
    or by `key` and time, with an overlap. Of a record that arrives in the overlap, it is looked up whether the table
    has it."""

    partition: str | None = None
    """name of the column that has the partition of the topic"""
    offset: str | None = None
    """name of the column that has the offset in this partition"""
    key: str | None = None
    """name of the column, and of the field of the topic's records, that together with the time identifies a record"""
    overlap_s: PositiveFloat | None = Field(default=None, le=LONGEST_S)
    """a record arrives in the topic at most this long after its event time. Each record that arrived this long before
    the latest time of the table is in the table, and no record that arrived this long after it"""

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = {name for name in ("partition", "offset", "key", "overlap_s") if getattr(self, name) is not None}
        if given not in ({"partition", "offset"}, {"key", "overlap_s"}):
            raise ValueError(f"expected partition and offset, or key and overlap_s; got {', '.join(sorted(given))}")
        return self


class HistorySource(SourceSection):
    """The rows of a table in the order of their event time, as fast as they can be read, and then the records of a
    topic, from the first one that is not in the table; each record once (docs/guide/history.md). The source needs
    `doll-online[parquet]`."""

    kind: Literal["history"]
    table: str = Field(min_length=1)
    """a file or folder, or an address such as s3://bucket/folder. The files are `*.parquet`, also those in
    subfolders"""
    format: Literal["parquet", "delta", "iceberg"] = "parquet"
    """delta: a Delta table, of which the newest version is read; it needs `doll-online[delta]`. iceberg: an Iceberg
    table, of which the newest snapshot is read; it needs `doll-online[iceberg]`"""
    topic: str = Field(pattern=r"^[a-zA-Z0-9._-]{1,249}$")
    """name of an existing topic, which DOLL only reads"""
    time: Time
    """name of the column, and with `handover.key` of the field of the topic's records, that has the event time; or
    {field: ..., unit: ...}. A column of timestamps has a unit of its own"""
    handover: HandoverConfig
    """how DOLL finds where the table ends in the topic"""
    columns: list[str] = Field(default_factory=list)
    """names of the columns to send, as one JSON object for each row; default: all"""
    value: str | None = None
    """name of a column of bytes or text that is sent as it is, instead of `columns`: the values of the topic's
    records"""
    memory_bytes: PositiveInt = Field(default=1024 * 1024 * 1024, ge=1_048_576)
    """maximum size of row groups whose times overlap, because they are in memory together"""
    max_unlearned: PositiveInt | None = 20_000_000
    """rows are sent only while fewer records of the samples topic than this are not learned yet, so that it does not
    delete them first; null: without a limit"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _require_different(self.columns)
        if self.time.field is None:
            raise ValueError("time: expected the name of a column")
        if self.columns and self.value:
            raise ValueError("expected columns or value, got both")
        return self

    def position_identity(self) -> list[Any] | None:
        return None  # the topic `history` has the position

    def format_problem(self, given: FormatSection | None) -> str:
        if self.value is not None or given is None or isinstance(given, JsonFormat):
            return ""
        return f"expected {{kind: json}}, because the source sends JSON objects, or source.value; got {given.kind}"


sources = Variants(
    "kind", CsvSource, JsonlSource, ParquetSource, DatasetSource, StdinSource, FeedSource, PythonSource, TextSource,
    HistorySource,
    gone={
        kind: f"{kind} is a function of the example {example} now (doll example copy {example}): write "
        f"{{kind: python, of: '{function}', args: {{...}}{order}}}"
        for kind, example, function, order in (
            ("digits", "digits", "task.py:samples", ""),
            ("idx", "emnist", "task.py:letters", ""),
            ("synthetic", "synthetic", "source.py:gaussians", ""),
            ("criteo", "clicks", "task.py:from_file", ", in_order: true"),
            ("synthetic_clicks", "clicks", "task.py:made_up", ""),
            ("ratings", "ratings", "task.py:from_file", ", in_order: true"),
            ("synthetic_ratings", "ratings", "task.py:made_up", ""),
        )
    },
)  # fmt: skip

SourceConfig = Annotated[SourceSection, sources]
