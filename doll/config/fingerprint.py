"""The fingerprint of a job: settings on which checkpoint, server and workers must agree, as `key=value` fields. Pure.

The fields have the names of keys of the job file: the data keys that determine which samples a batch number refers to,
the keys of the task and its arguments, and all keys of the training section. The fingerprint also contains facts about
the model. A server and its workers must agree on all fields. A run may be resumed with other values of some keys
(`refused_changes`); see docs/operations.md.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from doll.config import JobConfig, TrainingConfig

MAY_CHANGE: Final = (
    "data.workers",
    "training.policy.",
    "training.optimizer.lr",
    "training.optimizer.weight_decay",
    "training.optimizer.nesterov",
    "training.optimizer.beta1",
    "training.optimizer.beta2",
    "training.optimizer.args.lr",
    "training.optimizer.args.weight_decay",
    "training.reduction",
    "training.clip_norm",
    "training.clip_value",
    "training.ema.",
    "training.guard.",
    *(f"training.tables.*.optimizer.{key}" for key in ("lr", "weight_decay", "beta1", "beta2")),
    "training.tables.*.ttl_updates",
    "training.precision",
    "ps.shards",
)
"""The keys that may change when a run is resumed. `*` is any number; a name that ends in a dot is a whole section.
These keys leave no trace in a checkpoint, or a trace that any other value can continue from (the average of
`training.ema`)."""

_SCHEDULE: Final = "training.schedule"
_SCHEDULED: Final = ("training.optimizer.lr", "training.optimizer.args.lr")
"""The keys whose values are in a checkpoint if the job has a schedule: a schedule continues from its last rates."""

REGRIDDABLE: Final = (*MAY_CHANGE, "data.batch_size", "training.", "pushes")
"""The keys that `doll regrid` may change, because it converts the checkpoint (docs/decisions/0085)."""

NOT_KEPT: Final = frozenset({"init_from"})  # keys of `training` that count when a job begins, and not afterwards

MODEL_KEYS: Final = ("parameters", "buffers", "shapes", "others", "frozen", "tables")
"""The keys that describe the model and are not in the job file."""

_PUSHES: Final = "pushes"
_HINTS: Final = {
    "frozen": "build_model() must give the same frozen parameters in every process: load them from one file, or draw "
    "them with torch's own random numbers",
    _PUSHES: "training.policy decides whether workers push gradients, steps, or waves of several steps",
}
PATH_ENDINGS: Final = ("_path", "_folder", "_file")  # endings of arguments that `doll.task.base` takes for paths
_MAX_VALUE_CHARS: Final = 200


def make_fingerprint(
    config: JobConfig, *, parameters: int, buffers: int, shapes: int, others: int | None = None,
    frozen: int | None = None, tables: int | None = None,
) -> str:  # fmt: skip
    """Return the fingerprint of a job and its model.

    Args:
        parameters: number of trainable parameters of the model.
        buffers: number of floats in its buffers.
        shapes: checksum of the names and shapes of these tensors.
        others: checksum of the names, shapes and types of the other buffers. None: there are no such buffers.
        frozen: checksum of the values of the frozen parameters. None: there are no such parameters.
        tables: checksum of the names and shapes of the tables. None: there are no tables.
    """
    job, model = job_fields(config), {"parameters": parameters, "buffers": buffers, "shapes": f"{shapes:08x}"}
    given = (("others", others), ("frozen", frozen), ("tables", tables))
    model |= {key: f"{value:08x}" for key, value in given if value is not None}
    first = {key: job.pop(key) for key in ("job", "task.class")}
    return " ".join(f"{key}={value}" for key, value in {**first, **model, **job}.items())


def job_fields(config: JobConfig) -> dict[str, str]:
    """Return the fields of a fingerprint that come from the job file, without those of the model. `ps.shards: auto` has
    no field, because its number follows from the model."""
    data, training = config.data, config.training
    return {
        "job": config.job,
        "task.class": _class(_text(config.task.cls)),
        "data.workers": str(data.workers),
        # The owner of a foreign topic may add partitions while the job runs, so the checkpoints contain their number.
        **({"data.partitions": str(data.num_partitions)} if data.topic is None else {"data.topic": data.topic}),
        "data.batch_size": str(data.batch_size),
        "data.samples_per_record": str(data.samples_per_record),
        _PUSHES: _pushes(training.policy.sends_steps, training.policy.batches_per_push),
        **{f"training.{key}": _value(value) for key, value in _training_fields(training)},
        **({"ps.shards": str(config.ps.shards)} if config.ps.shards not in (1, "auto") else {}),
        **{f"task.args.{_text(key)}": _argument(key, value) for key, value in config.task.args.items()},
        **_holdout_fields(config),
    }


def _holdout_fields(config: JobConfig) -> dict[str, str]:
    """Return the settings that decide which records of the stream are held out."""
    holdout = config.evaluation.holdout
    if holdout is None or holdout.topic is not None:
        return {}
    section = holdout.model_dump(mode="json", by_alias=True, exclude_none=True)
    fields = {f"evaluation.holdout.{key}": _value(value) for key, value in section.items()}
    if holdout.share is None:
        fields["freshness.time"] = _value(config.freshness.time.model_dump(exclude_none=True))
    return fields


def _training_fields(training: TrainingConfig) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of the training section. A key that is not set is omitted, because checkpoints of
    earlier releases do not contain new keys."""
    section = training.model_dump(by_alias=True, exclude=set(NOT_KEPT))
    for number, (names, settings) in enumerate(section.pop("tables").items()):  # the first expression found applies
        section[f"tables.{number}"] = {"names": names, **settings}
    if "groups" in section["optimizer"]:  # the first expression that matches applies
        section["optimizer"]["groups"] = list(section["optimizer"]["groups"].items())
    for key, value in _leaves(section):
        if value not in (None, [], {}) or key == "clip_norm":
            yield key, value


