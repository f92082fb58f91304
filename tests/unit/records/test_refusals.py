"""Refused records are counted by reason, and end a job where they are too large a share of the last ones."""

from __future__ import annotations

import pytest
from doll.config.data import BadRecordsConfig
from doll.records.control import DeadLetter, decode, encode
from doll.records.refusals import MAX_REASONS, OTHER, ReasonCounts, Refusals, RefusalState
from hypothesis import given
from hypothesis import strategies as st

DEFAULT = BadRecordsConfig()


def fed(*spans: tuple[int, int], batch: int = 50) -> Refusals:
    """After spans of (records, refused of each hundred), in batches."""
    refusals = Refusals(DEFAULT.last_records)
    for records, percent in spans:
        for _ in range(records // batch):
            bad = batch * percent // 100
            refusals.add(batch, bad, [("bad", bad)] if bad else ())
    return refusals


def problem(refusals: Refusals) -> str | None:
    return refusals.problem(DEFAULT.share, DEFAULT.first_records)


def test_a_job_whose_first_thousand_records_are_all_refused_ends() -> None:
    assert problem(fed((950, 100))) is None
    ended = problem(fed((1000, 100)))
    assert ended is not None
    assert "1,000 of the last 1,000 records" in ended


def test_a_job_that_has_learned_for_long_survives_a_burst_but_not_a_stream_that_stays_bad() -> None:
    assert problem(fed((1_000_000, 0), (50_000, 100))) is None
    assert problem(fed((1_000_000, 0), (110_000, 100))) is not None


def test_a_stream_that_is_bad_in_part_goes_on() -> None:
    assert problem(fed((200_000, 90))) is None


def test_null_never_ends_a_job() -> None:
    assert fed((5_000, 100)).problem(None, DEFAULT.first_records) is None


def test_who_resumes_the_job_gets_a_new_window_and_keeps_the_reasons() -> None:
    refusals = fed((1000, 100))
    refusals.forget_recent()
    again = Refusals(DEFAULT.last_records, refusals.state())
    assert problem(again) is None
    assert again.reasons.in_order() == (("bad", 1000),)


def test_skipped_samples_are_counted_beside() -> None:
    refusals = fed((10, 0))
    refusals.skipped.add("tombstone", 3)
    again = Refusals(DEFAULT.last_records, refusals.state())
    again.skipped.add("tombstone", 4)
    assert (again.skipped.in_order(), again.reasons.in_order()) == ((("tombstone", 7),), ())


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(0, 900)), max_size=80), st.integers(1, 3000))
def test_the_window_holds_the_last_records_to_a_batch_and_a_twentieth(items: list[tuple[int, int]], size: int) -> None:
    refusals = Refusals(size)
    for records, refused in items:
        refusals.add(records, min(records, refused))
    total = sum(records for records, _ in items)
    assert refusals.recent_records >= min(total, size)
    assert refusals.recent_records <= size + size / 20 + 2 * 900
    assert 0 <= refusals.recent_refused <= refusals.recent_records
    assert len(refusals.state().window) <= 22
    again = Refusals(size, refusals.state())
    assert (again.recent_records, again.recent_refused) == (refusals.recent_records, refusals.recent_refused)


def test_reasons_that_differ_in_their_numbers_are_one() -> None:
    counts = ReasonCounts([("target 17: expected 0 to 9", 1), ("target 12: expected 0 to 9", 1), ("empty", 1)])
    assert counts.in_order() == (("target 17: expected 0 to 9", 2), ("empty", 1))


def test_reasons_are_bounded_and_harmless_on_a_terminal() -> None:
    counts = ReasonCounts((f"{'x' * n}\x1b[2J", 1) for n in range(1, 100))
    assert len(counts.in_order()) == MAX_REASONS + 1
    assert counts.in_order()[-1] == (OTHER, 99 - MAX_REASONS)
    assert all(reason.isprintable() for reason, _ in counts.in_order())


def test_a_state_without_reasons_has_the_same_numbers() -> None:
    state = RefusalState(reasons=(("user anna: no ids", 2), ("empty", 3)), window=((40, 5),), skipped=(("of anna", 4),))
    assert state.without_reasons() == RefusalState(reasons=((OTHER, 5),), window=((40, 5),), skipped=((OTHER, 4),))
    assert RefusalState().without_reasons() == RefusalState()


def test_a_dead_letter_s_reason_is_one_line_of_characters_that_are_printed() -> None:
    """It repeats what was in a record: it must neither steer a terminal, nor turn its line around, nor be no text."""
    made = DeadLetter(
        worker=0, partition=0, offset=0, reason="a\u202eb\x1b[2J\n c\ud800\u200b", payload=b"", payload_bytes=0
    )
    assert made.reason == r"a\u202eb\x1b[2J c\ud800\u200b"
    assert decode(encode(made)) == made
    forged = encode(made).replace(rb"\u202e", "\u202e\u202e".encode())
    assert decode(forged).reason.isprintable(), "whoever wrote it"  # type: ignore[union-attr]


@pytest.mark.parametrize("values", [{"share": 0.0}, {"share": 1.1}, {"first_records": 5, "last_records": 4}])
def test_values_that_cannot_work_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"share|first_records"):
        BadRecordsConfig(**values)
