"""The example `lora`: adapters alone are trained, sent and kept; the trunk is the same everywhere, and is exported."""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doll.config import JobConfig, load
from doll.config.fingerprint import difference
from doll.consumers.compute.gradient import GradientComputer
from doll.consumers.intake.decoding import RawRecords, decode_records
from doll.errors import ConfigError
from doll.evaluation.heldout import HeldOut
from doll.model.flat_model import FlatModel, build, fingerprint
from doll.optim.recipe import make_optimizer
from doll.optim.torch_optimizer import check_torch_optimizer
from doll.producers import sources
from doll.ps.event_log import replay
from doll.ps.start import matched
from doll.run.export import export_model
from doll.storage.blobs import HEADER_BYTES, encode_blob
from doll.storage.checkpoints import Checkpoint
from doll.storage.stores import open_store
from doll.task.base import load_task
from examples.lora.task import perceptron
from logged_runs import LoggedRun
from memory_stores import MemoryCheckpointStore
from paths import EXAMPLES
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.slow  # loads torch

FOLDER = EXAMPLES / "lora"
JOB, TRUNK = FOLDER / "job.yaml", FOLDER / "trunk.safetensors"
ADAPTERS, FROZEN = 3_368, 50_826


def model_of(config: JobConfig) -> FlatModel:
    return build(config, load_task(config), with_rows=False)


@pytest.fixture
def config() -> JobConfig:
    return load(JOB)


def test_what_is_trained_and_sent_are_the_adapters(config: JobConfig) -> None:
    model, whole = model_of(config), model_of(load(FOLDER / "trunk.yaml"))
    assert (model.num_parameters, model.flat.numel(), whole.flat.numel()) == (ADAPTERS, ADAPTERS, FROZEN)
    assert all(".lora_" in name for name, _ in model.shapes)
    sent = [
        sum(memoryview(part).nbytes for part in encode_blob(item.grad.numpy(), job="j", kind="g", version=1))
        for item in (model, whole)
    ]
    assert sent == [HEADER_BYTES + 4 * ADAPTERS, HEADER_BYTES + 4 * FROZEN]
    assert sent[0] < 0.07 * sent[1]
    state = make_optimizer(config.training, model).tensors()
    assert max(tensor.size for tensor in state.values()) == ADAPTERS


def test_each_process_has_the_same_trunk_or_is_refused(config: JobConfig, tmp_path: Path) -> None:
    model, again = model_of(config), model_of(config)
    assert fingerprint(config, model) == fingerprint(config, again)
    assert torch.equal(model.flat, again.flat)
    other = {name: tensor + 1 for name, tensor in load_file(TRUNK).items()}
    save_file(other, tmp_path / "trunk.safetensors")
    elsewhere = load(JOB, [f"task.args.trunk_file={tmp_path / 'trunk.safetensors'}"])
    told_apart = difference(fingerprint(config, model), fingerprint(elsewhere, model_of(elsewhere)))
    assert told_apart.startswith("frozen: expected ")
    assert "the same frozen parameters in every process" in told_apart


def learned(config: JobConfig, model: FlatModel, updates: int) -> list[float]:
    """Held-out accuracy before and after so many updates, in one thread."""
    task, held_out = load_task(config), HeldOut(load_task(config), 1000)
    computer, optimizer = GradientComputer(task, model), make_optimizer(config.training, model)
    size = config.data.batch_size * config.group_size
    stream = sources.open_streams(config, [0] * config.data.workers)[0]
    accuracies = [held_out.evaluate(model.module).accuracy]
    for _ in range(updates):
        records = list(itertools.islice(stream, size))
        decoded = decode_records(task, RawRecords(range(size), records), samples_per_record=1, max_record_bytes=99)
        optimizer.apply([computer.compute(*decoded.samples).values.copy()], 1 / size, size)
    accuracies.append(held_out.evaluate(model.module).accuracy)
    return [accuracy for accuracy in accuracies if accuracy is not None]


