"""The section `freshness`: where records have their event time, and how soon an event should be in the model."""

from __future__ import annotations

from pydantic import Field, PositiveFloat

from doll.config.join import Time, TimeConfig
from doll.config.section import LONGEST_S, Section
from doll.records.event_times import Stage


class FreshnessConfig(Section):
    """How long it takes until an event is learned, durable and served (docs/guide/freshness.md). The times below are
    objectives: `doll prometheus` has an alert for each, and page and report show the share of records within it."""

    time: Time = TimeConfig()
    """the event time of a record; a text is the name of a field"""
    event_to_learned_s: PositiveFloat | None = Field(default=None, le=LONGEST_S)
    """time within which an event should be in the model; null: no objective"""
    event_to_durable_s: PositiveFloat | None = Field(default=None, le=LONGEST_S)
    """time within which an event should be in a checkpoint; null: no objective"""
    event_to_served_s: PositiveFloat | None = Field(default=None, le=LONGEST_S)
    """time within which `doll serve` should answer with a version that has learned the event; null: no objective"""
    share: float = Field(default=0.99, gt=0, le=1)
    """share of the records that should be within each of these times; otherwise the alert fires"""
    max_ahead_s: PositiveFloat = Field(default=1.0, le=LONGEST_S)
    """a record whose event time is further in the future than this is counted and left out: a clock or a unit is wrong.
    A time that is less far in the future counts as the present"""

    def limit_s(self, stage: Stage) -> float | None:
        return getattr(self, f"event_to_{stage}_s")  # type: ignore[no-any-return]
