"""Decoding of record values into the fields that a task uses, as `data.format` sets.

`open_reader` makes the `FieldReader` of a format. `registry` is the client for a schema registry.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from doll.config.format import AvroFormat, CsvFormat, FormatSection, JsonSchemaFormat, ProtobufFormat
from doll.errors import ConfigError
from doll.extras import require
from doll.formats.reader import FieldReader, JsonReader
from doll.formats.registry import RegistryClient


def require_format(section: FormatSection | None) -> None:
    """Raise ConfigError if a package that decodes this format is not installed."""
    if isinstance(section, AvroFormat | ProtobufFormat):
        require(f"data.format.kind: {section.kind}", section.kind)


def open_reader(
    section: FormatSection | None,
    record: type[msgspec.Struct],
    *,
    load: Callable[[str], Any],
    path: Callable[[Path], Path],
) -> FieldReader:
    """Open a reader that decodes values of `data.format` into `record`. It asks a registry only for the first value.

    Args:
        section: the section `data.format`. None: JSON.
        record: the class whose fields are decoded.
        load: function that returns the object for a name `module:Name` or `file.py:Name`.
        path: function that resolves a path of the job file.

    Raises:
        ConfigError: the format lacks fields of `record`, a file or class cannot be read, or an extra is not installed.
    """
    require_format(section)
    match section:
        case AvroFormat(registry=str(url)):
            from doll.formats.avro import AvroReader

            return AvroReader(record, RegistryClient(url), subject=section.subject, version=section.version)
        case AvroFormat(schema_file=Path() as file):
            from doll.formats.avro import PlainAvroReader

            try:
                text = path(file).read_text(encoding="utf-8")
            except (OSError, ValueError) as exc:
                raise ConfigError(f"data.format.schema_file: cannot read {path(file)}: {exc}") from exc
            return PlainAvroReader(record, text, str(file))
        case ProtobufFormat():
            from doll.formats.protobuf import ProtobufReader

            return ProtobufReader(record, load(section.message), header=section.header)
        case CsvFormat():
            from doll.formats.csv_lines import CsvReader

            return CsvReader(record, section.columns, section.delimiter)
        case _:
            return JsonReader(record, has_header=isinstance(section, JsonSchemaFormat))