def test_adapters_learn_what_the_trunk_does_not_know_and_the_whole_is_exported(
    config: JobConfig, tmp_path: Path
) -> None:  # fmt: skip
    upright = load(JOB, ["task.args.quarter_turns=0"])
    model = model_of(config)
    trunk = HeldOut(load_task(upright), 1000).evaluate(model.module).accuracy
    assert trunk is not None
    assert trunk > 0.95, "it begins as the trunk, which knows upright digits"
    checksum = model.frozen_checksum()
    before, after = learned(config, model, 60)
    assert before < 0.4
    assert after > 0.75
    assert model.frozen_checksum() == checksum

    optimizer = make_optimizer(config.training, model)
    store = open_store(config, tmp_path)
    store.save(
        Checkpoint(
            job="lora", fingerprint=fingerprint(config, model), term=store.claim_term(), version=60, state=b"",
            tensors=optimizer.tensors(), layout=model.layout,
        )
    )  # fmt: skip
    content = export_model(config, tmp_path, tmp_path / "model")
    assert content["parameters"] == ADAPTERS
    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert sum(tensor.numel() for tensor in exported.values()) == ADAPTERS + FROZEN
    fresh: Any = load_task(config).build_model()
    fresh.load_state_dict(exported)
    x = torch.randn(5, 8, 8)
    plain = fresh.merge_and_unload()
    torch.testing.assert_close(plain(x), model.module(x))
    assert {name for name, _ in plain.named_parameters()} == load_file(TRUNK).keys()

    given = matched(
        load(JOB, [f"training.init_from={tmp_path / 'model' / 'model.safetensors'}"]), fresh_model := model_of(config)
    )
    assert given is not None
    assert (given.report.num_values, given.report.frozen, given.report.missing) == (ADAPTERS, (), ())
    given.load_into(fresh_model)
    assert torch.equal(fresh_model.flat, model.flat)


def test_a_trunk_is_no_source_of_trained_weights(config: JobConfig) -> None:
    with pytest.raises(ConfigError, match=r"frozen parameters are loaded by build_model\(\)"):
        matched(load(JOB, [f"training.init_from={TRUNK}"]), model_of(config))


def test_a_replay_of_its_log_is_equal_to_the_bit(config: JobConfig, tmp_path: Path) -> None:
    args = json.dumps({**config.task.args, "trunk_file": str(TRUNK)})
    task = f"task={{class: 'examples.lora.task:Adapted', args: {args}}}"
    store = MemoryCheckpointStore("replayed", keep=100)
    run = LoggedRun(tmp_path, store, task, "training.optimizer={class: torch.optim.AdamW}")
    check_torch_optimizer(model_of(run.config), run.config.training.optimizer, None)  # type: ignore[arg-type]
    run.play(8)
    run.close()
    held = store.load_newest(None)
    assert held is not None
    assert held.tensors["weights"].size == ADAPTERS
    replayed = {item.version: item for item in replay(run.config, run.path)}[held.version]
    for name, tensor in held.tensors.items():
        assert tensor.tobytes() == replayed.tensors[name].tobytes(), name


def test_digits_are_turned_as_the_task_says() -> None:
    task = load_task(load(JOB))
    image = np.arange(64, dtype=np.uint8).reshape(8, 8)
    record = bytes([3]) + image.tobytes()
    block = task.decode_block(memoryview(record * 2), 65)
    assert block is not None
    for x in (task.decode(record).x, block[0][1]):  # type: ignore[union-attr]
        assert (np.asarray(x) == np.rot90(image)).all()
    assert block[0].flags.writeable, "or torch warns about each batch"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("task.args.trunk_file=null", "task.args.trunk_file: expected a file beside rank"),
        ("task.args.trunk_file=absent.safetensors", "absent.safetensors does not exist"),
        ("task.args.trunk_file=task.py", "task.args.trunk_file: cannot read .*task.py"),
        ("task.args.hidden=[16]", r"expected 1.bias \(16,\), .*\(task.args.hidden\), got 1.bias \(256,\)"),
        ("task.args.rank=-1", "rank of 0 or more"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        model_of(load(JOB, [override]))
    assert "\n" not in str(refused.value)


def test_without_peft_it_says_what_to_install(config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else find_spec(name))
    with pytest.raises(ConfigError, match=r"the package peft.*pip install 'doll-online\[lora\]'"):
        load_task(config)
    load_task(load(FOLDER / "trunk.yaml"))


def test_the_trunk_is_the_one_that_its_job_trains() -> None:
    shapes = {name: tensor.shape for name, tensor in load_file(TRUNK).items()}
    assert shapes == {name: tensor.shape for name, tensor in perceptron(64, (256, 128), 10).state_dict().items()}
