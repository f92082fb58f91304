"""Read a job file: parse YAML with limits on size and depth, apply overrides, check values, format errors."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import BaseModel, ValidationError

from doll.config.job import JobConfig
from doll.config.variants import sections_of
from doll.errors import ConfigError
from doll.records.bounded import MalformedError, check_size, read_text, short
from doll.redaction import redacted

# Far above any real job file: a larger file is no job file, or an attempt to exhaust the memory.
MAX_CHARS = 1_000_000
MAX_VALUES = 100_000
MAX_DEPTH = 40
_RUN: Final = "{run}"  # beginning of a path inside the run folder, in a run's job file
_IF_MOVED: Final = "base_folder_if_moved"
_TYPE_NAME = re.compile(r"constrained-\w+|list\[.*\]")  # type names in the locations of pydantic's errors


def load(path: Path, overrides: Sequence[str] = ()) -> JobConfig:
    """Load and check the job file at `path`, with `key.sub=value` overrides.

    Raises:
        ConfigError: the file does not exist, is not YAML, or a key is unknown, missing or has a wrong value. The
            message has the key, the expected value and the actual one.
    """
    try:
        text = read_text(path, max_bytes=4 * MAX_CHARS)
    except (OSError, MalformedError) as exc:
        raise ConfigError(f"cannot read job file {path}: {getattr(exc, 'strerror', None) or exc}") from exc
    return parse(text, overrides, origin=str(path), base_folder=path.resolve().parent)


def parse(
    text: str, overrides: Sequence[str] = (), *, origin: str = "job file", base_folder: Path = Path(".")
) -> JobConfig:
    """Check the text of a job file as `load` does, and raise the same errors."""
    data = plain_values(text, f"{origin}:")
    if not isinstance(data, dict):
        raise ConfigError(f"{origin}: expected keys and values (job:, task:, data:, ...), got {type(data).__name__}")
    data = located(data, base_folder)
    for override in overrides:
        _override(data, override)
    try:
        own_folder = data.get("base_folder")
        folder = base_folder / own_folder if isinstance(own_folder, str) else base_folder
        return JobConfig.model_validate({**data, "base_folder": folder})
    except ValidationError as exc:
        raise ConfigError("\n".join(f"{origin}: {line}" for line in explain(exc, JobConfig))) from exc


def dump(config: JobConfig) -> str:
    """Return the effective job file as YAML; `parse(dump(c))` equals `c` except for the base folder."""
    text: str = yaml.safe_dump(config.model_dump(mode="json", by_alias=True, exclude_none=True), sort_keys=False)
    return text


def dump_run(config: JobConfig, folder: Path) -> str:
    """Return the job file of a run. Paths inside `folder` are written relative to it, so a copy of the folder is a run
    of its own; other relative paths keep their meaning. `located` reads the result."""
    base = config.base_folder.resolve()
    data = config.model_dump(mode="json", by_alias=True, exclude_none=True) | {"base_folder": str(base)}
    placed = {**_replaced(data, str(folder), _RUN), _IF_MOVED: _way(folder, base)}
    text: str = yaml.safe_dump(placed, sort_keys=False, allow_unicode=True)
    return text


def located(data: dict[Any, Any], folder: Path) -> dict[Any, Any]:
    """Return the keys of a job file in `folder`. Paths of a run's job file are resolved in the present run folder.

    The base folder contains the user's own files. Its path does not change while this folder exists. If it does not
    exist any more, the stored relative path from the run folder to the base folder is followed from `folder`. The
    folder there becomes the base folder if it contains the task.
    """
    if not isinstance(data.get("base_folder"), str):
        return data
    data = _replaced(data, _RUN, str(folder))
    section = data.get("checkpoint")
    stored = section.get("folder") if isinstance(section, dict) else None
    # An earlier release wrote all paths absolute; its folder may have been copied or moved since.
    is_earlier = _IF_MOVED not in data and (folder / "stack.json").is_file() and (folder / "checkpoints").is_dir()
    if is_earlier and isinstance(stored, str) and Path(stored).name == "checkpoints":
        data = _replaced(data, str(Path(stored).parent), str(folder))
    beside = folder / str(data.pop(_IF_MOVED, data["base_folder"]))
    if not Path(data["base_folder"]).is_dir() and _has_task(beside, data.get("task")):
        data["base_folder"] = str(beside.resolve())
    return data


def _replaced(value: Any, before: str, after: str) -> Any:
    """Return `value`. If it is the path `before` or a path inside it, replace `before` by `after`."""
    if isinstance(value, dict):
        return {key: _replaced(inner, before, after) for key, inner in value.items()}
    if isinstance(value, list):
        return [_replaced(inner, before, after) for inner in value]
    is_inside = isinstance(value, str) and (value == before or value.startswith(f"{before}/"))
    return f"{after}{value[len(before) :]}" if is_inside else value


def _way(start: Path, to: Path) -> str:
    """Return the relative path from one absolute folder to another."""
    shared = sum(1 for _ in takewhile(lambda parts: parts[0] == parts[1], zip(start.parts, to.parts, strict=False)))
    return str(Path(*[".."] * (len(start.parts) - shared), *to.parts[shared:]))


def _has_task(folder: Path, task: Any) -> bool:
    """Return whether `folder` contains the file or the module of a job's task."""
    module = str(task.get("class") if isinstance(task, dict) else "").rpartition(":")[0]
    names = [module] if module.endswith(".py") else [module.split(".")[0], f"{module.split('.')[0]}.py"]
    return bool(module) and any((folder / name).exists() for name in names)


