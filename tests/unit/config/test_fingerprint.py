"""What server, workers and checkpoint must agree on, and what a resume may change."""

from __future__ import annotations

import random
from itertools import product

import pytest
import record_builders
from doll.config import JobConfig, dump, parse
from doll.config.fingerprint import MAY_CHANGE, difference, differences, job_fields, make_fingerprint, refused_changes
from doll.config.fingerprint import parse as fields_of
from doll.consumers.protocol.worker_core import Exit, WorkerCore
from doll.errors import CheckpointError
from doll.records.control import Hello, Join, Welcome
from doll.storage.checkpoints import Checkpoint
from engine_runs import play, random_steps
from engine_world import POLICIES, World
from fuzzing import seeds
from memory_stores import MemoryCheckpointStore
from paths import ROOT

pytestmark = pytest.mark.slow  # loads torch

JOB = """
job: j
task: {class: 'examples.synthetic.task:Gaussian', args: {hidden: [4], vocabulary_file: /data/words.txt}}
data: {workers: 2, batch_size: 8}
training: {policy: {name: bsp}, optimizer: {name: sgd, lr: 0.05}}
"""


def mark(*overrides: str) -> str:
    return make_fingerprint(parse(JOB, overrides), parameters=58, buffers=0, shapes=42)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("training.policy.contribution=step", "training.policy.contribution: expected gradient, got step"),
        ("training.policy={name: asp}", "training.policy.name: expected bsp, got asp"),
        ("training.optimizer.lr=0.1", "training.optimizer.lr: expected 0.05, got 0.1"),
        ("training.reduction=sum", "training.reduction: expected mean, got sum"),
        ("training.clip_norm=2", "training.clip_norm: expected null, got 2.0"),
        ("training.guard.spike_factor=7", "training.guard.spike_factor: expected 100.0, got 7.0"),
        ("task.args.hidden=[5]", "task.args.hidden: expected [4], got [5]"),
        ("task.args.vocabulary_file=other.txt", "task.args.vocabulary_file: expected words.txt, got other.txt"),
        ("task.args.more=1", "task.args.more: expected nothing, got 1"),
        ("data.batch_size=16", "data.batch_size: expected 8, got 16"),
    ],
)
def test_what_differs_is_named(change: str, named: str) -> None:
    text = difference(mark(), mark(change))
    assert named in text
    assert text.count("expected") == (2 if "contribution" in change else 1), "nothing else is"
    assert difference(mark(change), mark(change)) == ""


A_CLASS = "training.optimizer={class: torch.optim.AdamW, args: {lr: 0.1}, groups: {bias: {lr: 1}, b: {lr: 2}}}"
STEPS = "training.schedule={class: torch.optim.lr_scheduler.StepLR, args: {step_size: 2}}"


@pytest.mark.parametrize(
    ("change", "is_allowed"),
    [
        ("training.optimizer.args.lr=0.2", True),
        ("training.optimizer.args.weight_decay=0.2", True),
        ("training.optimizer.args.betas=[0.8, 0.9]", False),
        ("training.optimizer.groups={b: {lr: 2}, bias: {lr: 1}}", False),
        ("training.optimizer.class=torch.optim.Adam", False),
        ("training.schedule={class: torch.optim.lr_scheduler.StepLR, args: {step_size: 3}}", False),
        ("training.ema={decay: 0.9}", True),
        ("training.clip_value=0.9", True),
    ],
)
def test_what_a_resume_may_change_of_a_class(change: str, is_allowed: bool) -> None:
    assert (refused_changes(fields_of(mark(A_CLASS)), fields_of(mark(A_CLASS, change))) == "") == is_allowed
    assert difference(mark(A_CLASS), mark(A_CLASS, change)) != ""


def test_a_schedule_goes_on_from_its_rates() -> None:
    for base, change in ((A_CLASS, "training.optimizer.args.lr=0.2"), ("seed=1", "training.optimizer.lr=0.2")):
        assert "lr: expected" in refused_changes(fields_of(mark(base, STEPS)), fields_of(mark(base, STEPS, change)))


