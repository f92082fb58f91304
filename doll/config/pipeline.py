"""Workers that are pipelines: the model is split into stages, each on its own device (the HetPipe paper, section 4)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, StringConstraints, model_validator

from doll.config.section import Section, short_form

MAX_STAGES = 64
MAX_SLOWDOWN = 1_000.0


class StageDeviceConfig(Section):
    """The device of one stage: `cpu`, `cuda:0`, or a mapping with `device`."""

    device: Annotated[str, StringConstraints(pattern=r"^(cpu|cuda:\d{1,3})$")] = "cpu"
    speed: PositiveFloat = Field(default=1.0, ge=1e-6, le=1e6)
    """speed of this device relative to the device that was profiled; used with `profile`"""
    memory_bytes: PositiveFloat | None = None
    """memory that a stage may use: with `profile`, no stage gets more layers than fit; without `profile`, nothing is
    checked; default: no limit"""
    slowdown: float = Field(default=1.0, ge=1, le=MAX_SLOWDOWN)
    """factor by which each task of this stage is slowed down, to simulate a weaker device on one machine"""


def _one_list_or_one_for_each_worker(value: Any) -> Any:
    if isinstance(value, list) and value and not any(isinstance(item, list) for item in value):
        return [value]
    return value


StageDevice = Annotated[StageDeviceConfig, short_form("device")]


class PipelineConfig(Section):
    """Each worker is a pipeline of stages (a virtual worker): one process for each stage, with a part of the layers."""

    stages: PositiveInt = Field(le=MAX_STAGES)
    """k: number of stages of each worker"""
    devices: Annotated[list[list[StageDevice]], BeforeValidator(_one_list_or_one_for_each_worker)] = Field(
        default_factory=list
    )
    """devices of the stages, in the order of the stages; a list of such lists gives each worker its own devices;
    default: all on the CPU"""
    profile: Path | None = None
    """file written by `doll profile`, from which the layers of each stage are chosen; default: all stages get about the
    same number of parameters"""
    layers: list[list[str]] | None = None
    """names of the layers of each stage, instead of an automatic choice; `doll profile` lists the names"""
    stage_timeout_s: PositiveFloat = Field(default=8.0, ge=2, le=3600)
    """a stage that is silent for this long is considered failed, and so is its worker"""
    remote: bool = False
    """whether each stage is a process `doll stage`, on any machine; default: each worker starts its stages on its own
    machine"""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for devices in self.devices:
            if len(devices) != self.stages:
                raise ValueError(f"devices: expected {self.stages} devices, one for each stage, got {len(devices)}")
        if self.layers is not None:
            if len(self.layers) != self.stages:
                raise ValueError(f"layers: expected {self.stages} lists, one for each stage, got {len(self.layers)}")
            if empty := [number for number, names in enumerate(self.layers, 1) if not names]:
                raise ValueError(f"layers: expected a layer at least in each stage, got none in stage {empty[0]}")
            if self.profile is not None:
                raise ValueError("expected profile or layers, got both")
        return self

    def devices_of(self, worker: int) -> list[StageDeviceConfig]:
        """Return the devices of one worker's stages, in order. If a job is scaled to more workers, the lists repeat
        from the first."""
        if not self.devices:
            return [StageDeviceConfig()] * self.stages
        return self.devices[worker % len(self.devices)]
