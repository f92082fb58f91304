"""The example `characters`: sequences of characters, a model that sees only what is behind it, and that learns."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from doll.config import load
from doll.consumers.intake.decoding import RawRecords, decode_records
from doll.model.flat_model import build
from doll.optim.recipe import check_recipe, make_optimizer
from doll.task.base import load_task
from examples.characters.make_text import story
from examples.characters.task import CHARACTERS, OTHER, Characters, continued
from paths import EXAMPLES
from stacked import stack

pytestmark = pytest.mark.slow  # loads torch

JOB = EXAMPLES / "characters" / "job.yaml"


def record(text: str) -> bytes:
    return json.dumps({"text": text}).encode()


def test_a_sequence_is_followed_by_its_next_characters() -> None:
    task = Characters(length=4)
    short, long = (task.decode(record(text)) for text in ("ab", "zebra crossing"))
    assert [np.asarray(part).tolist() for part in short[:2]] == [[2, 3, 0, 0], [3, 0, 0, 0]]
    assert "".join(CHARACTERS[index] for index in np.asarray(long.y)) == "ebra"  # type: ignore[union-attr]
    assert np.asarray(task.decode(record("aé\t€x")).x).tolist() == [2, OTHER, OTHER, OTHER]  # type: ignore[union-attr]


@pytest.mark.parametrize("bad", [b"", b"text", b"{}", b'{"text": 3}', b'{"text": "\xff"}'])
def test_what_is_no_text_is_refused_with_a_reason(bad: bytes) -> None:
    task = Characters(length=4)
    decoded = decode_records(
        task, RawRecords(range(3), [record("a"), bad, record("b")]), samples_per_record=1, max_record_bytes=99
    )
    assert decoded.num_samples == 2
    assert [(refusal.offset, bool(refusal.reason)) for refusal in decoded.refused] == [(1, True)]


def test_texts_in_bulk_are_decoded_as_one_by_one() -> None:
    task, rng = Characters(length=32), random.Random(1)
    records = [record(story(rng)[: rng.randrange(60)]) for _ in range(40)]
    x, y = task.decode_many(records)[:2]
    slow_x, slow_y = stack(task.decode(item) for item in records)
    assert (x == slow_x).all()
    assert (y == slow_y).all()
    assert x.dtype == slow_x.dtype == np.int64


def test_a_character_does_not_see_those_behind_it() -> None:
    torch.manual_seed(0)
    task = Characters(length=16, width=8, heads=2)
    model = task.build_model()
    x = torch.randint(0, OTHER, (3, 16))
    other = x.clone()
    other[:, 9:] = OTHER
    one, two = (task.forward(model, ids) for ids in (x, other))
    assert torch.equal(one[:, :9], two[:, :9])
    assert not torch.equal(one[:, 9:], two[:, 9:])


@pytest.mark.parametrize("args", [{"length": 0}, {"blocks": 0}, {"width": 10, "heads": 4}])
def test_a_model_that_cannot_be_is_refused(args: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected length, blocks and heads above 0"):
        Characters(**args)


def test_the_stories_are_what_the_program_prints() -> None:
    lines = (JOB.parent / "stories.txt").read_text().splitlines()
    rng = random.Random(0)
    assert lines == [story(rng) for _ in range(1500)]


def test_the_recipe_of_its_job_learns() -> None:
    """A smaller model, for a few updates: its loss on held-out texts falls to a fraction."""
    config = load(JOB, ["task.args.width=32", "task.args.blocks=1", "task.args.length=48"])
    task = load_task(config)
    model = build(config, task)
    check_recipe(config.training, model)
    optimizer = make_optimizer(config.training, model)
    held_x, held_y = (torch.from_numpy(part) for part in stack(task.holdout()))

    def loss() -> float:
        with torch.no_grad():
            return float(task.loss(task.forward(model.module, held_x), held_y))

    before, rng = loss(), random.Random(2)
    for _ in range(60):
        x, y = task.decode_many([record(story(rng)) for _ in range(16)])[:2]  # type: ignore[arg-type, index]
        model.grad.zero_()
        (task.loss(task.forward(model.module, torch.from_numpy(x)), torch.from_numpy(y)) * 16).backward()
        optimizer.apply([model.grad.clone()], 1 / 16, 16)
    assert loss() < 0.6 * before
    assert set(continued(model.module, "the ", 8, 48)) <= set(CHARACTERS)
