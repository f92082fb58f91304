"""Runs side by side as plain values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from doll.monitor.state.policy_summary import PolicySummary
from doll.monitor.views.comparison import Comparison, LossCurve, PolicyRun, comparison_page
from doll.records.control import Measures


def run(label: str, *losses: float, outcome: str = "updates: reached", ok: bool = True) -> PolicyRun:
    steps = np.arange(len(losses), dtype=np.float64)
    curve = LossCurve(seconds=steps, samples=8 * steps, versions=steps, loss=np.array(losses))
    return PolicyRun(label, outcome, ok, seconds=3.0, samples=24, updates=len(losses), losses={"held-out": curve})


def test_a_column_of_which_nothing_is_known_is_left_out() -> None:
    shown = comparison_page(Comparison("x", [run("bsp", 3.0, 2.0), run("asp", 4.0, 1.0)]))
    assert shown["columns"] == [
        "policy", "time to loss", "samples to loss", "time", "samples", "updates", "loss", "outcome",
    ]  # fmt: skip
    assert shown["target"] == 2.0
    assert shown["curves"]["asp"]["samples"] == {"0": [0.0, 4.0], "1": [8.0, 1.0]}
    assert shown["runs"]["bsp"]["tone"] == "good"


def test_without_a_run_there_is_a_page_too() -> None:
    shown = comparison_page(Comparison("x", (), wanted=["bsp"]))
    assert (shown["headline"], shown["runs"], shown["missing"]) == ("no run yet", {}, ["bsp"])


def test_of_an_error_the_first_line_is_shown() -> None:
    shown = comparison_page(Comparison("x", [run("bsp", outcome="ps failed; its log:\n a()", ok=False)]))
    assert (shown["runs"]["bsp"]["tone"], shown["runs"]["bsp"]["cells"][-1]) == ("bad", "ps failed; its log:")


def test_the_staleness_of_those_that_measured_it_is_a_chart() -> None:
    summary = PolicySummary.total([Measures(staleness={-1: 3, 0: 1})])
    shown = comparison_page(Comparison("x", [replace(run("ssp", 2.0), summary=summary), run("asp", 2.0)]))
    (staleness,) = shown["panels"]
    assert staleness["lines"] == [{"label": "ssp", "x": [-1.0, 0.0], "y": [75.0, 25.0], "style": "line"}]
    assert comparison_page(Comparison("x", [run("asp", 2.0)]))["panels"] == []


def test_each_run_of_several_seeds_has_a_row_and_the_sentence_is_below() -> None:
    runs = [replace(run(label, 3.0, loss + seed), folder=f"runs/{label}-{seed}", seed=seed)
            for seed in (0, 1) for label, loss in (("bsp", 2.0), ("asp", 1.0))]  # fmt: skip
    comparison = Comparison("x", runs, wanted=["bsp", "asp"], seeds=(0, 1))
    shown = comparison_page(comparison)
    assert [row["label"] for row in shown["runs"].values()] == [
        "bsp (seed 0)", "asp (seed 0)", "bsp (seed 1)", "asp (seed 1)",
    ]  # fmt: skip
    assert shown["conclusion"] == comparison.conclusion()
    assert shown["conclusion"].startswith("best: by held-out loss asp (1.5 ± 0.5; more than noise)")
