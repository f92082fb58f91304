"""The section `data.join`: a features topic and label topics that become one stream of samples."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from doll.config.section import LONGEST_S, Section, short_form
from doll.records.event_times import Unit

OWN_FIELDS: Final = (
    "doll_label_age_s", "doll_is_correction", "doll_replaced_label", "doll_features", "doll_labels",
)  # fmt: skip


class _Place(Section):
    field: str | None = None
    """name of the field of the value; of a key, a number is used as its decimal text"""
    header: str | None = None
    """name of the header; if a record has several, the last one counts"""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.field is not None and self.header is not None:
            raise ValueError("expected field or header, got both")
        return self


class KeyConfig(_Place):
    """Where a record has its key: in a field of the value, or in a header; default: Kafka's key. A text is the name of
    a field."""


class TimeConfig(_Place):
    """Where a record has its event time: in a field of the value, or in a header, as a text; default: Kafka's
    timestamp. A text is the name of a field."""

    unit: Unit = "ms"
    """unit of a number: s, ms, us or ns since 1970-01-01 UTC; iso8601: a text with a time zone, as in
    2026-11-01T00:00:00Z"""


Key = Annotated[KeyConfig, short_form("field")]
Time = Annotated[TimeConfig, short_form("field")]


class _Topic(Section):
    topic: str
    """name of an existing topic, which DOLL only reads"""
    key: Key = KeyConfig()
    """the key of a record: features and labels with the same key belong together"""
    time: Time = TimeConfig()
    """the event time of a record"""


class FeaturesConfig(_Topic):
    """The topic of the features: JSON objects, one for each key within the window."""


class LabelConfig(_Topic):
    """A topic of labels: JSON objects."""

    name: str = Field(min_length=1, max_length=100)
    """name of the field that gets the label in the joined records"""
    value: str | int | float | bool = 1
    """the label: a text is the name of the field that has it; a number or true is the label of every record"""
    take: Literal["first", "last", "sum", "list"] = "first"
    """what several labels of one key become. first: the joined record is written when each label with `first` has
    come; the others are collected until the window closes"""
    retract: str | bool = False
    """whether records may take back the label of their key. true: a record without a value does; a text: so does a
    record whose field of this name is true. The features are then kept until their window has closed"""


class ValueConfig(Section):
    """A label for features whose window has closed without one."""

    value: str | int | float | bool | None
    """the label"""


class JoinConfig(Section):
    """Features and labels from different topics, joined by `doll join` into the samples topic of the job, each record
    exactly once (docs/guide/join.md)."""

    features: FeaturesConfig
    """the topic of the features"""
    labels: list[LabelConfig] = Field(min_length=1, max_length=16)
    """a list of the topics of labels"""
    window_s: PositiveFloat = Field(le=LONGEST_S)
    """how long after its features (by event time) a label may come"""
    lateness_s: PositiveFloat = Field(default=10.0, le=LONGEST_S)
    """how long a window stays open after its end, for records that arrive out of order"""
    on_close: Literal["negative", "drop"] | ValueConfig = "negative"
    """what features become whose window closes without a label: a sample with the label 0 (false, if the label is
    true), no sample, or a sample with the given label"""
    on_late: Literal["dead-letter", "correct"] = "dead-letter"
    """what a label becomes that comes after the end of the window: a dead letter, or a correction of the sample"""
    late_window_s: PositiveFloat | None = Field(default=None, le=LONGEST_S)
    """how long after the end of the window a late label may correct the sample [window_s]; only with on_late: correct.
    Features are kept as long"""
    early_after_s: PositiveFloat | None = Field(default=None, le=LONGEST_S)
    """write a sample with the label of `on_close` after this time, and a correction when the label comes; null: write
    one sample, when its label is known or the window has closed"""
    confirm: bool = False
    """write a correction with the same label when the window of an early sample closes without a label; some losses for
    delayed feedback need it; only with early_after_s"""
    max_ahead_s: PositiveFloat = Field(default=3600.0, le=LONGEST_S)
    """a record whose event time is further in the future than this is dead-lettered: its clock or unit is wrong, and it
    would close all windows"""
    joiners: PositiveInt = Field(default=1, le=1_000)
    """number of processes of `doll join` that `doll up` and the chart start (compose: 1); they share the partitions"""
    start: Literal["earliest", "latest"] = "earliest"
    """where a new job begins to read the topics"""
    commit_every_s: PositiveFloat = 0.1
    """interval of transactions: the time that the join adds to a record is about twice this time"""
    memory_bytes: PositiveInt = Field(default=256 * 1024 * 1024, ge=1_048_576)
    """memory of a joiner for open keys; the others are in files on its disk"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        names = [label.name for label in self.labels]
        if len(set(names)) < len(names):
            raise ValueError(f"labels: expected different names, got {', '.join(names)}")
        if own := sorted(set(names) & set(OWN_FIELDS)):
            raise ValueError(f"labels: the join itself writes the field {own[0]}: choose another name")
        if len(set(self.topics)) < len(self.topics):
            raise ValueError(f"expected different topics, got {', '.join(self.topics)}")
        if (early_s := self.early_after_s) is not None and early_s >= self.window_s:
            raise ValueError(f"early_after_s: expected less than window_s ({self.window_s:g}), got {early_s:g}")
        if self.early_after_s is not None and self.on_close == "drop":
            raise ValueError("early_after_s: expected on_close: negative or a value, the label of the early sample")
        if self.confirm and self.early_after_s is None:
            raise ValueError("confirm: expected early_after_s, which writes early samples")
        if self.late_window_s is not None and self.on_late != "correct":
            raise ValueError(f"late_window_s: expected on_late: correct, got {self.on_late}")
        return self

    @property
    def topics(self) -> list[str]:
        """The joined topics, the features first: the sources of `doll.records.join_log` in their order."""
        return [self.features.topic, *(label.topic for label in self.labels)]

    @property
    def kept_late_s(self) -> float:
        """How long features are kept after their window has closed."""
        return (self.late_window_s or self.window_s) if self.on_late == "correct" else 0.0