class _Loader(yaml.SafeLoader):
    """A loader that accepts only plain YAML values. It counts merged keys (`<<`), which can expand to 10^9 keys."""

    merged = 0

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (KeyError, IndexError, AttributeError, TypeError) as exc:  # `!!bool x`, `!!int ""`
            raise yaml.constructor.ConstructorError(
                None, None, f"expected a value of {node.tag}, got {node.value!r}", node.start_mark
            ) from exc

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        self.merged += len(node.value)
        if self.merged > MAX_VALUES:
            raise yaml.YAMLError(f"more than {MAX_VALUES} keys")


# Text, numbers, lists and mappings. Dates stay text, because no key takes a date.
_PLAIN = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")}
_Loader.yaml_constructors = {
    tag: make for tag, make in yaml.SafeLoader.yaml_constructors.items() if tag is None or tag in _PLAIN
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def plain_values(text: str, origin: str, what: str = "a job file") -> Any:
    """Return the value of the YAML text `text`. Its size and depth are limited, also after the expansion of all
    references. Raise ConfigError if `text` is not YAML or is too large; the message begins with `origin` and names
    `what`."""
    if len(text) > MAX_CHARS:
        raise ConfigError(f"{origin} not {what}: expected at most {MAX_CHARS} characters, got {len(text)}")
    try:
        loader = _Loader(text)
        try:
            data = loader.get_single_data()
        finally:
            loader.dispose()
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError, MemoryError) as exc:
        raise ConfigError(f"{origin} not YAML: {shortened(str(exc))}") from exc
    try:
        check_size(data, max_values=MAX_VALUES, max_depth=MAX_DEPTH)
    except MalformedError as exc:
        raise ConfigError(f"{origin} not {what}: {exc}: does an anchor refer to itself?") from exc
    return data


def _override(data: dict[Any, Any], override: str) -> None:
    key, sep, value = override.partition("=")
    if not sep or not key.strip():
        raise ConfigError(f"--set: expected key.sub=value, got {override!r}")
    section = data
    parts = key.strip().split(".")
    for part in parts[:-1]:
        inner = section.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {override}: {part!r} is a value, not a section")
        section = inner
    section[parts[-1]] = plain_values(value, f"--set {short(override, 80)}: value is")


def explain(error: ValidationError, root: type[BaseModel]) -> Iterator[str]:
    """Yield one line for each wrong key of a job file that `root` describes: key, expected value, actual value."""
    for item in error.errors():
        loc = _location(item["loc"])
        key = ".".join(loc) or "job file"
        value = item.get("input")
        match item["type"]:
            case "extra_forbidden":
                known = [name for name in _sibling_keys(root, loc) if name != loc[-1]]
                matches = difflib.get_close_matches(loc[-1], known, n=1)
                hint = f" (did you mean {matches[0]!r}?)" if matches else ""
                yield f"{key}: unknown key{hint}"
            case "missing":
                yield f"{key}: expected a value, got nothing: add this key"
            case "unknown_variant":
                variant = item["ctx"]
                given = value.get(variant["key"]) if isinstance(value, dict) else value
                yield f"{key}.{variant['key']}: expected one of {variant['expected']}, got {_shown(given)}"
            case "value_error":
                message = item["msg"].removeprefix("Value error, ")
                yield f"{key}: {message}" if loc else message
            case _:
                message = item["msg"][:1].lower() + item["msg"][1:]
                yield f"{key}: {message}, got {_shown(value)}"


def _shown(value: Any) -> str:
    """Return a value for a message, shortened."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return type(value).__name__
    return type(value).__name__ if isinstance(value, dict | list) and len(text) >= 60 else shortened(text)


def shortened(text: str) -> str:
    text = redacted(text)
    return text if len(text) <= 300 else f"{text[:300]}..."


def _location(loc: Sequence[str | int]) -> list[str]:
    """Return the key as in the file, without the type names that pydantic adds."""
    return [str(part) for part in loc if not _TYPE_NAME.fullmatch(str(part))]


def _sibling_keys(root: type[BaseModel], loc: Sequence[str]) -> list[str]:
    """Return the known keys of the section that contains the last part of `loc`."""
    models = [root]
    for part in loc[:-1]:
        inner = [
            section
            for model in models
            for name, field in model.model_fields.items()
            if part in (name, field.alias)
            for section in sections_of(field)
        ]
        models = inner or models
    return [field.alias or name for model in models for name, field in model.model_fields.items()]