TABLES = "training.tables={user: {optimizer: {name: adam}}, '.': {optimizer: {name: sgd, lr: 1}}}"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ("{user: {optimizer: {name: adam, lr: 0.5}}, '.': {optimizer: {name: sgd, lr: 2, weight_decay: 1}}}", ""),
        ("{'.': {optimizer: {name: sgd, lr: 1}}, user: {optimizer: {name: adam}}}", "training.tables.0.names"),
        ("{user: {optimizer: {name: sgd}}, '.': {optimizer: {name: sgd, lr: 1}}}", "training.tables.0.optimizer.name"),
        ("{user: {optimizer: {name: adam}}}", "training.tables.1.names"),
    ],
)
def test_what_a_resume_may_change_of_tables(settings: str, named: str) -> None:
    change = f"training.tables={settings}"
    refused = refused_changes(fields_of(mark(TABLES)), fields_of(mark(change)))
    assert named in refused
    assert bool(refused) == bool(named)
    assert difference(mark(TABLES), mark(change)) != ""


def test_a_fingerprint_does_not_name_later_keys_that_are_not_set() -> None:
    """A checkpoint of a release without them would differ in them."""
    assert {"training.schedule", "training.ema", "training.clip_value", "training.tables"}.isdisjoint(fields_of(mark()))


def test_steps_for_gradients_are_named_as_what_workers_push() -> None:
    text = difference(mark("training.policy.contribution=step"), mark())
    assert "pushes: expected steps, got gradients (training.policy decides" in text


def test_the_job_file_of_a_run_folder_and_a_file_in_another_folder_agree() -> None:
    config = parse(JOB, ["training.policy={name: vap, value_bound: 1e300}", "task.args.text=a b=c"])
    assert job_fields(parse(dump(config))) == job_fields(config)
    assert difference(mark(), mark("task.args.vocabulary_file=/mnt/words.txt")) == ""


def test_values_may_hold_what_separates_fields_and_be_long() -> None:
    texts = ["a b", "a  b", "a=b", "a\u00a0b", "a\nb", "x" * 5000, "x" * 5001]
    marks = [mark(f"task.args.text={text!r}".replace("'", '"')) for text in texts]
    assert len(set(marks)) == len(texts)
    for value in marks:
        assert set(fields_of(value)) == {*fields_of(mark()), "task.args.text"}
        assert len(value) < 1000


REFUSED = [
    "task.args.hidden=[5]", "task.class=examples.digits.task:Digits", "data.partitions=3", "data.batch_size=16",
    "data.samples_per_record=2", "training.optimizer.momentum=0.9", "training.optimizer={name: adam}",
    "training.policy.contribution=step", "training.policy={name: ssp}", "training.policy={name: wsp, wave_batches: 2}",
]  # fmt: skip
ALLOWED = [
    "training.policy={name: asp}", "training.policy={name: doll, group_size: 2}", "training.optimizer.lr=0.1",
    "training.optimizer.weight_decay=0.1", "training.reduction=sum", "training.clip_norm=1",
    "training.guard.spike_factor=0", "task.args.vocabulary_file=/mnt/words.txt", "stop.updates=9", "seed=3",
]  # fmt: skip


def saved(store: MemoryCheckpointStore, fingerprint: str) -> MemoryCheckpointStore:
    store.save(Checkpoint(job="j", fingerprint=fingerprint, term=1, version=1, state=b"", tensors={}))
    return store


@pytest.mark.parametrize("change", REFUSED)
def test_a_resume_with_a_forbidden_change_is_refused_by_its_name(change: str) -> None:
    key = change.partition("=")[0]
    named = "pushes" if "policy" in key else "training.optimizer" if "optimizer" in key else key
    with pytest.raises(CheckpointError, match=rf"{named}[^ ]*: expected .*: a run cannot be resumed with") as error:
        saved(MemoryCheckpointStore("j"), mark()).load_newest(mark(change))
    assert "docs/operations.md" in str(error.value)
    assert "rename the job" in str(error.value)


