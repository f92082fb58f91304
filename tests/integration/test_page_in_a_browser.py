"""The page in a real Chromium: what it shows, to whom, and that it stays small.

`DOLL_PAGE_OUT=FOLDER` keeps pictures of it, and in `figures.txt` how fast it was.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from browser import axe_source, chromium, console_errors, memory, prefer, resize, serious_findings
from doll.dashboard.model_server import WithModelServer
from doll.dashboard.runs_folder import RunsFolder
from doll.dashboard.saved_page import save_run
from doll.monitor.state.watched_job import ProcessEvent
from doll.monitor.views.panels import staleness_panel
from doll.records.control import Finished
from doll.serving.metrics import ServeMetrics
from page_feed import MadeUpJob, leave_run, served
from waiting import until

pytestmark = pytest.mark.integration

LAPTOP = (1366, 650)  # 768 lines, of which the system and the browser's bars take some
TWO_FRAMES = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()));"
TEXT = "return document.querySelector(arguments[0])?.textContent ?? ''"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture
def made_up() -> MadeUpJob:
    """A job with a provisioner after two minutes, with some trouble behind it."""
    made_up = MadeUpJob()
    made_up.run(40)
    made_up.kill(3)
    made_up.refuse(130, "no JSON: Expecting value: line 1 column 1 (char 0)", b"\x00<b>not json</b>")
    made_up.run(60)
    made_up.decide("slot 3: launch incarnation 2 on_demand (to on-demand: spot is down): i-0003")
    made_up.run(20)
    made_up.status(dead_reasons=(("no JSON: Expecting value: line 1 column 1 (char 0)", 1),))
    return made_up


def show(driver: Any, port: int, *, size: tuple[int, int] = LAPTOP, scheme: str = "light") -> None:
    resize(driver, *size)
    prefer(driver, scheme)
    driver.get("about:blank")
    console_errors(driver)  # of an earlier page, whose server has ended
    driver.get(f"http://127.0.0.1:{port}/")
    until(lambda: driver.execute_script("return document.body.dataset.ready"), "the state", 60)


def text(driver: Any, selector: str) -> str:
    return str(driver.execute_script(TEXT, selector))


def has_text(driver: Any, selector: str, start: str) -> bool:
    return text(driver, selector).startswith(start)


def keep_picture(driver: Any, name: str) -> None:
    if folder := os.environ.get("DOLL_PAGE_OUT"):
        driver.execute_async_script(TWO_FRAMES)  # the second one begins when the first one has been drawn
        driver.save_screenshot(str(Path(folder) / f"{name}.png"))


def keep_figure(name: str, *values: float) -> None:
    if folder := os.environ.get("DOLL_PAGE_OUT"):
        with (Path(folder) / "figures.txt").open("a") as file:
            file.write(f"{name}: {', '.join(f'{value:.4g}' for value in values)}\n")


def test_four_questions_fit_a_laptop_and_news_come(driver: Any, made_up: MadeUpJob) -> None:
    with served(made_up, every_s=1.0) as port:
        show(driver, port)
        assert text(driver, "#name") == "clicks"
        assert text(driver, "#state") == "running"
        assert text(driver, "#learning .verdict").startswith("✔yes: held-out accuracy 0.93")
        assert text(driver, "#progress .verdict") == "✔yes: expected end 4:22 of 5:00"
        assert text(driver, "#safety .verdict") == "▲yes, but 1 record could not be learned"
        assert text(driver, "#work .verdict") == "▲7 of 8 workers are live"
        lowest = driver.execute_script(
            "const bottom = (item) => item.getBoundingClientRect().bottom;"
            "return Math.max(...[...document.querySelectorAll('.question')].map(bottom))"
        )
        assert lowest <= LAPTOP[1], "without scrolling"
        keep_picture(driver, "page")
        made_up.kill(5)
        made_up.run(1)
        began_s = time.monotonic()
        until(lambda: "worker 5: gone" in text(driver, "#events"), "the event", 30)
        keep_figure("event_shown_after_s", time.monotonic() - began_s)
        assert text(driver, "#work .verdict") == "▲6 of 8 workers are live"
        assert console_errors(driver) == []


def test_a_click_and_a_key_open_a_record(driver: Any, made_up: MadeUpJob) -> None:
    from selenium.webdriver.common.keys import Keys

    with served(made_up) as port:
        show(driver, port)
        for target, title, said in (
            ("worker/2", "Worker 2", "control link"),
            ("update/480", "Update 480", "offsets"),
            ("letter/0-130", "Dead letter of partition 0, offset 130", "<b>not json</b>"),
            ("decision/1", "Decision 1 of the provisioner", "spot is cheaper"),
            ("version/480", "Version 480", "held-out loss"),
        ):
            button = driver.find_element("css selector", f'button[data-open="{target}"]')
            driver.execute_script("arguments[0].focus()", button)
            if target.startswith("worker"):
                button.send_keys(Keys.ENTER)
            else:
                driver.execute_script("arguments[0].click()", button)
            until(partial(has_text, driver, "#detail-title", title), title, 30)
            assert said in text(driver, "#detail")
            if target.startswith("update"):
                keep_picture(driver, "update")
            driver.find_element("css selector", "#detail-close").send_keys(Keys.ESCAPE)
            until(
                lambda: not driver.execute_script("return document.getElementById('detail').open"), "Esc closes it", 30
            )
        worker = driver.find_element("css selector", 'button[data-open="worker/2"]')
        worker.send_keys(Keys.ARROW_DOWN)
        assert driver.execute_script("return document.activeElement.dataset.open") == "worker/3"
        lag = driver.find_element("xpath", "//th/button[text()='lag']")
        lag.click()
        shown = [float(row.text or 0) for row in driver.find_elements("css selector", "#workers td.lag")]
        assert shown == sorted(shown, reverse=True)
        assert console_errors(driver) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_keeps_people_out(driver: Any, made_up: MadeUpJob, scheme: str, pytestconfig: pytest.Config) -> None:
    assert pytestconfig.cache is not None
    axe = axe_source(pytestconfig.cache.mkdir("axe"))
    with served(made_up) as port:
        show(driver, port, scheme=scheme)
        assert serious_findings(driver, axe) == []
        keep_picture(driver, scheme)
        driver.execute_script("document.querySelector('button[data-open=\"update/480\"]').click()")
        until(lambda: text(driver, "#detail-title") == "Update 480", "the dialog", 30)
        assert serious_findings(driver, axe) == []
        show(driver, port, size=(400, 800), scheme=scheme)
        assert serious_findings(driver, axe) == []
        assert driver.execute_script("return document.documentElement.scrollWidth") <= 400
        keep_picture(driver, f"narrow-{scheme}")


def test_a_saved_page_needs_no_server_and_runs_no_text_of_a_record(
    driver: Any, made_up: MadeUpJob, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    assert pytestconfig.cache is not None
    hostile = "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"
    made_up.refuse(131, hostile, b"")
    shown = [
        {
            "title": "Worker 0, measured",
            "rows": [["stage 0", [[0.0, 0.5, "F", "1"], [0.5, 1.0, "B", "1"]]]],
            "end": 1.0,
        },
        staleness_panel({"reads": {-1: 3, 0: 1}}, bars=True),
    ]
    path = tmp_path / "report.html"
    made_up.read(lambda state: save_run(state, path, shown))
    resize(driver, *LAPTOP)
    prefer(driver, "light")
    driver.get("about:blank")
    console_errors(driver)
    driver.get(path.as_uri())
    assert driver.execute_script("return document.body.dataset.ready") == "true"
    assert text(driver, "#learning .verdict").startswith("✔yes: held-out accuracy 0.93")
    assert hostile in text(driver, "#letters")
    assert driver.title.startswith("clicks: ")
    assert driver.execute_script("return document.querySelectorAll('#panels canvas').length") == 2
    driver.execute_script("document.querySelector('button[data-open=\"update/480\"]').click()")
    until(lambda: text(driver, "#detail-title") == "Update 480", "the dialog", 30)
    assert console_errors(driver) == []
    assert serious_findings(driver, axe_source(pytestconfig.cache.mkdir("axe"))) == []
    keep_picture(driver, "saved")


def test_the_market_and_the_model_server_are_shown_where_there_are_some(
    driver: Any, made_up: MadeUpJob, pytestconfig: pytest.Config
) -> None:
    metrics = ServeMetrics("clicks", 1)
    both = WithModelServer(made_up, lambda: metrics.page().decode())
    for second in range(30):
        for request in range(40):
            metrics.answered(200, 0.001 + 0.0003 * ((request + second) % 7))
        both.look(second)
    with served(both) as port:
        show(driver, port)
        assert "1,200" in text(driver, "#served .facts")
        assert pytestconfig.cache is not None
        assert serious_findings(driver, axe_source(pytestconfig.cache.mkdir("axe"))) == []
        assert text(driver, "#market-title") == "The market"
        assert "5 spot, 3 on-demand, of 8" in text(driver, "#market .facts")
        shown = driver.find_element("css selector", "#timeline canvas").size
        assert shown["width"] > 200
        assert shown["height"] > 100
        driver.execute_script("document.getElementById('market').scrollIntoView()")
        keep_picture(driver, "market")
        assert console_errors(driver) == []


def test_runs_stand_side_by_side_and_a_click_opens_one(
    driver: Any, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    for seed, policy in enumerate(("bsp", "asp", "doll")):
        made_up = MadeUpJob(4, members=seed + 1, seed=seed)
        made_up.run(60)
        leave_run(made_up, tmp_path / policy)
    with served(RunsFolder(tmp_path)) as port:
        show(driver, port)
        assert [row.text for row in driver.find_elements("css selector", "#runs a")] == ["bsp", "asp", "doll"]
        assert "held-out" in text(driver, "#seconds-title")
        keep_picture(driver, "runs")
        assert pytestconfig.cache is not None
        assert serious_findings(driver, axe_source(pytestconfig.cache.mkdir("axe"))) == []
        driver.find_element("link text", "asp").click()
        until(partial(has_text, driver, "#state", "ended"), "the page of the run", 30)
        driver.find_element("link text", "all runs").click()
        until(partial(has_text, driver, "#runs-title", "Runs"), "the runs again", 30)
        assert console_errors(driver) == []


def test_a_page_says_how_old_it_is(driver: Any, made_up: MadeUpJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process stands still, without a connection that breaks; later its server ends."""
    with served(made_up) as port:
        show(driver, port)
        with made_up.paused():
            driver.execute_script("const now = Date.now; Date.now = () => now() + 35_000")
            until(partial(has_text, driver, "#state", "not connected: what is shown is"), "the header", 30)
            for question in ("learning", "progress", "safety", "work"):
                until(partial(has_text, driver, f"#{question} .verdict", "…"), question, 30)
                assert " s ago: " in text(driver, f"#{question} .verdict")
            keep_picture(driver, "old")
        until(partial(has_text, driver, "#state", "running"), "the page goes on", 30)
        assert text(driver, "#work .verdict") == "▲7 of 8 workers are live"
    until(partial(has_text, driver, "#state", "not connected: what is shown is"), "the server is away", 30)
    console_errors(driver)  # that it cannot connect
    with served(made_up) as port:
        show(driver, port)
        made_up.feed(Finished(term=1, version=480, reason="updates: 480 reached", time_s=made_up.now_s))
        until(partial(has_text, driver, "#state", "ended: updates"), "the end", 30)
    until(lambda: console_errors(driver), "the connection to break", 30)
    assert text(driver, "#state") == "ended: updates: 480 reached", "what has ended does not get old"


