"""Constants from a pilot run's folder, put into a plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from doll.config import PlanConfig
from doll.errors import ConfigError
from doll.monitor.state.pilot_run import calibrate_run, with_pilot

JOB = "job: pilot\ntask: {class: 'a:B'}\ntraining: {policy: {group_size: 4}}\nstop: {accuracy: 0.9}\n"


def pilot(folder: Path, evaluations: int) -> Path:
    """A run whose error is 0.5 * 0.98^J + 0.02, evaluated every 10 updates."""
    folder.mkdir()
    (folder / "job.yaml").write_text(JOB)
    versions = range(1, 10 * evaluations + 1)
    rows = [f"{version},{1000 + 0.1 * version},64,4,0.02" for version in versions]
    (folder / "updates.csv").write_text("\n".join(["version,time_s,n_samples,batches,mean_service_s", *rows]) + "\n")
    rows = [f"{version},{1 - 0.5 * 0.98**version - 0.02}" for version in versions[9::10]]
    (folder / "evaluations.csv").write_text("\n".join(["version,accuracy", *rows]) + "\n")
    return folder


def test_a_plan_without_a_pilot_stays_as_it_is() -> None:
    section = PlanConfig(target_error=0.1)
    assert with_pilot(None, section) == (section, [])


def test_j_and_service_time_come_from_the_pilot_unless_the_plan_has_them(tmp_path: Path) -> None:
    folder = pilot(tmp_path / "run", 30)
    section, notes = with_pilot(None, PlanConfig(target_error=0.03, pilot=folder))
    assert section.updates == pytest.approx(194, abs=20)  # 0.5 * 0.98^J = 0.01
    assert (section.pilot, section.service_s) == (None, pytest.approx(0.02))
    (note,) = notes
    assert note.startswith(f"J = {section.updates:g} (90 % interval ")
    assert note.endswith(f" from {folder}")
    section, notes = with_pilot(None, PlanConfig(updates=70, service_s=0.5, pilot=folder))
    assert (section.updates, section.service_s, notes) == (70, 0.5, [])


def test_the_target_comes_from_the_stop_rule(tmp_path: Path) -> None:
    assert calibrate_run(pilot(tmp_path / "run", 30)).target_error == pytest.approx(0.1)


def test_a_pilot_that_is_too_short_or_missing_says_so(tmp_path: Path) -> None:
    short = pilot(tmp_path / "short", 5)
    with pytest.raises(ConfigError, match="J cannot be estimated: 5 held-out evaluations"):
        with_pilot(None, PlanConfig(target_error=0.03, pilot=short))
    with pytest.raises(ConfigError, match="expected a run folder"):
        calibrate_run(tmp_path / "nowhere")
    (short / "updates.csv").unlink()
    with pytest.raises(ConfigError, match=r"with updates\.csv and evaluations\.csv"):
        calibrate_run(short)


def test_samples_of_a_record_come_from_the_records_that_were_learned(tmp_path: Path) -> None:
    """Batches that were cut have fewer records; they say nothing of samples per record."""
    folder = pilot(tmp_path / "run", 30)
    for packed, n_samples, expected in ((1, 250, 2.5), (4, 1000, 2.5), (1, 100, 1.0), (4, 399, 1.0), (1, 30, 0.3)):
        (folder / "job.yaml").write_text(f"{JOB}data: {{batch_size: 64, samples_per_record: {packed}}}\n")
        rows = [f"{version},{1000 + 0.1 * version},{n_samples},4,0.02,100" for version in range(1, 301)]
        names = "version,time_s,n_samples,batches,mean_service_s,records"
        (folder / "updates.csv").write_text("\n".join([names, *rows]) + "\n")
        calibration = calibrate_run(folder)
        assert calibration.mean_samples == pytest.approx(expected)
        assert ("plan.mean_samples" in calibration.text()) is (expected != 1)
        # What is measured of samples, and a batch of as many: the margin is that of batches.
        assert calibration.stability is not None
        assert calibration.stability.sufficient == pytest.approx(64 * expected / (10 * n_samples * 0.02))
        section, notes = with_pilot(None, PlanConfig(updates=70, pilot=folder))
        assert section.mean_samples == pytest.approx(expected)
        assert [note.partition(" samples of each record")[0] for note in notes] == [f"{expected:g}"] * (expected != 1)
        assert with_pilot(None, PlanConfig(updates=70, mean_samples=7, pilot=folder))[0].mean_samples == 7