@pytest.mark.parametrize("change", ALLOWED)
def test_a_resume_with_an_allowed_change_finds_the_checkpoint(change: str) -> None:
    checkpoint = saved(MemoryCheckpointStore("j"), mark()).load_newest(mark(change))
    assert checkpoint is not None


def test_facts_of_the_model_are_never_allowed_to_change() -> None:
    base = fields_of(mark())
    for key in ("parameters", "shapes"):
        assert refused_changes(base, {**base, key: "9"}) == differences(base, {**base, key: "9"}) != ""
    assert "frozen: expected 1, got nothing" in refused_changes({**base, "frozen": "1"}, base)


def test_the_documented_list_is_the_one_that_is_enforced() -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    section = text[text.index("## Resuming a run") : text.index("### The topics hold an earlier run")]
    for key in MAY_CHANGE:
        assert f"`{key.removesuffix('.')}`" in section, key
    for key in ("data.partitions", "data.batch_size", "data.samples_per_record", "task.class", "task.args"):
        assert f"`{key}`" in section, key


def test_another_number_of_workers_is_allowed_where_the_partitions_stay() -> None:
    store = saved(MemoryCheckpointStore("j"), mark("data.workers=2", "data.partitions=4"))
    assert store.load_newest(mark("data.workers=4")) is not None, "four partitions, as before"
    assert store.load_newest(mark("data.workers=1", "data.partitions=4")) is not None
    with pytest.raises(CheckpointError, match=r"data\.partitions: expected 4, got 3"):
        store.load_newest(mark("data.workers=3"))


# --- a later server of another job file ------------------------------------------------------------------------------


def welcome(term: int, fingerprint: str) -> Welcome:
    return record_builders.welcome(0, term=term, session=7, fingerprint=fingerprint)


def test_a_later_server_of_another_job_file_ends_the_worker_by_the_name_of_what_differs() -> None:
    core = WorkerCore(welcome(1, mark()), max_pending=4, now=0.0)
    assert [type(action.record) for action in core.on_record(Hello(term=2), 0.0)] == [Join]  # type: ignore[union-attr]
    actions = core.on_record(welcome(2, mark("training.optimizer.lr=0.1")), 0.0)
    assert actions == [
        Exit(
            1,
            "the parameter server runs another job file now: training.optimizer.lr: expected 0.1, got 0.05: "
            "reading it again",
        )
    ]


def test_a_later_server_of_the_same_job_file_keeps_the_worker() -> None:
    core = WorkerCore(welcome(1, mark()), max_pending=4, now=0.0)
    core.on_record(Hello(term=2), 0.0)
    assert not any(isinstance(action, Exit) for action in core.on_record(welcome(2, mark()), 0.0))


# --- an allowed change of policy works on the checkpoint --------------------------------------------------------------


def _pushes(name: str) -> str:
    config: JobConfig = parse("job: j\ntask: {class: 'a:B'}\n")
    training = config.training.model_copy(update={"policy": POLICIES[name]})
    return job_fields(config.model_copy(update={"training": training}))["pushes"]


PAIRS = [(a, b) for a, b in product(POLICIES, POLICIES) if a != b and _pushes(a) == _pushes(b)]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_checkpoint_of_one_policy_is_continued_under_another(first: str, second: str) -> None:
    """Server and workers are started again with the other policy: nothing is lost or counted twice."""
    for seed in seeds(4):
        seed += PAIRS.index((first, second))
        world = World(first)
        play(world, random_steps(seed, 400))
        world.settle()
        before = list(world.lineage())
        world.kill_server()
        for process in world.live():
            world.end(process)
        world.policy = POLICIES[second]
        world.start_server()
        play(world, random_steps(seed + 100, 400))
        produced = random.Random(seed)
        for worker in range(world.settings.num_workers):
            world.high[worker] += 20 + produced.randrange(5)
        world.settle()
        lineage = world.lineage()
        assert lineage[: len(before)] == before
        assert len(lineage) > len(before), "it goes on"
        applied = [0] * world.settings.num_workers
        for update in lineage:
            for worker, batch, _ in update.members:
                assert batch == applied[worker]
                applied[worker] += 1
        assert tuple(applied) == world.engine.snapshot(world.now).applied
