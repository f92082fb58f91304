"""`doll export --to mlflow`: a version, its lineage and its aliases in the registry of a real MLflow server."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from doll.config import parse
from doll.errors import ConfigError, ServiceUnavailableError
from doll.local.processes import end, free_port, spawn, tail
from doll.monitor.state.version_lines import VersionLine
from doll.run.mlflow_registry import register, registry_uri
from doll.run.portable import make_graph, whole_module
from doll.task.batches import SampleBatch
from examples.synthetic.task import Gaussian
from waiting import until

pytestmark = pytest.mark.slow  # starts a server, loads torch


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of an MLflow server, a process of its own that ends with this one."""
    from mlflow.server import constants

    uri, log = f"http://127.0.0.1:{free_port()}", tmp_path / "server.log"
    # What `mlflow server` starts, as a child of ours: a child of that one would outlive a test that is killed.
    env = {
        constants.BACKEND_STORE_URI_ENV_VAR: f"sqlite:///{tmp_path}/models.db",
        constants.ARTIFACTS_DESTINATION_ENV_VAR: str(tmp_path / "stored"),
        constants.ARTIFACT_ROOT_ENV_VAR: "mlflow-artifacts:/",
        constants.SERVE_ARTIFACTS_ENV_VAR: "true",
    }
    port = uri.rpartition(":")[2]
    process = spawn([sys.executable, "-m", "uvicorn", "--port", port, "mlflow.server.fastapi_app:app"], log, env)

    def answers() -> bool:
        assert process.poll() is None, tail(log)
        try:
            with urllib.request.urlopen(f"{uri}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    try:
        until(answers, lambda: tail(log))
        yield uri
    finally:
        end(process, 10.0)


def line(version: int, *aliases: str) -> VersionLine:
    return VersionLine(
        version=version, term=1, saved_s=0.0, size_bytes=1, samples=160, offsets=((0, 80), (0, 80)), policy="doll",
        recipe={"training.optimizer.lr": "0.1", "training.tables.*.x": "1"}, elapsed_s=1.0, prequential={"loss": 0.5},
        held_out={"loss": 0.4, "accuracy": 0.9}, cost_usd=0.1, fingerprint="job=shop", code="c", aliases=aliases,
        is_pinned=False,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # of mlflow and its dependencies
def test_a_version_is_registered_once_with_its_lineage_and_aliases(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow
    from mlflow.tracking import MlflowClient

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "other.txt").write_text("not of the export")
    (folder / "model.json").write_text("{}")
    content = {"job": "shop", "version": 3, "format": "safetensors", "file": "model.safetensors"}
    made = register(folder, content, line(3, "stable"), server)
    assert (made["name"], made["version"]) == ("shop", "1")
    assert register(folder, content, line(3, "stable", "canary"), server)["version"] == "1"
    client = MlflowClient(tracking_uri=server, registry_uri=server)
    for alias in ("stable", "canary"):
        assert client.get_model_version_by_alias("shop", alias).tags["doll.version"] == "3"
    run = client.get_run(client.get_model_version("shop", "1").run_id)
    assert run.data.metrics == {"samples": 160, "held_out.loss": 0.4, "held_out.accuracy": 0.9, "prequential.loss": 0.5}
    assert run.data.params["training.optimizer.lr"] == "0.1"
    assert run.data.params["offsets"] == "((0, 80), (0, 80))"
    fetched = Path(client.download_artifacts(run.info.run_id, "model", str(tmp_path / "model")))
    assert (fetched / "model.safetensors").read_bytes() == b"weights"
    assert sorted(path.name for path in fetched.iterdir()) == ["model.json", "model.safetensors"]

    # A graph is loaded as MLflow loads any, by its alias.
    task = Gaussian(7, 3)
    module = task.build_model().eval()
    x = np.random.default_rng(0).normal(size=(40, 7)).astype(np.float32)
    whole = whole_module(parse("job: t\ntask: {class: 'a:B'}"), task, module.state_dict())
    graph = make_graph("onnx", task, whole, module, SampleBatch(x, np.zeros(40, np.float32)))
    (folder / "model.onnx").write_bytes(graph.content)
    content = {"job": "shop", "version": 5, "format": "onnx", "file": "model.onnx"}
    assert register(folder, content, line(5, "stable"), server)["version"] == "2"
    assert client.get_model_version_by_alias("shop", "stable").tags["doll.version"] == "5"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    outputs = mlflow.pyfunc.load_model("models:/shop@stable").predict(x)
    (output,) = outputs.values()
    with torch.no_grad():
        np.testing.assert_allclose(output, module(torch.from_numpy(x)).numpy(), atol=1e-5)


def test_what_is_missing_or_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert registry_uri("mlflow:http://127.0.0.1:5000") == "http://127.0.0.1:5000"
    for wrong in ("mlflow", "wandb:x", ""):
        with pytest.raises(ConfigError, match="expected mlflow:ADDRESS"):
            registry_uri(wrong)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///x.db")
    assert registry_uri("mlflow") == "sqlite:///x.db"
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    content = {"job": "shop", "format": "safetensors", "file": "model.safetensors"}
    with pytest.raises(ServiceUnavailableError, match=r"MLflow at http://127\.0\.0\.1:1"):
        register(tmp_path, content, line(1), "http://127.0.0.1:1")
    for address in ("http://ann:hush@127.0.0.1:1", "postgresql://ann:hush@127.0.0.1:1/models"):
        with pytest.raises(ServiceUnavailableError, match=r"MLflow at \w+://\*\*\*@127\.0\.0\.1:1") as caught:
            register(tmp_path, content, line(1), address)
        assert "hush" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "mlflow.tracking", None)
    with pytest.raises(ConfigError, match=r"--to mlflow needs the extra mlflow: pip install 'doll-online\[mlflow\]'"):
        register(tmp_path, content, line(1), "http://127.0.0.1:1")