def test_a_long_text_takes_two_lines_and_a_phone_shows_lag_and_note(driver: Any, made_up: MadeUpJob) -> None:
    reason = "no JSON: " + 40 * "expected a value of the field age and got a list of lists "
    made_up.watched.note(ProcessEvent(made_up.now_s, reason))
    made_up.refuse(131, reason)
    with served(made_up) as port:
        for size in (LAPTOP, (400, 800)):
            show(driver, port, size=size)
            height = "return document.querySelector(arguments[0]).getBoundingClientRect().height"
            assert driver.execute_script(height, "#events details") < 45
            assert driver.execute_script(height, "#letters td:last-child") < 45
        for name in ("lag", "note"):
            box = driver.execute_script(
                f"const box = document.querySelector('#workers th.{name}').getBoundingClientRect();"
                "return [box.left, box.right]"
            )
            assert 0 < box[0] < box[1] <= 400, name
        keep_picture(driver, "phone")
        driver.execute_script("document.querySelector('#events summary').click()")
        assert driver.execute_script(height, "#events details") > 100


def test_it_is_small(driver: Any, made_up: MadeUpJob) -> None:
    paints, sizes = [], []
    with served(made_up) as port:
        for _ in range(3):  # of a machine that does other things
            driver.execute_cdp_cmd("Network.clearBrowserCache", {})
            show(driver, port)
            paints.append(
                driver.execute_script(
                    "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 1e9"
                )
            )
            sizes.append(
                driver.execute_script(
                    "const loaded = (kind) => performance.getEntriesByType(kind);"
                    "return [...loaded('resource'), ...loaded('navigation')]"
                    ".reduce((sum, item) => sum + item.transferSize, 0)"
                )
            )
    keep_figure("first_paint_ms", *paints)
    keep_figure("loaded_bytes", *sizes)
    assert 50_000 < max(sizes) < 300_000


