"""The learners of the clicks benchmark are given the same clicks, and its table says what became of the goal."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks import clicks
from benchmarks.clicks import COLUMNS, Result, dictionaries, features, stream, summarize, table, vw_lines
from benchmarks.plain_models import PlainLogistic

pytestmark = pytest.mark.slow  # loads torch


def test_the_stream_is_the_same_in_each_call() -> None:
    first, again = (b"".join(rows.tobytes() for rows in stream(25_000)) for _ in range(2))
    assert first == again
    assert len(first) == 25_000 * 157


def test_all_learners_are_given_the_same_numbers_and_columns() -> None:
    (rows,) = stream(50)
    numbers, columns, y = features(rows)
    for click, line, values, places, label in zip(
        dictionaries(numbers, columns), vw_lines(numbers, columns, y), numbers, columns, y, strict=True
    ):
        given = {f"i{at}": value for at, value in enumerate(values.tolist()) if value}
        assert {key: value for key, value in click.items() if isinstance(key, str)} == given
        assert sum(value for key, value in click.items() if isinstance(key, int)) == 26
        sign, words = line.split(" | ")
        assert sign == ("1" if label else "-1")
        assert {word.split(":")[0] for word in words.split() if ":" in word} == set(given)
        assert [int(word) for word in words.split() if ":" not in word] == places.tolist()


def test_river_learns_as_the_plain_program_does_one_click_at_a_time() -> None:
    pytest.importorskip("river")
    result = clicks.learn_with_river(300, "SGD", 0.05)
    (rows,) = stream(300)
    numbers, columns, y = features(rows)
    plain = PlainLogistic(COLUMNS, 13)
    losses = [plain.learn(numbers[[at]], columns[[at]], y[[at]], 0.05) for at in range(300)]
    # Its intercept has a learning rate of its own.
    assert result.log_loss == pytest.approx(np.mean(losses), rel=0.02)


def test_vowpal_wabbit_learns() -> None:
    pytest.importorskip("vowpalwabbit")
    assert 0.4 < clicks.learn_with_vw(3000, "").log_loss < 0.65


def test_the_goal_is_missed_by_a_slow_learner_and_by_a_bad_one() -> None:
    runs = [("doll: b = 8", Result(speed, 0.42, 5.0, 0.1)) for speed in (29.0, 30.0, 35.0)]
    runs += [("river: fast", Result(11.0, 0.43, 15.0, 0.1)), ("river: good", Result(5.0, 0.41, 15.0, 0.1))]
    runs += [("river: slow", Result(10.0, 0.42, 15.0, 0.1)), ("vw: default", Result(20.0, 0.41, 7.0, 0.1))]
    text = table(summarize(runs), 0.365)
    assert "| doll: b = 8 | 3 | 30 | 29 to 35 | 0.4200 | 5.0 us | 10% |" in text
    assert "| doll: b = 8 / river: fast | 2.73 | -0.0100 | **NO** |" in text
    assert "| doll: b = 8 / river: good | 6.00 | +0.0100 | **NO** |" in text
    assert "| doll: b = 8 / river: slow | 3.00 | +0.0000 | met |" in text
    assert "| doll: b = 8 / vw: default | 1.50 | +0.0100 |  |" in text
