"""What `doll regrid` does with its options before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from doll.config import parse
from doll.run.folder import RunFolder
from doll.run.local import regrid
from doll.run.target import open_target
from doll.services import Services

JOB = """
job: line
task: {class: "examples.synthetic.task:Gaussian"}
"""


@pytest.mark.parametrize(
    ("shards", "workers", "overrides", "resumed"),
    [(2, None, [], ["ps.shards=2"]), (2, 3, [], None), (2, None, ["seed=3"], None), (None, None, [], None)],
)
def test_another_number_of_shards_alone_is_a_resume(
    shards: int | None, workers: int | None, overrides: list[str], resumed: list[str] | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run = RunFolder(tmp_path)
    run.write_job(parse(JOB))
    run.write_stack(Services("127.0.0.1:9", "redis://127.0.0.1:8/0"), kafka_kind="local")
    calls: list[tuple[Path, list[str]]] = []

    def resume(folder: Path, changes: list[str]) -> dict[str, Any]:
        calls.append((folder, changes))
        return {}

    class OtherwiseRegridded(Exception):
        pass

    def check(*args: object, **more: object) -> None:
        raise OtherwiseRegridded

    monkeypatch.setattr(regrid, "run_resume", resume)
    monkeypatch.setattr(regrid, "check_runnable", check)
    new = regrid.NewGrid(shards=shards, workers=workers)
    if resumed is None:
        with pytest.raises(OtherwiseRegridded):
            regrid.regrid_run(open_target(tmp_path, []), overrides, new, lambda text: None)
    else:
        regrid.regrid_run(open_target(tmp_path, []), overrides, new, lambda text: None)
    assert calls == ([] if resumed is None else [(tmp_path, resumed)])
