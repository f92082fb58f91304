"""`doll.train`: starts a job from Python, with or without a job file."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from doll.api import run as runs
from doll.api.feeder import Feeder
from doll.api.items import Items, items_of
from doll.api.run import Run
from doll.api.shipping import task_class, write_task
from doll.config import JobConfig, located, parse
from doll.errors import ConfigError
from doll.records.bounded import read_text
from doll.run.folder import RunFolder, create
from doll.run.local.up import check_runnable
from doll.run.target import open_target
from doll.storage.stores import find_source

_TRAINED_BY = "doll.train"


def train(
    task: Any = None,
    source: Any = None,
    *,
    job: str | Path | None = None,
    name: str | None = None,
    args: Mapping[str, Any] | None = None,
    held_out: Any = None,
    workers: int | None = None,
    policy: str | Mapping[str, Any] | None = None,
    stop: Mapping[str, Any] | None = None,
    init_from: str | Path | Mapping[str, Any] | None = None,
    resume: Run | None = None,
    settings: Mapping[str, Any] | None = None,
    runs_folder: str | Path = "runs",
    wait: bool = True,
    progress: bool = True,
) -> Run:
    """Train on a source on this machine, as `doll up` does: with Kafka, a parameter server and workers as processes.

    Args:
        task: a subclass of `doll.Task`, or an instance of one. It may be defined in a notebook. If it has no `decode`,
            the samples must be pairs (x, y).
        source: the samples: any iterable of pairs (x, y), dicts, str or bytes; arrays (X, y); a DataFrame; or a torch
            dataset. Alternatively a dict with the `source` section of a job file: `{"kind": "csv", "path":
            "rows.csv"}`.
        job: path of a job file, or name of a shipped example; it provides all values that are not given here.
        name: name of the job. None: the name in the job file, or one derived from the name of the task's class.
        args: keyword arguments of the task's class.
        held_out: samples that are never learned, for the held-out error; the types of `source`, except a dict. At most
            `evaluation.max_samples` of them are used.
        workers: number of workers. None: the value of the job file, or 4.
        policy: consistency policy, by name or as a section of a job file. None: the value of the job file, or `doll`.
        stop: stop rules: `{"samples": 10000}`, or updates, seconds, loss, accuracy; the first one that is met ends the
            run. None: the run ends at the end of the source.
        init_from: initial weights, as `training.init_from` of a job file: the folder of a run (`run.folder`),
            `RUN@VERSION`, `s3://bucket/prefix`, or a file; or a dict such as `{"from": run.folder, "strict": True}`.
        resume: a run of this function that has ended, which goes on in its folder with more samples, its model and its
            audit. Of the other arguments, only `source`, `stop`, `settings`, `wait` and `progress` may be given. `stop`
            counts from the beginning of the run; without it, the run ends at the end of the source.
        settings: other keys of the job file, such as `{"training.optimizer": {"name": "adam", "lr": 0.001}}`
            (docs/configuration.md).
        runs_folder: folder in which the run folder is created.
        wait: whether to return only after the run has ended; an interrupt then ends the run in order. False: return
            immediately; see `Run.wait`.
        progress: whether to show a live panel during the wait.

    Returns:
        The run. If `wait` is set, it has ended without an error.

    Raises:
        ConfigError: the arguments are not valid; nothing has been started.
        RunFailedError: the run has ended with an error, or its audit has failed.
    Every exception that ends the run, or the wait for it, has the run in its attribute `run`: `error.run.folder`.
    """
    if resume is not None:
        others = (task, job, name, args, held_out, workers, policy, init_from)
        if any(other is not None for other in others):
            raise ConfigError("resume: expected only source, stop and settings with it: the run has all else")
        return _waited(_resume(resume, source, stop, settings or {}), wait=wait, progress=progress)
    content = _job_content(job)
    if task is None and "task" not in content:
        raise ConfigError("task: expected a subclass of doll.Task, or a job file that names one (job=...)")
    content.setdefault("job", name or _job_name(task))
    if name is not None:
        content["job"] = name
    items, given = None, source
    if source is not None and not (isinstance(source, Mapping) and "kind" in source):
        items, given = items_of(source), None
        # If no arrival rate is given, samples arrive as fast as they are learned.
        content.setdefault("arrivals", {"process": "asap"})
    chosen = {"name": policy} if isinstance(policy, str) else policy
    named = {
        "source": given, "data.workers": workers, "training.policy": chosen, "stop": stop,
        "training.init_from": init_from,
    }  # fmt: skip
    for key, value in [*((key, value) for key, value in named.items() if value is not None), *(settings or {}).items()]:
        _set(content, key, value)
    if stop is None and job is None and items is None and source is None:
        raise ConfigError("source: expected the samples to learn from, or a job file (job=...)")
    # Check the configuration before a folder is created; the task's path in it is known only afterwards.
    if task is not None:
        content["task"] = {
            "class": f"{task_class(task).__module__}:{task_class(task).__name__}",
            "args": dict(args or {}),
        }
    elif args is not None:
        content["task"]["args"] = dict(args)
    if items is not None:
        content["source"] = {"kind": "feed", "socket": "/"}
    config = _parsed(content)
    held = None if held_out is None else items_of(held_out, "held_out")
    if held is not None and task is None:
        raise ConfigError("held_out: expected with a task that is given here, not by a job file")
    if task is None and items is None:
        check_runnable(config)  # otherwise its task or source exists only in the run folder
    elif config.training.init_from is not None:
        find_source(config, config.training.init_from.source)
    folder = create(Path(runs_folder), config.job, datetime.now())
    return _waited(_start(folder, content, task, items, held, config), wait=wait, progress=progress)


def _waited(run: Run, *, wait: bool, progress: bool) -> Run:
    if wait:
        try:
            run.wait(progress=progress)
        except BaseException as error:
            vars(error)["run"] = run
            raise
    return run


def _resume(run: Run, source: Any, stop: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> Run:
    """Start an ended run again, with another source."""
    if run.is_running or source is None:
        raise ConfigError("resume: expected a run that has ended, and a source of more samples")
    config = open_target(run.folder, []).config
    changes, feeder = {"source": source, "stop": stop or {}, **settings}, None
    if not (isinstance(source, Mapping) and "kind" in source):
        feeder = Feeder(items_of(source).records, config.data.num_partitions, config.data.max_record_bytes)
        changes["source"] = {"kind": "feed", "socket": str(feeder.path)}
    try:
        return runs.start(run.folder, feeder, [f"{key}={json.dumps(_plain(value))}" for key, value in changes.items()])
    except BaseException:
        if feeder is not None:
            feeder.close()
        raise


def _start(
    folder: RunFolder,
    content: dict[str, Any],
    task: Any,
    items: Items | None,
    held: Items | None,
    config: JobConfig,
) -> Run:
    """Write the files of the job into its folder, and start it."""
    if task is not None:
        are_pairs = items is not None and items.are_pairs
        if held is not None:
            held = held._replace(records=itertools.islice(held.records, config.evaluation.max_samples))
        content["task"]["class"] = write_task(folder.path, task, are_pairs=are_pairs, held_out=held)
    feeder = None
    if items is not None:
        feeder = Feeder(items.records, config.data.num_partitions, config.data.max_record_bytes)
        content["source"] = {"kind": "feed", "socket": str(feeder.path)}
    try:
        folder.write_job(_parsed(content))
        return runs.start(folder.path, feeder)
    except BaseException:
        if feeder is not None:
            feeder.close()
        raise


def open_run(folder: str | Path) -> Run:
    """Open an existing run by its folder; `doll.open`.

    Raises:
        ConfigError: `folder` is not a run folder.
    """
    path = Path(folder)
    if not (path / "job.yaml").is_file():
        raise ConfigError(f"{path}: expected the folder of a run, with a job.yaml")
    return Run(path.resolve())


def _job_content(job: str | Path | None) -> dict[str, Any]:
    """Return the job file as keys and values; relative paths are resolved from the folder of the job file."""
    if job is None:
        return {}
    target = open_target(Path(job), [])
    content = located(yaml.safe_load(read_text(target.path, max_bytes=4_000_000)), target.path.resolve().parent)
    content["base_folder"] = str(target.config.base_folder.resolve())
    return dict(content)


def _plain(value: Any) -> Any:
    """Return the value with absolute paths and plain numbers, for a job file that can be loaded from any folder."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value.resolve())
    return value.tolist() if hasattr(value, "tolist") else value


def _set(content: dict[str, Any], key: str, value: Any) -> None:
    section = content
    *path, last = key.split(".")
    for part in path:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise ConfigError(f"settings: {key}: {part!r} is a value, not a section")
    section[last] = dict(value) if isinstance(value, Mapping) else value


def _parsed(content: dict[str, Any]) -> JobConfig:
    try:
        text = yaml.safe_dump(_plain(content), sort_keys=False, allow_unicode=True)
    except yaml.YAMLError as exc:
        raise ConfigError(f"settings: expected text, numbers, lists and dicts: {exc}") from exc
    return parse(text, origin=_TRAINED_BY, base_folder=Path.cwd())


def _job_name(task: Any) -> str:
    """`TwoTowers` -> `two-towers`."""
    cls = task_class(task)
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", cls.__name__)
    return re.sub(r"[^a-z0-9-]", "-", words.lower()).strip("-_")[:63] or "job"
