"""Profiles of models: the file, and times on other devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from doll.errors import ConfigError
from doll.pipeline.profiling.profile import Device, LayerProfile, Profile

PROFILE = Profile(
    "net", 32, "cpu", (LayerProfile("a", 0.1, 0.2, 100, 50, 400), LayerProfile("b", 0.3, 0.5, 10, 5, 0)), 64,
    {"gpu": ((0.01, 0.02), (0.03, 0.05))},
)  # fmt: skip


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_bytes(PROFILE.to_json())
    assert Profile.load(tmp_path / "profile.json") == PROFILE


def test_times_on_another_device_are_measured_or_scaled_by_its_speed() -> None:
    assert PROFILE.times_on(Device("slow", speed=0.5)) == [(0.2, 0.4), (0.6, 1.0)]
    assert PROFILE.times_on(Device("gpu", speed=0.5)) == [(0.01, 0.02), (0.03, 0.05)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.update(format=2), "expected format 1, got 2"),
        (lambda file: file.update(more=1), "unknown field `more`"),
        (lambda file: file["profile"].pop("layers"), "`layers`"),
        (lambda file: file["profile"].update(layers=[]), "expected a layer at least"),
        (lambda file: file["profile"].update(batch_size=0), "batch_size of 1"),
        (lambda file: file["profile"]["layers"][1].update(forward_s=-1), r"layer 2 \('b'\): forward_s"),
        (lambda file: file["profile"]["layers"][1].update(name="a"), "a name that no other layer has"),
        (lambda file: file["profile"]["layers"][0].update(parameter_bytes=0.5), "int"),
        (lambda file: file["profile"]["times_by_device"].update(gpu=[[1, 2]]), "2 pairs of seconds"),
    ],
)
def test_a_bad_file_is_refused_with_its_field(change: Any, message: str, tmp_path: Path) -> None:
    file = json.loads(PROFILE.to_json())
    change(file)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(file))
    with pytest.raises(ConfigError, match=message) as caught:
        Profile.load(path)
    assert str(path) in str(caught.value)


def test_what_is_no_profile_is_refused(tmp_path: Path) -> None:
    for data in (b"", b"\xff\xfe", b"[1]", b"{}"):
        with pytest.raises(ConfigError, match="expected a file of `doll profile`"):
            Profile.from_json(data)
    with pytest.raises(ConfigError, match="No such file"):
        Profile.load(tmp_path / "none")
