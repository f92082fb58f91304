"""A real Chromium, driven by its own chromedriver, without a window."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

AXE: Final = "axe-core@4.10.3"
_NPM_S: Final = 120


@contextmanager
def chromium(profile: Path) -> Iterator[Any]:
    """A selenium driver; the test is skipped where there is no browser."""
    binary, driver_path = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver_path is None:
        pytest.skip("no chromium and chromedriver (Debian: apt-get install chromium chromium-driver)")
    webdriver: Any = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    # Without a sandbox, since tests may run as root in a container; the only pages are our own.
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-first-run",
        "--disable-background-networking", "--hide-scrollbars", f"--user-data-dir={profile}",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(driver_path)
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield driver
    finally:
        driver.quit()


def resize(driver: Any, width: int, height: int) -> None:
    """The size of what a page has for itself, without the browser's own bars."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def prefer(driver: Any, scheme: str) -> None:
    """`light` or `dark`."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def console_errors(driver: Any) -> list[str]:
    """What the browser has complained about since the last call."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def memory(driver: Any) -> tuple[float, float]:
    """Bytes of live JavaScript objects, and the number of nodes of documents, after a collection."""
    driver.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
    driver.execute_cdp_cmd("Performance.enable", {})
    metrics = {item["name"]: item["value"] for item in driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]}
    return metrics["JSHeapUsedSize"], metrics["Nodes"]


def axe_source(cache: Path) -> str:
    """The checker of accessibility, by npm; the test is skipped where it cannot be fetched."""
    kept = cache / f"{AXE}.js"
    if not kept.exists():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("no npm, by which axe-core is fetched")
        try:
            done = subprocess.run(
                [npm, "pack", AXE, "--json", "--pack-destination", str(cache)],
                capture_output=True,
                text=True,
                timeout=_NPM_S,
            )
        except subprocess.TimeoutExpired:
            pytest.skip("npm does not answer: axe-core cannot be fetched")
        if done.returncode:
            pytest.skip(f"npm cannot fetch {AXE}: {done.stderr[-300:]}")
        with tarfile.open(cache / json.loads(done.stdout)[0]["filename"]) as archive:
            file = archive.extractfile("package/axe.min.js")
            assert file is not None
            kept.write_bytes(file.read())
    return kept.read_text(encoding="utf-8")


def serious_findings(driver: Any, axe: str) -> list[str]:
    """What axe finds wrong with the page, if it is serious or critical."""
    driver.execute_script(axe)
    violations = driver.execute_async_script(
        "const done = arguments[0];"
        "axe.run(document).then((result) => done(result.violations), (error) => done(String(error)));"
    )
    assert isinstance(violations, list), violations
    return [
        f"{item['id']}: {item['help']}: {[node['target'] for node in item['nodes']][:3]}"
        for item in violations
        if item["impact"] in ("serious", "critical")
    ]