def test_after_an_hour_it_is_as_small_as_after_ten_minutes(driver: Any) -> None:
    made_up = MadeUpJob()
    made_up.run(600)
    with served(made_up, every_s=0.05) as port:
        show(driver, port)
        used = []
        for minute in range(10, 61):
            made_up.run(60)
            shown = f"{made_up.watched.progress.history.version:,}"
            until(partial(has_text, driver, "#doing", shown), shown, 30)
            if minute in (10, 60):
                used.append(memory(driver))
        first, last = used[0], used[-1]
        keep_figure("heap_bytes_and_nodes", *first, *last)
        assert last[0] < first[0] + 1_000_000
        assert last[1] < first[1] + 500
        assert console_errors(driver) == []


def test_a_thousand_workers_are_no_burden_for_a_browser(driver: Any) -> None:
    made_up = MadeUpJob(1_000, members=250)
    made_up.run(5)
    with served(made_up) as port:
        show(driver, port)
        assert text(driver, "#work .verdict") == "✔1,000 of 1,000 workers are live"
        assert driver.execute_script("return document.querySelectorAll('#workers tbody tr').length") < 60
        driver.execute_script("document.getElementById('workers-place').scrollTop = 1e9")
        until(lambda: driver.find_elements("css selector", 'button[data-open="worker/999"]'), "the last row", 30)
        began_s = time.monotonic()
        made_up.kill(999)
        made_up.run(1)
        until(lambda: "gone" in text(driver, "#workers tr.gone"), "the change", 30)
        keep_figure("worker_of_1000_shown_after_s", time.monotonic() - began_s)
        keep_picture(driver, "thousand")
        assert console_errors(driver) == []
