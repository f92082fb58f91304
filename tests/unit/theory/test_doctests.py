"""Every example in the docstrings of the theory and of the pure provisioner modules is true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import doll.theory
import pytest

MODULES = sorted(f"doll.theory.{module.name}" for module in pkgutil.iter_modules(doll.theory.__path__))


@pytest.mark.parametrize("name", [*MODULES, "doll.provisioner.planning.estimators"])
def test_examples(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name))
    assert found.failed == 0
    if name.rpartition(".")[2] not in ("checks",):
        assert found.attempted > 0
