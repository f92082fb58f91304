"""Where samples come from, and when they arrive."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from doll.config.section import Section
from doll.config.variants import Variants


class ArrivalsConfig(Section):
    """When samples arrive at each stream."""

    process: Literal["poisson", "deterministic", "asap", "trace"] = "poisson"
    rate_per_s: PositiveFloat | list[PositiveFloat] = Field(
        default=125.0, description="samples per second and stream; a list gives each stream its own rate"
    )
    trace: Path | None = Field(
        default=None, description="text file: one gap in seconds per line, repeated when it ends"
    )
    while_down: Literal["queue", "pause"] = Field(
        default="queue",
        description="what `doll produce` does with a stream whose worker is down: send on, or send nothing until it is "
        "up again (the DOLL paper's model; the formulas of cost and runtime hold only so)",
    )

    @model_validator(mode="after")
    def _pausable(self) -> Self:
        if self.while_down == "pause" and self.process == "asap":
            raise ValueError("while_down: pause: expected a process that keeps time, got asap")
        return self

    @model_validator(mode="after")
    def _trace_given(self) -> Self:
        if (self.process == "trace") != (self.trace is not None):
            raise ValueError("expected 'trace' (a file of gaps in seconds) exactly when process is 'trace'")
        return self


class _Source(Section):
    limit_samples: PositiveInt | None = Field(
        default=None, description="end the stream after this many samples; default: endless"
    )


class DigitsSource(_Source):
    """scikit-learn's handwritten digits, each passed through a random affine and perspective transform."""

    kind: Literal["digits"]


class IdxSource(_Source):
    """Images and labels in IDX files (MNIST's format), .gz or plain; optionally transformed at random."""

    kind: Literal["idx"]
    images: Path
    labels: Path
    augment: bool = True
    skip: int = Field(default=0, ge=0, description="leave out the first images (for a held-out set)")


class CsvSource(_Source):
    """Lines of a CSV file in order, as they stand; sample i goes to stream i mod N."""

    kind: Literal["csv"]
    path: Path
    header: bool = Field(default=False, description="the first line names the columns and is not a sample")
    repeat: bool = Field(default=False, description="begin again at the end of the file")


class JsonlSource(_Source):
    """Lines of a JSON-lines file in order, as they stand; sample i goes to stream i mod N."""

    kind: Literal["jsonl"]
    path: Path
    repeat: bool = False


class StdinSource(_Source):
    """Lines of standard input, as they stand; sample i goes to stream i mod N."""

    kind: Literal["stdin"]


class SyntheticSource(_Source):
    """Gaussian classes in `features` dimensions as packed little-endian float32, then the class as one float32."""

    kind: Literal["synthetic"]
    features: PositiveInt = 20
    classes: PositiveInt = 2
    drift_per_sample: float = Field(default=0.0, ge=0, description="how far class means walk with each sample")


sources = Variants("kind", DigitsSource, IdxSource, CsvSource, JsonlSource, StdinSource, SyntheticSource)

SourceConfig = Annotated[DigitsSource | IdxSource | CsvSource | JsonlSource | StdinSource | SyntheticSource, sources]
