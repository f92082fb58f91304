"""The costs of a model's layers: the input of the partitioner. Pure, except for reading and writing the file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from doll.errors import ConfigError

FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """The costs of one layer, for one minibatch on the profiled device.

    Attributes:
        activation_bytes: memory that is kept between the forward and the backward pass, without the input. It includes
            the output if this layer or the next one needs the output in the backward pass.
        output_bytes: size of the output that is sent to the next layer; the returned gradient has the same size.
    """

    name: str
    forward_s: float
    backward_s: float
    activation_bytes: int
    output_bytes: int
    parameter_bytes: int

    @property
    def compute_s(self) -> float:
        """Seconds of the forward and backward pass together."""
        return self.forward_s + self.backward_s


class StageSize(NamedTuple):
    """Sizes of consecutive layers in bytes: numbers, or arrays.

    Attributes:
        parameter_bytes: W, size of the parameters.
        activation_bytes: A, size of the activations of one minibatch, without the input.
        input_bytes: size of the input of one minibatch.
        largest_bytes: size of the largest input or output of these layers.
    """

    parameter_bytes: Any
    activation_bytes: Any
    input_bytes: Any = 0
    largest_bytes: Any = 0


@dataclass(frozen=True, slots=True)
class Device:
    """One machine or accelerator.

    Attributes:
        speed: speed relative to the profiled device.
        node: name of the node; devices of one node have a faster connection.
    """

    name: str
    speed: float = 1.0
    memory_bytes: float = math.inf
    node: str = ""
    usd_per_h: float = 0.0
    is_spot: bool = False

    @property
    def kind(self) -> tuple[str, float, float]:
        """The key of interchangeable devices: a partition takes the same time on devices of one kind and one node."""
        return (self.name, self.speed, self.memory_bytes)


@dataclass(frozen=True, slots=True)
class Profile:
    """The layers of one model, first layer first.

    Attributes:
        times_by_device: (forward_s, backward_s) of each layer, by the name of the device on which they were measured.
    """

    model: str
    batch_size: int
    device: str
    layers: tuple[LayerProfile, ...]
    input_bytes: int = 0
    times_by_device: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)

    def times_on(self, device: Device) -> list[tuple[float, float]]:
        """Return (forward_s, backward_s) of each layer on `device`: measured times, or times scaled by its speed."""
        measured = self.times_by_device.get(device.name)
        if measured is not None:
            return list(measured)
        return [(layer.forward_s / device.speed, layer.backward_s / device.speed) for layer in self.layers]

    def size_of(self, first: int, stop: int) -> StageSize:
        """Return the size of the layers [first, stop)."""
        layers = self.layers[first:stop]
        taken = self.layers[first - 1].output_bytes if first else self.input_bytes
        return StageSize(
            sum(layer.parameter_bytes for layer in layers), sum(layer.activation_bytes for layer in layers), taken,
            max(taken, *(layer.output_bytes for layer in layers)),
        )  # fmt: skip

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(_ProfileFile(profile=self)), indent=1) + b"\n"

    @classmethod
    def from_json(cls, data: bytes, origin: str = "profile") -> Profile:
        """Parse a profile. Raise ConfigError, which names the wrong field, if the data is not a profile."""
        try:
            file = msgspec.json.decode(data, type=_ProfileFile)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise ConfigError(f"{origin}: expected a file of `doll profile`: {exc}") from exc
        if file.format != FORMAT:
            raise ConfigError(f"{origin}: expected format {FORMAT}, got {file.format}: profile the model again")
        file.profile._check(origin)
        return file.profile

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Load a profile from a file. Raise ConfigError if the file cannot be read, or is not a profile."""
        try:
            data = path.read_bytes()
        except OSError as exc:
            raise ConfigError(f"{path}: expected a file of `doll profile`: {exc.strerror}") from exc
        return cls.from_json(data, str(path))

    def _check(self, origin: str) -> None:
        if not self.layers:
            raise ConfigError(f"{origin}: expected a layer at least")
        if self.batch_size < 1 or self.input_bytes < 0:
            raise ConfigError(
                f"{origin}: expected batch_size of 1 and input_bytes of 0 at least, got {self.batch_size} and "
                f"{self.input_bytes}"
            )
        names = set[str]()
        for number, layer in enumerate(self.layers, 1):
            where = f"{origin}: layer {number} ({layer.name!r})"
            if not layer.name or layer.name in names:
                raise ConfigError(f"{where}: expected a name that no other layer has")
            names.add(layer.name)
            for key in ("forward_s", "backward_s", "activation_bytes", "output_bytes", "parameter_bytes"):
                if not 0 <= (value := getattr(layer, key)) < math.inf:
                    raise ConfigError(f"{where}: {key}: expected a number of 0 or more, got {value}")
        for device, times in self.times_by_device.items():
            if len(times) != len(self.layers) or not all(0 <= t < math.inf for pair in times for t in pair):
                raise ConfigError(
                    f"{origin}: times_by_device: {device!r}: expected {len(self.layers)} pairs of seconds, one for "
                    "each layer"
                )


class _ProfileFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    profile: Profile
    format: int = FORMAT
