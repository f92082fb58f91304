"""ONNX and torch.export: each example within 1e-5 of torch, or refused with the operator's name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from commands import doll
from doll.config import JobConfig, load, parse
from doll.errors import ConfigError
from doll.model.flat_model import build, fingerprint
from doll.ps.model.updater import make_parts
from doll.run.export import ExportOptions, export_model
from doll.run.portable import TOLERANCE, Format, Graph, make_graph, whole_module
from doll.storage.checkpoints import Checkpoint
from doll.storage.stores import open_store
from doll.task.base import Sample, Task, load_task
from doll.task.batches import SampleBatch, batch_of
from examples.characters.task import Characters
from examples.clicks.task import Clicks
from examples.clicks_avro.task import Clicks as AvroClicks
from examples.delayed_clicks.task import Purchases
from examples.digits.task import Digits
from examples.emnist.task import Emnist
from examples.intrusion.task import Intrusion
from examples.lda.task import Topics
from examples.lora.task import Adapted
from examples.ratings.task import MatrixFactorization, Pmf
from examples.stdin.task import Churn
from examples.synthetic.task import Gaussian
from examples.trips.task import Fares
from examples.words.task import SkipGram
from paths import EXAMPLES

pytestmark = pytest.mark.slow  # loads torch

RNG = np.random.default_rng(0)
SMALL: dict[str, Any] = {"vocabulary_size": 30, "max_tokens": 12}


def whole(low: int, high: int, *shape: int) -> np.ndarray[Any, Any]:
    return RNG.integers(low, high, (40, *shape))


def floats(width: int) -> np.ndarray[Any, Any]:
    return RNG.normal(size=(40, width)).astype(np.float32)


def clicks() -> np.ndarray[Any, Any]:
    return np.hstack([whole(-2, 50, 13), whole(0, 1000, 26)]).astype(np.int32)


def ratings() -> np.ndarray[Any, Any]:
    return np.hstack([whole(0, 50, 1), whole(0, 40, 1)]).astype(np.int32)


def words() -> np.ndarray[Any, Any]:
    return whole(0, 30, 12).astype(np.int32)


EXAMPLE_TASKS: dict[str, list[tuple[Task, Callable[[], Any], str]]] = {
    # A task, what its x is, and the operator that refuses it.
    "characters": [(Characters(length=16), lambda: whole(0, 28, 16), "")],
    "clicks": [
        (Clicks(columns=1000), clicks, ""),
        (Clicks(columns=1000, sparse=True), clicks, ""),
    ],
    "clicks_avro": [
        (AvroClicks(100), lambda: np.hstack([floats(13), whole(0, 100, 26)]).astype(np.float32), ""),
    ],
    "delayed_clicks": [
        (Purchases(columns=1000), lambda: {"ids": whole(0, 1000, 4).astype(np.int64), "numbers": floats(2)}, ""),
    ],
    "digits": [(Digits(), lambda: whole(0, 256, 8, 8).astype(np.uint8), "")],
    "emnist": [(Emnist(), lambda: whole(0, 256, 28, 28).astype(np.uint8), "")],
    "intrusion": [(Intrusion(), lambda: floats(38 + 128), "")],
    "lda": [(Topics(4, **SMALL), words, "Tensor.numpy")],
    "lora": [
        (
            Adapted(trunk_file=str(EXAMPLES / "lora" / "trunk.safetensors"), rank=4),
            lambda: whole(0, 256, 8, 8).astype(np.uint8), "",
        ),
    ],
    "ratings": [
        (MatrixFactorization(50, 40, rank=4), ratings, ""),
        (Pmf(50, 40, rank=4, sparse=True), ratings, ""),
    ],
    "stdin": [(Churn(), lambda: floats(3), "")],
    "synthetic": [(Gaussian(7, 3), lambda: floats(7), "")],
    "trips": [(Fares(), lambda: np.hstack([whole(1, 265, 2), floats(4)]).astype(np.float32), "")],
    "words": [(SkipGram(dimensions=4, subsample=0.0, **SMALL), words, "Tensor.numpy")],
}  # fmt: skip
JOB = parse("job: t\ntask: {class: 'a:B'}")


def graph_of(kind: Format, task: Task, x: Any, config: JobConfig = JOB) -> Graph:
    torch.manual_seed(1)
    module = task.build_model().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    samples = SampleBatch(x, np.zeros(len(x), np.float32))
    return make_graph(kind, task, whole_module(config, task, module.state_dict()), module, samples)


@pytest.mark.parametrize("name", sorted(EXAMPLE_TASKS))
def test_each_example_is_a_graph_as_torch_computes_it_or_names_the_operator(name: str) -> None:
    for task, x, operator in EXAMPLE_TASKS[name]:
        for kind in ("onnx", "torch.export"):
            if operator:
                says = rf"--format {kind}: the operator {operator} of {type(task).__name__} has no form in"
                with pytest.raises(ConfigError, match=says):
                    graph_of(kind, task, x())
            else:
                graph = graph_of(kind, task, x())
                assert graph.largest_difference <= TOLERANCE
                assert graph.num_samples == 40


def test_no_example_is_left_out() -> None:
    assert {path.parent.name for path in EXAMPLES.glob("*/task.py")} == {*EXAMPLE_TASKS, "ranker"}, "ranker is below"


class Odd(Task):
    """Computes what cannot be a graph, or what differs from itself."""

    input_shape = (3,)

    def __init__(self, how: str) -> None:
        self.how = how

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Linear(3, 1)

    def forward(self, model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = model(x)
        if self.how == "branch" and output.sum() > 0:
            return -output
        if self.how == "random":
            return output + torch.rand_like(output)
        if self.how == "special":
            return torch.special.airy_ai(output)
        return output


def test_what_has_no_form_or_differs_is_refused() -> None:
    for how, kind, says in (
        ("branch", "torch.export", r"the operator \S+ of Odd has no form in torch.export"),
        ("random", "torch.export", "expected the outputs of Odd.forward within 1e-05, got a difference of"),
        ("special", "onnx", r"the operator aten.special_airy_ai has no form in ONNX"),
    ):
        with pytest.raises(ConfigError, match=says):
            graph_of(kind, Odd(how), floats(3))  # type: ignore[arg-type]


def test_without_the_packages_of_onnx_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ConfigError, match=r"--format onnx needs the extra onnx: pip install 'doll-online\[onnx\]'"):
        graph_of("onnx", Odd(""), floats(3))


class Pair(Task):
    """Two inputs of several lengths, and two outputs."""

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Linear(4, 2)

    def decode(self, record: bytes) -> Sample:
        a, b = json.loads(record)
        return Sample({"a": np.array(a, np.float32), "b": np.array(b, np.float32)}, 0.0)

    def forward(self, model: torch.nn.Module, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sum": model(x["a"]) + model(x["b"]), "mean": x["b"].mean(dim=1)}


def test_a_model_of_several_arrays_has_several_inputs_and_outputs() -> None:
    task = Pair()
    records = [json.dumps([row.tolist(), row[::-1].tolist()]).encode() for row in floats(4)]
    batch = batch_of(task, map(task.decode, records))
    module = task.build_model().eval()
    graph = make_graph("onnx", task, whole_module(JOB, task, module.state_dict()), module, batch)
    assert graph.inputs == ["x_a", "x_b"]
    session = onnxruntime.InferenceSession(graph.content)
    assert len(session.get_outputs()) == 2


def trained(folder: Path, *overrides: str) -> JobConfig:
    """A run of digits or clicks with three versions."""
    example = "digits"
    if overrides and overrides[0].startswith("example="):
        example, overrides = overrides[0].partition("=")[2], overrides[1:]
    config = load(EXAMPLES / example / "job.yaml", [*overrides, "training.optimizer={name: sgd}"])
    model = build(config, load_task(config))
    mark = fingerprint(config, model)
    parts = make_parts(config.training, model)
    store = open_store(config, folder)
    for version in (1, 2, 3):
        parts.updater.weights[:] += 0.01 * version
        tensors = {name: np.array(value) for name, value in parts.tensors().items()}
        store.save(
            Checkpoint(
                job=config.job, fingerprint=mark, term=1, version=version, state=b"", tensors=tensors,
                layout=model.layout,
            )
        )  # fmt: skip
    return config


def test_a_version_is_exported_as_it_is(tmp_path: Path) -> None:
    config = trained(tmp_path)
    open_store(config, tmp_path).change_marks(lambda marks: marks.with_alias("stable", 2))
    contents = {
        version: export_model(config, tmp_path, tmp_path / version, ExportOptions(version=version, format="onnx"))
        for version in ("stable", "3")
    }
    assert (contents["stable"]["version"], contents["3"]["version"]) == (2, 3)
    assert contents["stable"]["compared"]["samples"] == 256
    assert contents["stable"]["inputs"] == ["x"]
    x = np.random.default_rng(0).integers(0, 256, (5, 8, 8)).astype(np.uint8)
    outputs = []
    for version in ("stable", "3"):
        session = onnxruntime.InferenceSession(tmp_path / version / "model.onnx")
        outputs.append(session.run(None, {"x": x})[0])
    assert outputs[0].shape == (5, 10)
    assert np.abs(outputs[0] - outputs[1]).max() > 1e-4
    assert not (tmp_path / "3" / "model.safetensors").exists()


def test_the_command_names_the_comparison_and_refuses_bad_values(tmp_path: Path) -> None:
    trained(tmp_path / "run", "example=clicks", "task.args.sparse=true", "task.args.columns=1000")
    job = (str(EXAMPLES / "clicks" / "job.yaml"), "--run-folder", str(tmp_path / "run"))
    settings = ("task.args.sparse=true", "task.args.columns=1000", "training.optimizer={name: sgd}")
    sets = [word for setting in settings for word in ("--set", setting)]
    done = doll("export", *job, *sets, "--format", "torch.export", "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    assert "of torch on 256 samples)" in done.stdout
    model = torch.export.load(tmp_path / "out" / "model.pt2").module()
    assert model(torch.zeros(2, 39, dtype=torch.int32)).shape == (2,)
    for options, code, says in (
        (("--version", "9"), 2, "expected a version that is kept (1, 2, 3), an alias (none) or latest, got '9'"),
        (("--version", "../1"), 2, "got '../1'"),
        (("--format", "tflite"), 2, "'tflite' is not one of"),
        (("--format", "onnx", "--samples", str(tmp_path / "none")), 2, "No such file"),
        (("--to", "wandb"), 2, "expected mlflow:ADDRESS"),
        (("--to", "mlflow"), 2, "with $MLFLOW_TRACKING_URI set"),
    ):
        refused = doll("export", *job, *sets, *options)
        assert refused.exit_code == code, refused.output
        assert says in " ".join(refused.output.split())


@pytest.mark.parametrize(
    ("overrides", "table"),
    [
        (
            [
                "example=clicks",
                "task.args.bounded=true",
                "training.tables={'.*': {max_rows: 5000}}",
                "data.batch_size=64",
            ],
            "table.weight",
        ),
        (["example=ranker"], "items.weight"),
    ],
)
def test_rows_of_ids_that_nobody_has_seen_have_no_graph(overrides: list[str], table: str, tmp_path: Path) -> None:
    config = trained(tmp_path, *overrides)
    with pytest.raises(ConfigError, match=rf"the operator doll.BoundedEmbedding \({table}\) has no form in onnx"):
        export_model(config, tmp_path, tmp_path / "out", ExportOptions(format="onnx"))
