"""The error of a run whose source ended too early."""

from __future__ import annotations

from doll.run.local.running import ended_early


def test_more_samples_are_advised_only_where_nothing_failed() -> None:
    assert ended_early({"updates": 40, "accuracy": 0.97}, {}) == (
        "the source ended before the stop rule (updates 40, accuracy 0.97) was met: give it more samples"
    )
    text = ended_early({"updates": 40}, {"worker-1": (3, "exiting code=1 reason=no memory")})
    assert text.endswith("was met: worker-1 failed 3 times, last with: exiting code=1 reason=no memory")
    assert "more samples" not in text
