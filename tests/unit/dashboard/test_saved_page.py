"""A page as one file: all is in it, nothing of a record gets out of its text, and its scripts fit together."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from doll.dashboard.saved_page import MAX_ROWS, bundle, save_page, save_panels, save_run
from doll.monitor.views.page import page
from doll.monitor.views.panels import line, panel
from page_feed import MadeUpJob

pytestmark = pytest.mark.slow  # the made-up job has a server's modules

HOSTILE = "no JSON: </script><script>alert(1)</script><!-- \u202e end"
SCRIPT = re.compile(r"<(script|style)([^>]*)>(.*?)</\1>", re.DOTALL)


def parts(path: Path) -> list[tuple[str, str, str]]:
    """Of a saved page: each element of script or style with its attributes and its text."""
    return SCRIPT.findall(path.read_text())


def state_of(path: Path) -> dict[str, Any]:
    (text,) = [text for _, attributes, text in parts(path) if "application/json" in attributes]
    state: dict[str, Any] = json.loads(text)
    return state


@pytest.fixture
def saved(tmp_path: Path) -> tuple[MadeUpJob, Path]:
    made_up = MadeUpJob()
    made_up.run(20)
    made_up.refuse(130, HOSTILE, b"</script><b>not json</b>")
    made_up.decide("slot 3: launch incarnation 2 on_demand (cover): i-0003")
    path = tmp_path / "report.html"
    made_up.read(lambda state: save_run(state, path))
    return made_up, path


def test_the_state_is_that_of_the_live_page_with_what_a_click_opens(saved: tuple[MadeUpJob, Path]) -> None:
    made_up, path = saved
    state = state_of(path)
    live = json.loads(json.dumps(made_up.read(page)))
    assert state["questions"] == live["questions"]
    assert state["curves"] == live["curves"]
    assert {target.partition("/")[0] for target in state["details"]} == {
        "worker", "update", "letter", "decision", "version",
    }  # fmt: skip
    assert state["details"]["letter/0-130"]["title"] == "Dead letter of partition 0, offset 130"
    assert all(len(item["rows"]) <= MAX_ROWS for item in state["details"].values())


def test_what_a_record_says_stays_text(saved: tuple[MadeUpJob, Path]) -> None:
    text = saved[1].read_text()
    assert "alert(1)</script>" not in text
    assert text.count("<!--") == 0
    shown = state_of(saved[1])["lists"]["letters"]["0-130"]
    assert shown == HOSTILE.replace("\u202e", "\\u202e")


def test_only_the_scripts_and_styles_of_the_page_count(saved: tuple[MadeUpJob, Path]) -> None:
    text = saved[1].read_text()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.+?)"', text)
    digests = {
        f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'"
        for _, attributes, body in parts(saved[1])
        if "application/json" not in attributes
    }
    assert len(digests) == 4
    assert set(re.findall(r"'sha256-.+?'", policy)) == digests
    assert policy.startswith("default-src 'none'; ")
    assert not re.findall(r"""(?:src|href)=["'](?!data:|\.\./)""", SCRIPT.sub("", text)), "nothing is fetched"


@pytest.mark.parametrize("module", ["page.js", "runs.js", "panels_page.js"])
def test_the_modules_of_a_page_fit_into_one_script(module: str) -> None:
    script = bundle(module)
    names = re.findall(r"^(?:const|let|class|function|async function) (\w+)", script, re.MULTILINE)
    assert len(names) == len(set(names)) > 5
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE)


def test_charts_alone_are_a_page_too(tmp_path: Path) -> None:
    shown = [panel("Spent", "hours", "USD", line("spent", [0, 1], [0, 2]))]
    save_panels("Plan", "64 workers", shown, tmp_path / "plan.html")
    assert state_of(tmp_path / "plan.html") == {"name": "Plan", "headline": "64 workers", "panels": shown}


def test_a_page_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        save_page("runs", {}, tmp_path / "file" / "comparison.html")
