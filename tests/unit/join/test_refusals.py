"""What the join refused, as people see it."""

from __future__ import annotations

from doll.cli.dead import _details_of_refusal, _fields_of_refusal, _replay_text, _table
from doll.join.refusals import JoinRefusal
from doll.records.join_log import FEATURES, MAX_PAYLOAD_BYTES, RefusedRecord


def refusal(source: int, value: bytes, time_ms: int = 5_000, code: str = "orphan", key: bytes = b"k1") -> JoinRefusal:
    record = RefusedRecord(source, 3, 17, time_ms, key, value, code, "no features with its key")
    return JoinRefusal(("shown", "clicks")[source], record, 60.0)


def test_features_have_their_last_brace_again_and_what_could_not_be_read_is_as_it_came() -> None:
    assert refusal(FEATURES, b'{"id":1,').payload == b'{"id":1}'
    assert refusal(FEATURES, b"{").payload == b"{}"
    assert refusal(FEATURES, b'{"id"', -1, "not_json").payload == b'{"id"'
    assert refusal(1, b"1").payload == b"1"
    cut = refusal(FEATURES, b"x" * MAX_PAYLOAD_BYTES)
    assert cut.is_cut
    assert cut.payload == cut.record.value


def test_they_are_listed_and_shown_with_their_topic_and_cannot_be_replayed() -> None:
    item = refusal(1, b"1")
    (_, line) = _table([], [item]).splitlines()
    assert line.split()[:3] == ["clicks", "3/17", "1"]
    assert line.endswith("refused  orphan  no features with its key")
    text = _details_of_refusal(item)
    assert "  key: k1\n" in text
    assert "  text: 1\n" in text
    assert "  event time: 1970-01-01" in text
    fields = _fields_of_refusal(item)
    assert (fields["topic"], fields["partition"], fields["offset"], fields["event_time_s"]) == ("clicks", 3, 17, 5.0)
    assert _fields_of_refusal(refusal(1, b"?", -1, "not_json"))["event_time_s"] is None
    replayed = _replay_text([], [item], dry_run=False).splitlines()
    assert replayed[0].startswith("clicks 3/17: not replayed: the join refused it, and topic clicks belongs to")
    assert replayed[1] == "0 of 1 replayed"


def test_of_a_long_record_it_says_that_more_was_there() -> None:
    text = _details_of_refusal(refusal(FEATURES, b"x" * MAX_PAYLOAD_BYTES, -1, "not_json"))
    assert f"  the first 1024 of more than {MAX_PAYLOAD_BYTES} bytes (--json has all kept bytes)" in text
