"""Which module imports which, read from the source: nothing is imported, so nothing is started.

Both the layer test and the choice of the fast tests ask it.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class When(Enum):
    """When an import statement runs."""

    LOAD = "load"  # with its module
    CALL = "call"  # in a function's body
    TYPING = "typing"  # for the type checker alone


@dataclass(frozen=True)
class Import:
    """One imported name: `from a import b` is both `a` and `a.b`, as `b` may be a module."""

    name: str
    line: int
    when: When


@dataclass(frozen=True)
class Module:
    """One source file, its imports in the order of the file and its length."""

    name: str
    path: Path
    imports: tuple[Import, ...]
    num_lines: int


class ImportGraph:
    """The modules of some folders and the imports between them.

    Args:
        folders: package name (`""` for modules that are imported by their bare names) -> its folder.
    """

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self.modules: dict[str, Module] = {}
        for package, folder in folders.items():
            for path in sorted(folder.rglob("*.py")):
                parts = [package] if package else []
                parts += path.relative_to(folder).with_suffix("").parts
                if parts[-1] == "__init__":
                    parts.pop()
                name = ".".join(parts)
                self.modules[name] = read_module(name, path)

    def targets(self, module: Module) -> Iterator[tuple[str, Import]]:
        """The modules of this graph that `module` imports by name: the most specific ones, without their parents."""
        names = {imported.name for imported in module.imports}
        for imported in module.imports:
            if imported.name in self.modules and imported.name != module.name:
                by_parts = imported.name + "."
                if not any(name.startswith(by_parts) and name in self.modules for name in names):
                    yield imported.name, imported

    def edges(self, *, at_calls: bool = True, for_typing: bool = False) -> dict[str, dict[str, Import]]:
        """Module -> the modules that it imports, with the first statement that does."""
        edges: dict[str, dict[str, Import]] = {}
        for name, module in self.modules.items():
            edges[name] = {}
            for target, imported in self.targets(module):
                if (imported.when is When.CALL and not at_calls) or (imported.when is When.TYPING and not for_typing):
                    continue
                edges[name].setdefault(target, imported)
        return edges

    def chains(self, start: Module, *, at_calls: bool = False) -> dict[str, tuple[str, ...]]:
        """Everything that is loaded with `start`, of this graph or not: name -> the modules on the way to it.

        A module's parents are loaded before it. `at_calls` adds what functions import when they are called; those of
        modules that are only parents of what was named are not called.
        """
        chains: dict[str, tuple[str, ...]] = {}
        queue: deque[tuple[Module, tuple[str, ...], bool]] = deque([(start, (start.name,), at_calls)])
        expanded: set[tuple[str, bool]] = {(start.name, at_calls)}
        while queue:
            module, chain, calls = queue.popleft()
            named = {name for name, _ in self.targets(module)}
            for imported in module.imports:
                if imported.when is When.TYPING or (imported.when is When.CALL and not calls):
                    continue
                for name in with_parents(imported.name):
                    chains.setdefault(name, chain)
                    step = (name, at_calls and name in named)
                    if name in self.modules and step not in expanded:
                        expanded.add(step)
                        queue.append((self.modules[name], (*chain, name), step[1]))
        return chains


def read_module(name: str, path: Path) -> Module:
    text = path.read_text()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return Module(name, path, tuple(_imports(ast.parse(text, str(path)), package)), len(text.splitlines()))


def with_parents(name: str) -> list[str]:
    """`a.b.c` -> `a`, `a.b`, `a.b.c`."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def cycles(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other, each sorted (Tarjan's strongly connected components of two and more)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in edges.get(node, ()):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                groups.append(sorted(group))

    for node in edges:
        if node not in index:
            visit(node)
    return sorted(groups)


def _imports(node: ast.AST, package: str, when: When = When.LOAD) -> Iterator[Import]:
    for child in _statements(node):
        now = when
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and when is When.LOAD:
            now = When.CALL
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            now = When.TYPING
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, now)
        elif isinstance(child, ast.ImportFrom):
            base = _absolute(child, package)
            yield Import(base, child.lineno, now)
            for alias in child.names:
                yield Import(f"{base}.{alias.name}", child.lineno, now)
        yield from _imports(child, package, now)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """What stands in the blocks of a statement; expressions hold no import."""
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        children = getattr(node, block, None)
        if isinstance(children, list):
            yield from children


def _absolute(statement: ast.ImportFrom, package: str) -> str:
    if not statement.level:
        return statement.module or ""
    parts = package.split(".")
    base = parts[: len(parts) - statement.level + 1]
    return ".".join([*base, statement.module] if statement.module else base)