def parse(fingerprint: str) -> dict[str, str]:
    """Return the fields of a fingerprint, by key."""
    fields = dict(word.partition("=")[::2] for word in fingerprint.split())
    if "task.class" in fields:
        fields["task.class"] = _class(fields["task.class"])
    return fields


def without_model(fields: Mapping[str, str]) -> dict[str, str]:
    """Return the fields that come from the job file, as `job_fields`."""
    return {key: value for key, value in fields.items() if key not in MODEL_KEYS}


def difference(expected: str, got: str) -> str:
    """Return the differences of two fingerprints, for an error message; empty if they agree."""
    return differences(parse(expected), parse(got))


def differences(expected: Mapping[str, str], got: Mapping[str, str]) -> str:
    """Return the differences of two fingerprints, given as fields, in the same format as `difference`."""
    return _describe(expected, got, _changed(expected, got))


def refused_changes(saved: Mapping[str, str], wanted: Mapping[str, str], may_change: Sequence[str] = MAY_CHANGE) -> str:
    """Return the differences that make it impossible to continue from a checkpoint with the fields `saved`; or
    empty."""
    fixed = _SCHEDULED if _SCHEDULE in saved and may_change is MAY_CHANGE else ()
    return _describe(
        saved, wanted, [key for key in _changed(saved, wanted) if key in fixed or not is_among(key, may_change)]
    )


def resume_refusal(saved: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """Return a text with the changes that `refused_changes` refuses and a remedy; empty if there are none."""
    refused = refused_changes(saved, wanted)
    if not refused:
        return ""
    can_regrid = not refused_changes(saved, wanted, REGRIDDABLE)
    return (
        f"{refused}: a run cannot be resumed with these changes (docs/operations.md, Resuming a run, lists those that "
        f"it can); undo them, {'go on with them (doll regrid), ' if can_regrid else ''}or rename the job to begin a "
        "new one"
    )


def is_among(key: str, items: Sequence[str]) -> bool:
    """Return whether `items` contains this key or a section that contains the key."""
    key = re.sub(r"^training\.tables\.[0-9]+\.", "training.tables.*.", key)
    return any(key == item or (item.endswith(".") and key.startswith(item)) for item in items)


def _changed(expected: Mapping[str, str], got: Mapping[str, str]) -> list[str]:
    return [key for key in {**expected, **got} if expected.get(key) != got.get(key)]


def _describe(expected: Mapping[str, str], got: Mapping[str, str], keys: Sequence[str]) -> str:
    return ", ".join(
        f"{key}: expected {expected.get(key, 'nothing')}, got {got.get(key, 'nothing')}"
        + (f" ({_HINTS[key]})" if key in _HINTS else "")
        for key in keys
    )


def _pushes(sends_steps: bool, batches_per_push: int) -> str:
    if batches_per_push > 1:
        return f"waves-of-{batches_per_push}"
    return "steps" if sends_steps else "gradients"


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a section and of its subsections, with their keys as in `--set`."""
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{_text(key)}.")
        else:
            yield f"{prefix}{_text(key)}", value


def _argument(key: str, value: Any) -> str:
    """Return the value of an argument. For a path, return only its last part: the folder may differ between
    machines."""
    if isinstance(value, str) and str(key).endswith(PATH_ENDINGS):
        value = PurePath(value).name
    return _value(value)


def _class(name: str) -> str:
    """Return `file.py:Class` without the folder: the file of a notebook's task is in the folder of its run."""
    return name if not name.rpartition(":")[0].endswith(".py") else PurePath(name).name


def _value(value: Any) -> str:
    """Return text unchanged, and any other value as JSON without spaces. For a long value, return a checksum."""
    plain = value if isinstance(value, str) else json.dumps(_in_order(value), separators=(",", ":"), default=str)
    text = _text(plain)
    if len(text) <= _MAX_VALUE_CHARS:
        return text
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _in_order(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _in_order(value[key]) for key in sorted(value, key=str)}
    return [_in_order(item) for item in value] if isinstance(value, list | tuple) else value


def _text(value: Any) -> str:
    """Return `value` as text in which spaces, `=` and control characters are escaped, because they separate fields."""
    return "".join(c if c.isprintable() and c not in " =" else f"\\u{ord(c):04x}" for c in str(value))
