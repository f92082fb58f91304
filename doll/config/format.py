"""The formats of a record's value, which contains the fields that a `doll.FieldsTask` learns from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from doll.config.section import Section
from doll.config.variants import Variants

_URL: Final = re.compile(r"https?://[^/\s]+(/\S*)?")


class FormatSection(Section):
    """The keys that all formats have in common."""

    kind: str


class JsonFormat(FormatSection):
    """Each value is a JSON object."""

    kind: Literal["json"]


class AvroFormat(FormatSection):
    """Each value is an Avro record, after the header of a schema registry: a byte 0 and the schema's id, 4 bytes. Each
    value is decoded with the schema with which it was written, so the schema may change while the job runs. Dates and
    times are decoded as the whole numbers that Avro stores. Credentials of the registry come from
    `DOLL_REGISTRY_USERNAME` and `DOLL_REGISTRY_PASSWORD`, or `DOLL_REGISTRY_TOKEN`; `DOLL_REGISTRY_CA` is the path of
    the authority's certificate."""

    kind: Literal["avro"]
    registry: str | None = None
    """URL of a schema registry with Confluent's API, such as `http://host:8081`, or `http://host:8080/apis/ccompat/v7`
    for Apicurio"""
    subject: str | None = None
    """subject of the stream's schemas, such as `clicks-value`. It must exist; a warning lists the task's fields that
    its newest schema does not have"""
    version: PositiveInt | None = None
    """version of the subject to which all records are converted, by Avro's rules: a field that is missing in a record
    gets the default of that version. Default: the fields of each record are read by their names, and missing fields
    have the defaults of the task's `record`"""
    schema_file: Path | None = None
    """file with the schema (.avsc) of all records, instead of a registry; the values then have no header"""

    @field_validator("registry", mode="before")
    @classmethod
    def _is_url(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if "@" in value or "?" in value:  # the URL itself is a secret then: it is not repeated here
            raise ValueError(
                "the URL holds credentials: expected http://host:port/path; set DOLL_REGISTRY_USERNAME and "
                "DOLL_REGISTRY_PASSWORD instead"
            )
        if not _URL.fullmatch(value):
            raise ValueError(f"expected http://host:port or https://host:port, got {value!r}")
        return value.rstrip("/")

    @model_validator(mode="after")
    def _has_schemas(self) -> Self:
        if (self.registry is None) == (self.schema_file is None):
            raise ValueError("kind: avro: expected either registry, a URL, or schema_file")
        if self.subject is not None and self.registry is None:
            raise ValueError("subject: expected registry, a URL")
        if self.version is not None and self.subject is None:
            raise ValueError("version: expected subject, whose version it is")
        return self


class ProtobufFormat(FormatSection):
    """Each value is a Protobuf message. If a message lacks a field that is declared `optional` or is a message, the
    field gets the default of the task's `record`. Any other missing field gets Protobuf's default. The same holds for
    fields of nested messages. `uint64` and `fixed64` need the type `doll.UInt64`."""

    kind: Literal["protobuf"]
    message: str
    """the class that protoc generated, as `module:Class` or `file_pb2.py:Class`"""
    header: bool = True
    """values have the header of a schema registry: a byte 0, the schema's id, and the index of the message within the
    schema. The registry is not contacted: the class decodes messages of all compatible schemas"""


class JsonSchemaFormat(FormatSection):
    """Each value is a JSON object after the header of a schema registry: a byte 0 and the schema's id, 4 bytes. The
    registry is not contacted: values are checked against the types of the task's `record`."""

    kind: Literal["json_schema"]


class CsvFormat(FormatSection):
    """Each value is one line of CSV, without a header line. An empty cell gets the default of the task's `record`."""

    kind: Literal["csv"]
    columns: list[str] = Field(min_length=1)
    """names of the cells in order; cells that `record` does not name are ignored"""
    delimiter: str = Field(default=",", min_length=1, max_length=1)
    """character between two cells"""


formats = Variants("kind", JsonFormat, AvroFormat, ProtobufFormat, JsonSchemaFormat, CsvFormat)

FormatConfig = Annotated[FormatSection, formats]
