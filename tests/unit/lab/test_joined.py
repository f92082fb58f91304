"""What doll-lab adds to `doll` by entry points, and what is said where it is not installed."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path

import doll as doll_package
import pytest
from commands import doll
from doll import extensions
from doll.errors import ConfigError
from doll.provisioner.traces.recordings import survey
from paths import EXAMPLES, ROOT


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """DOLL as it is without doll-lab."""
    monkeypatch.setattr(extensions, "find", lambda group, name: None)


def declared() -> dict[tuple[str, str], str]:
    groups = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text())["project"]["entry-points"]
    return {(group, name): target for group, names in groups.items() for name, target in names.items()}


@pytest.mark.parametrize(("group", "name"), list(declared()), ids="/".join)
def test_each_entry_point_that_is_declared_is_found(group: str, name: str) -> None:
    part = extensions.find(group, name)
    assert part is not None, "doll-lab is not installed, or not as it is now: `make setup`"
    assert f"{part.__module__}:{part.__qualname__}" == declared()[group, name]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "line",
    [
        "backtest my-traces --windows 3",
        "drill digits --faults 3",
        "simulate -N 4",
        "spot market --seed 3",
        "compare digits --simulate",
        "backtest",
        "plan --pipeline fleet.yaml",
    ],
)
def test_a_command_without_doll_lab_says_what_to_install(line: str) -> None:
    result = doll(*shlex.split(line))
    assert result.exit_code == 2
    words = line.split()
    what = f"doll {words[0]}" + {"plan": " --pipeline", "compare": " --simulate"}.get(words[0], "")
    assert result.stderr.splitlines() == [
        f"doll: {what} is in doll-lab, which is not installed: install doll-lab (in a clone: make setup)"
    ]


@pytest.mark.usefixtures("alone")
def test_a_function_without_doll_lab_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"doll\.simulate is in doll-lab, which is not installed: install doll-lab"):
        doll_package.simulate("digits")


@pytest.mark.slow  # loads torch
@pytest.mark.usefixtures("alone")
def test_a_picture_of_a_profile_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    result = doll("profile", str(EXAMPLES / "digits" / "job.yaml"), "--plot", str(tmp_path / "profile.png"))
    assert result.exit_code == 2
    assert "doll profile --plot is in doll-lab" in result.stderr


@pytest.mark.usefixtures("alone")
def test_public_recordings_are_left_out_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "counts.txt").write_text("2021-01-01, 00:00:00, 3\n2021-01-01, 00:01:00, 2\n")
    (left_out,) = survey(tmp_path).skipped
    assert left_out.why.endswith("doll-lab, which reads public data sets, is not installed")
    with pytest.raises(ConfigError, match="doll-lab"):
        survey(tmp_path).check(tmp_path)
