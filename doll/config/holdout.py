"""The section `evaluation.holdout`: the records that a job never learns, and on which it measures its model."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AwareDatetime, BeforeValidator, Field, model_validator

from doll.config.join import KeyConfig
from doll.config.section import Section


def _as_key(value: Any) -> Any:
    if isinstance(value, str) and value != "key":
        raise ValueError(f"expected key, {{field: NAME}} or {{header: NAME}}, got {value!r:.100}")
    return {} if value == "key" else value


class HashedKeyConfig(KeyConfig):
    """Where a record has the key that is hashed: in a field of the value, or in a header; default: Kafka's key."""


class HoldoutConfig(Section):
    """Records that the model never learns, and on which it is measured: a share of the stream, the records of a time,
    or another topic (docs/guide/metrics.md). `share`, `by`, `from` and `until` cannot change while the job exists."""

    share: float | None = Field(default=None, gt=0, lt=1)
    """share of the stream: a record is held out if the hash of its key is in this share"""
    by: Annotated[HashedKeyConfig, BeforeValidator(_as_key)] = HashedKeyConfig()
    """what is hashed: key: Kafka's key, so that all records of a key are held out, or none; or a field of a JSON
    object, or a header. Of a record without it, partition and offset are hashed"""
    begin: AwareDatetime | None = Field(default=None, alias="from")
    """the records with this event time (`freshness.time`) or a later one are held out: ISO 8601 with a time zone"""
    until: AwareDatetime | None = None
    """the records before this event time are held out; with `from`: those between the two"""
    topic: str | None = None
    """name of another topic, with records as in the job's own. The evaluator reads it to its end when it starts, in the
    place of `Task.holdout`; of a long topic, the last `evaluation.max_samples` records"""

    @model_validator(mode="after")
    def _one(self) -> Self:
        has_times = self.begin is not None or self.until is not None
        if (self.share is not None) + has_times + (self.topic is not None) != 1:
            raise ValueError("expected one of share, from and until, and topic")
        if self.begin is not None and self.until is not None and self.begin >= self.until:
            raise ValueError("until: expected a time after `from`")
        return self
