"""How a record's value holds the fields that a `doll.FieldsTask` learns from."""

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
    """Each value is an Avro record, after the header of a schema registry: a byte 0 and the schema's id, 4 bytes. It
    is decoded by the schema that it was written with, so a schema may evolve while the job runs. Dates and times are
    the whole numbers that Avro stores. Credentials of the registry come from `DOLL_REGISTRY_USERNAME` and
    `DOLL_REGISTRY_PASSWORD`, or `DOLL_REGISTRY_TOKEN`; `DOLL_REGISTRY_CA` names a file with the certificate
    authority."""

    kind: Literal["avro"]
    registry: str | None = None
    """URL of a schema registry with Confluent's API, such as `http://host:8081`, or `http://host:8080/apis/ccompat/v7`
    of Apicurio"""
    subject: str | None = None
    """subject of the stream's schemas, such as `clicks-value`. It must exist; a warning names the fields that its
    newest schema lacks"""
    version: PositiveInt | None = None
    """version of the subject to which all records are resolved, by Avro's rules: fields that a record was written
    without have that version's defaults. Default: the fields of each record are taken by their names, and those that it
    lacks have the defaults of the task's `record`"""
    schema_file: Path | None = None
    """in place of a registry: a file with the schema (.avsc) of all records, whose values then have no header"""

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
    """Each value is a Protobuf message. A field that is not in a message has the default of the task's `record` if it
    is declared `optional` or is a message, else Protobuf's; so have the fields of messages in it. `uint64` and
    `fixed64` need the type `doll.UInt64`."""

    kind: Literal["protobuf"]
    message: str
    """the class that protoc generated, as `module:Class` or `file_pb2.py:Class`"""
    header: bool = True
    """values have the header of a schema registry: a byte 0, the schema's id, and which message of the schema it is.
    The registry is not asked: the class decodes messages of all compatible schemas"""


class JsonSchemaFormat(FormatSection):
    """Each value is a JSON object after the header of a schema registry: a byte 0 and the schema's id, 4 bytes. The
    registry is not asked: the types of the task's `record` are checked."""

    kind: Literal["json_schema"]


class CsvFormat(FormatSection):
    """Each value is one line of CSV, without a header line. An empty cell has the default of the task's `record`."""

    kind: Literal["csv"]
    columns: list[str] = Field(min_length=1)
    """names of the cells in order; those that `record` does not name are ignored"""
    delimiter: str = Field(default=",", min_length=1, max_length=1)
    """character between two cells"""


formats = Variants("kind", JsonFormat, AvroFormat, ProtobufFormat, JsonSchemaFormat, CsvFormat)

FormatConfig = Annotated[FormatSection, formats]
