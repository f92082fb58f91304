"""The page that a model server carries."""

from __future__ import annotations

from pathlib import Path

from doll.run.folder import RunFolder
from doll.run.page import page_beside
from doll.run.target import open_target
from page_feed import ask, job


def test_a_page_that_cannot_be_shown_keeps_nothing_from_being_served(tmp_path: Path) -> None:
    run, said = RunFolder(tmp_path), list[str]()
    run.write_job(job(4))
    run.report.write_text('{"events": 7}')
    with page_beside(open_target(tmp_path, []), 0, lambda: "", said.append):
        assert said == [said[0]]
        assert said[0].startswith(f"no page: {run.report}: expected a report of this release")


def test_a_page_beside_a_server_ends_with_it(tmp_path: Path) -> None:
    run, said = RunFolder(tmp_path), list[str]()
    run.write_job(job(4))
    run.report.write_text('{"reason": "updates: 1 reached", "error": null}')
    with page_beside(open_target(tmp_path, []), 0, lambda: "", said.append):
        assert ask(int(said[0].rpartition(":")[2]), "/")[0] == 200
