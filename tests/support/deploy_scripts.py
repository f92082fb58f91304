"""Scripts of deploy/ as modules."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from paths import ROOT


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"deploy_{name}", ROOT / "deploy" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
