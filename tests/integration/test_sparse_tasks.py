"""Clicks and ratings on the real broker and Redis: learned to the best there is, bad records are dead letters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from doll.producers import sources
from examples.clicks import task as clicks
from examples.ratings import task as ratings
from fuzzing import ALL_EXAMPLES
from job_policies import some
from job_rig import MakePipeline

pytestmark = pytest.mark.integration

CLICKS = (
    "task.class=examples.clicks.task:Clicks", "task.args={columns: 4096}", "data.batch_size=64",
    "data.samples_per_record=16",
    "source={kind: python, of: 'examples.clicks.task:made_up', args: {categories: 5, density: 0.5}}",
    "arrivals.process=asap", "training.optimizer={name: adam, lr: 0.02}",
)  # fmt: skip
FACTORS = (
    "task.class=examples.ratings.task:MatrixFactorization", "task.args={users: 100, items: 80}", "data.batch_size=64",
    "data.samples_per_record=16",
    "source={kind: python, of: 'examples.ratings.task:made_up', args: {users: 100, items: 80, observed: 0.5}}",
    "arrivals.process=asap", "training.optimizer={name: sgd, lr: 5}", "training.policy.group_size=1",
)  # fmt: skip


def mean_loss(job: Any, first: int, last: int) -> float:
    """Prequential loss of the updates of these versions: of each sample before it was learned."""
    updates = [update for update in job.updates if first < update.version <= last]
    return float(np.average([update.loss for update in updates], weights=[update.n_samples for update in updates]))


@pytest.mark.parametrize("sparse", [False, True] if ALL_EXAMPLES else [True])  # dense models: see the factors below
def test_clicks_are_learned_down_to_the_bayes_log_loss(make_pipeline: MakePipeline, sparse: bool) -> None:
    task = f"task.args={{columns: 4096, sparse: {str(sparse).lower()}}}"
    job = make_pipeline(*CLICKS, task, "source.limit_samples=60000", "stop.updates=400")
    job.start()
    job.start_producer()
    job.until_finished()
    job.assert_audit_ok()
    source: Any = job.config.source
    rng = sources.child_rng(job.config.seed, sources.CONCEPT)
    truth = clicks.draw_truth(source.args["categories"], 1.1, source.args["density"], rng)
    bayes = clicks.bayes_log_loss(truth, np.random.default_rng(0), 100_000)
    # Of 12,800 samples the log-loss has a standard error of about 0.004.
    assert mean_loss(job, 0, 20) > bayes + 0.1
    assert bayes - 0.015 < mean_loss(job, 300, 400) < bayes + 0.03


def test_the_factors_of_ratings_are_learned_down_to_the_noise(make_pipeline: MakePipeline) -> None:
    job = make_pipeline(*FACTORS, "source.limit_samples=160000", "stop.updates=2000")
    job.start()
    job.start_producer()
    job.until_finished()
    job.assert_audit_ok()
    assert mean_loss(job, 0, 20) > 0.15
    assert mean_loss(job, 1800, 2000) < 0.02  # the noise alone: 0.01


BAD_CLICKS: dict[str, tuple[bytes, str]] = {
    "columns are missing": (b"1\t2\t3", "got 3 cells"),
    "a category is not hex": (b"\t".join([b"1", *[b"0"] * 13, b"xyz", *[b""] * 25]), "cell 15: expected a category"),
    "a negative count": (b"\t".join([b"1", b"-7", *[b""] * 38]), "cell 2: expected a count of -3 to 2147483647"),
    "an enormous count": (b"\t".join([b"1", b"9" * 12, *[b""] * 38]), "cell 2: expected a count"),
    "another label": (b"\x07" + bytes(156), "expected 0 or 1 in the first byte"),
    "garbage": (b"\xff" * 157, "got 1 cells in 157 bytes"),
}
BAD_RATINGS: dict[str, tuple[bytes, str]] = {
    "no such user": (ratings.pack(100, 0, 1.0), "expected user 0 to 99 (task.args.users), got 100"),
    "no such item": (b"1,80,1", "expected item 0 to 79 (task.args.items), got 80"),
    "a negative user": (b"-1,2,3", "expected the number of the user"),
    "a rating of NaN": (ratings.pack(1, 1, float("nan")), "got nan"),
    "an infinite rating": (b"1,2,inf", "got inf"),
    "no rating": (b"1,2", "or a line of user, item and rating"),
}


@pytest.mark.parametrize(("settings", "bad"), [(CLICKS, BAD_CLICKS), (FACTORS, BAD_RATINGS)], ids=["clicks", "ratings"])
def test_bad_records_are_dead_letters_and_the_rest_is_learned(
    make_pipeline: MakePipeline, settings: tuple[str, ...], bad: dict[str, tuple[bytes, str]]
) -> None:
    job = make_pipeline(
        *settings, "data.batch_size=8", "data.samples_per_record=1", "training.policy.group_size=2", "stop.updates=8"
    )
    job.start()
    streams = sources.open_streams(job.config, [0, 0])
    for partition in (0, 1):
        values = [next(streams[partition]) for _ in range(64)]
        places = [9 * at + 3 for at in range(len(bad))]
        for place, (record, _) in zip(places, bad.values(), strict=True):
            values[place] = record
        job.send(values, partition)
    job.until_finished()
    report = job.assert_audit_ok()
    assert (report.applied + report.dead, report.dead) == (128, 2 * len(bad))
    letters = {(letter.partition, letter.offset): letter for letter in job.read("dead")}
    for partition in (0, 1):
        for place, (record, reason) in zip(places, bad.values(), strict=True):
            letter = letters[partition, place]
            assert reason in letter.reason
            assert (letter.payload, letter.code) == (record, "undecodable")
    assert sum(update.n_samples for update in job.updates) == 128 - 2 * len(bad)


def test_lines_of_criteo_are_learned_as_packed_records_are(make_pipeline: MakePipeline) -> None:
    """What another Kafka client writes: the lines themselves."""
    job = make_pipeline(
        *CLICKS, "data.batch_size=8", "data.samples_per_record=1", "training.policy.group_size=2", "stop.updates=4"
    )
    line = b"\t".join([b"1", *[b"5"] * 13, *[b"1a2b3c4d"] * 26])
    job.start()
    job.send([line, clicks.pack_line(line)] * 32)
    job.until_finished()
    report = job.assert_audit_ok()
    assert (report.applied, report.dead) == (64, 0)
    assert job.updates[-1].loss < job.updates[0].loss


STEPS = ["{name: ssp, staleness: 2}", "{name: isp, significance: 0.7}"]


@pytest.mark.parametrize("policy", some(STEPS, "isp"))
def test_factors_are_learned_by_steps_of_the_workers_too(make_pipeline: MakePipeline, policy: str) -> None:
    job = make_pipeline(
        *FACTORS, "training.optimizer={name: sgd, lr: 2}", f"training.policy={policy}", "source.limit_samples=160000",
        "stop.samples=140000",
    )  # fmt: skip
    job.start()
    job.start_producer()
    job.until_finished()
    job.assert_audit_ok()
    last = job.updates[-1].version
    assert mean_loss(job, 0, 20) > 0.15
    assert mean_loss(job, last - 100, last) < 0.03
