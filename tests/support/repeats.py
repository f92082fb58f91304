"""Runs of equal lines in the bodies of functions of several files: logic that stands in two places."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


def repeats(paths: Iterable[Path], num_lines: int) -> list[str]:
    """Places whose functions share more than `num_lines` lines in a row, as "file:line ~ file:line".

    The lines are as `ast.unparse` writes them: layout, comments and docstrings do not count, names do.
    """
    first: dict[tuple[str, ...], tuple[Path, Function]] = {}
    places: dict[tuple[Path, int, Path, int], str] = {}
    for path in paths:
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, Function):
                continue
            lines = _lines(function)
            for i in range(len(lines) - num_lines):
                other_path, other = first.setdefault(tuple(lines[i : i + num_lines + 1]), (path, function))
                if not (other_path == path and _holds(other, function)):
                    place = (other_path, other.lineno, path, function.lineno)
                    places.setdefault(place, f"{other_path}:{other.lineno} ~ {path}:{function.lineno}")
    return sorted(places.values())


def _lines(function: Function) -> list[str]:
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return "\n".join(ast.unparse(statement) for statement in body).splitlines()


def _holds(outer: Function, inner: Function) -> bool:
    """Whether `inner` stands in `outer`, or is it: the same lines, seen twice."""
    return outer.lineno <= inner.lineno <= (outer.end_lineno or 0)
