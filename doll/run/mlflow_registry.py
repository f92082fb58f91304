"""Registers versions in a model registry of MLflow: the exported files, the lineage, and the aliases of the version."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from doll.errors import ConfigError, ServiceUnavailableError
from doll.extras import lacking
from doll.records.bounded import short

if TYPE_CHECKING:
    from doll.monitor.state.version_lines import VersionLine

URI_ENV: Final = "MLFLOW_TRACKING_URI"
_ARTIFACTS: Final = "model"
_VERSION, _FINGERPRINT, _FORMAT, _SHA256 = "doll.version", "doll.fingerprint", "doll.format", "doll.sha256"
_MOST_CHARS: Final = 250  # limit of a parameter in the file store of MLflow


def registry_uri(to: str) -> str:
    """Return the registry address from `mlflow` or `mlflow:ADDRESS`, or from the environment.

    Raises:
        ConfigError: there is no address.
    """
    kind, _, uri = to.partition(":")
    uri = uri or os.environ.get(URI_ENV, "")
    if kind != "mlflow" or not uri:
        raise ConfigError(
            "--to: expected mlflow:ADDRESS, such as mlflow:http://127.0.0.1:5000 or mlflow:sqlite:///models.db, or "
            f"mlflow with ${URI_ENV} set, got {short(to)!r}"
        )
    return uri


def register(folder: Path, content: Mapping[str, Any], line: VersionLine, uri: str) -> dict[str, str]:
    """Register the files of `doll export` in `folder`, as a version of the model that has the job's name.

    If the same file was registered before, it is not registered again. The aliases of the version are set in any case.

    Args:
        content: content of `model.json`.
        line: facts about the version.
        uri: address of the registry.

    Returns:
        The model name, MLflow's number of the version, and its location.

    Raises:
        ConfigError: MLflow is not installed.
        ServiceUnavailableError: the registry does not answer, or refuses the version.
    """
    try:
        from mlflow.tracking import MlflowClient
    except ImportError as exc:
        raise lacking("--to mlflow", "mlflow") from exc
    try:
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        return _register(client, folder, content, line)
    except Exception as exc:  # from the store's client: SQLAlchemy, requests, a missing driver
        raise ServiceUnavailableError(f"MLflow at {uri}: {short(exc, 400)}") from exc


def _register(client: Any, folder: Path, content: Mapping[str, Any], line: VersionLine) -> dict[str, str]:
    from mlflow.exceptions import MlflowException

    name = str(content["job"])
    tags = {
        _VERSION: str(line.version), _FINGERPRINT: line.digest, _FORMAT: str(content["format"]),
        _SHA256: sha256((folder / content["file"]).read_bytes()).hexdigest(),
    }  # fmt: skip
    with contextlib.suppress(MlflowException):  # it exists already
        client.create_registered_model(name)
    same = [item for item in client.search_model_versions(f"name = '{name}'") if tags.items() <= item.tags.items()]
    version = same[0] if same else _new_version(client, folder, content, line, tags)
    for alias in line.aliases:
        client.set_registered_model_alias(name, alias, version.version)
    return {"name": name, "version": str(version.version), "source": str(version.source)}


def _new_version(
    client: Any, folder: Path, content: Mapping[str, Any], line: VersionLine, tags: Mapping[str, str]
) -> Any:
    name = str(content["job"])
    experiment = client.get_experiment_by_name(name)
    experiment_id = client.create_experiment(name) if experiment is None else experiment.experiment_id
    run = client.create_run(experiment_id, run_name=f"{name} version {line.version}", tags=dict(tags)).info.run_id
    for key, value in {**line.recipe, "offsets": str(line.offsets)}.items():
        client.log_param(run, key.replace("*", "_"), value[:_MOST_CHARS])
    client.log_metric(run, "samples", line.samples)
    for prefix, values in (("held_out", line.held_out), ("prequential", line.prequential)):
        for key, number in values.items():
            client.log_metric(run, f"{prefix}.{key}", number)
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary) / _ARTIFACTS
        _copy(folder, content, made)
        client.log_artifacts(run, str(made), _ARTIFACTS)
    client.set_terminated(run)
    source = f"{client.get_run(run).info.artifact_uri}/{_ARTIFACTS}"
    return client.create_model_version(name, source, run_id=run, tags=dict(tags))


def _copy(folder: Path, content: Mapping[str, Any], made: Path) -> None:
    """Copy the files to register: an ONNX graph in MLflow's format, other formats unchanged; and `model.json`."""
    file = folder / content["file"]
    if content["format"] == "onnx":
        import mlflow.onnx
        import onnx

        mlflow.onnx.save_model(onnx.load(str(file)), str(made), pip_requirements=["onnxruntime"])
    else:
        made.mkdir()
        shutil.copy(file, made)
    shutil.copy(folder / "model.json", made)
