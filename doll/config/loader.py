"""Read a job file: YAML with bounds on size and depth, overrides, checks, and the words of their errors."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from doll.config.job import JobConfig
from doll.config.variants import sections_of
from doll.errors import ConfigError
from doll.records.bounded import MalformedError, check_size, read_text

# Far above any real job file: a larger file is no job file, or an attempt to exhaust the memory.
MAX_CHARS = 1_000_000
MAX_VALUES = 100_000
MAX_DEPTH = 40
_TYPE_NAME = re.compile(r"constrained-\w+|list\[.*\]")  # in the places of pydantic's errors


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
    """As `load`, for the text of a job file.

    Raises:
        ConfigError: as in `load`.
    """
    data = plain_values(text, f"{origin}:")
    if not isinstance(data, dict):
        raise ConfigError(f"{origin}: expected keys and values (job:, task:, data:, ...), got {type(data).__name__}")
    for override in overrides:
        _override(data, override)
    try:
        # The resolved job file of a run has the folder that its relative paths start from.
        own_folder = data.get("base_folder")
        folder = base_folder / own_folder if isinstance(own_folder, str) else base_folder
        return JobConfig.model_validate({**data, "base_folder": folder})
    except ValidationError as exc:
        raise ConfigError("\n".join(f"{origin}: {line}" for line in explain(exc, JobConfig))) from exc


def dump(config: JobConfig) -> str:
    """The effective job file as YAML; `parse(dump(c))` equals `c` except for the base folder."""
    text: str = yaml.safe_dump(config.model_dump(mode="json", by_alias=True, exclude_none=True), sort_keys=False)
    return text


class _Loader(yaml.SafeLoader):
    """Loads plain YAML values only, and counts merged keys (`<<`): a few lines of them can expand to 10^9 keys."""

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
    """The value of a YAML text, bounded in size and depth with all its references followed.

    Args:
        origin: begins the message of an error.
        what: the text should be.

    Raises:
        ConfigError: it is not YAML, or too large.
    """
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
    section[parts[-1]] = plain_values(value, f"--set {override:.80}: value is")


def explain(error: ValidationError, root: type[BaseModel]) -> Iterator[str]:
    """One line per wrong key of a job file that `root` describes: the key, the expected value, the actual value."""
    for item in error.errors():
        loc = _location(item["loc"])
        key = ".".join(loc) or "job file"
        value = item.get("input")
        shown = _shown(value)
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
                yield f"{key}: {message}, got {shown}"


def _shown(value: Any) -> str:
    """A value for a message, shortened."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return type(value).__name__
    return type(value).__name__ if isinstance(value, dict | list) and len(text) >= 60 else shortened(text)


def shortened(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]}..."


def _location(loc: Sequence[str | int]) -> list[str]:
    """The key as the file has it, without the type names that pydantic adds."""
    return [str(part) for part in loc if not _TYPE_NAME.fullmatch(str(part))]


def _sibling_keys(root: type[BaseModel], loc: Sequence[str]) -> list[str]:
    """The keys that are known where the last part of `loc` stands."""
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
