"""The rules of the package layout, as functions from an import graph to what breaks them.

Each rule returns one line for each violation; tests/unit/test_layers.py holds the rules' tables for doll.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

from import_graph import Import, ImportGraph, Module, When, cycles, with_parents

# Calls that read or write files: of builtins, and of pathlib.Path by their names.
FILE_CALLS = {"open"}
FILE_METHODS = {
    "read_text", "read_bytes", "write_text", "write_bytes", "mkdir", "rmdir", "unlink", "touch", "iterdir", "exists",
    "is_file", "is_dir", "symlink_to", "hardlink_to", "chmod",
}  # fmt: skip


def package_of(name: str) -> str:
    """`doll.kafka.clients` -> `kafka`; a module at the top is a package of its own; empty for `doll` itself."""
    return name.split(".")[1] if "." in name else ""


def package_edges(graph: ImportGraph) -> Iterator[tuple[str, str, Import]]:
    """Importing module, imported module and statement of each import from one package into another.

    Those for the type checker alone count: they are knowledge of the other package too.
    """
    for name, targets in graph.edges(for_typing=True).items():
        for target, statement in targets.items():
            if package_of(name) != package_of(target):
                yield name, target, statement


def wrong_direction(graph: ImportGraph, order: Sequence[Sequence[str]]) -> list[str]:
    """Imports of packages that stand beside or behind the importing one in `order`, and packages that it lacks."""
    rank = {package: i for i, packages in enumerate(order) for package in packages}
    packages = {package_of(name) for name in graph.modules} - {""}
    problems = [f"{package}: has no place in the order of packages" for package in sorted(packages - rank.keys())]
    for name, target, _ in package_edges(graph):
        importer, imported = package_of(name), package_of(target)
        if importer in rank and imported in rank and rank[imported] >= rank[importer]:
            problems.append(f"{name} -> {target}")
    return sorted(problems)


def impure(graph: ImportGraph, pure: Sequence[str], forbidden: Sequence[str]) -> list[str]:
    """Pure modules that import what is forbidden, themselves or through other modules, or that touch files.

    Imports in functions count, at every step.

    Args:
        pure: names of modules; `a.b.*` names all of a package.
        forbidden: modules and packages of the standard library and of vendors.
    """
    problems = []
    for module in matching(graph, pure):
        chains = graph.chains(module, at_calls=True)
        for name in forbidden:
            if name in chains:
                problems.append(f"{' -> '.join((*chains[name], name))}")
        problems += [f"{module.name}: {call}" for call in file_calls(module)]
    return sorted(problems)


def matching(graph: ImportGraph, patterns: Sequence[str]) -> list[Module]:
    """The modules that `patterns` name.

    Raises:
        ValueError: a pattern names none: it is out of date.
    """
    modules: dict[str, Module] = {}
    for pattern in patterns:
        package = pattern.removesuffix(".*")
        names = [
            name
            for name in graph.modules
            if name == package or (pattern.endswith(".*") and name.startswith(f"{package}."))
        ]
        if not names:
            raise ValueError(f"expected modules of the name {pattern}, got none: correct the list")
        modules |= {name: graph.modules[name] for name in names}
    return list(modules.values())


def file_calls(module: Module) -> list[str]:
    """Calls in `module` that read or write files."""
    calls = []
    for node in ast.walk(ast.parse(module.path.read_text())):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in FILE_CALLS:
                calls.append(f"{node.func.id}()")
            elif isinstance(node.func, ast.Attribute) and node.func.attr in FILE_METHODS:
                calls.append(f".{node.func.attr}()")
    return sorted(set(calls))


def vendors_outside(graph: ImportGraph, adapters: Mapping[str, Sequence[str]]) -> list[str]:
    """Modules that import a vendor's package and are none of its adapters.

    Args:
        adapters: vendor's package -> names of modules; `a.b.*` names all of a package.
    """
    problems = []
    for vendor, patterns in adapters.items():
        allowed = {module.name for module in matching(graph, patterns)}
        for name, module in graph.modules.items():
            if name not in allowed and any(vendor in with_parents(statement.name) for statement in module.imports):
                problems.append(f"{name} -> {vendor}")
    return sorted(problems)


def module_cycles(graph: ImportGraph) -> list[str]:
    """Groups of modules that import each other; imports in functions count."""
    return [", ".join(group) for group in cycles(graph.edges())]


def package_cycles(graph: ImportGraph) -> list[str]:
    """Groups of packages that import each other; imports in functions and for the type checker count."""
    edges: dict[str, set[str]] = {}
    for name, target, _ in package_edges(graph):
        if package_of(name) and package_of(target):
            edges.setdefault(package_of(name), set()).add(package_of(target))
    return [", ".join(group) for group in cycles({name: sorted(targets) for name, targets in sorted(edges.items())})]


def hidden_imports(graph: ImportGraph, heavy: Sequence[str], allowed: Sequence[str]) -> list[str]:
    """Imports in functions of modules that load nothing heavy, and so belong at the top of the importing module.

    Args:
        heavy: packages that take long to load, or that need not be installed.
        allowed: importing modules where a function chooses what to load; `a.b.*` names all of a package.
    """
    exempt = {module.name for module in matching(graph, allowed)}
    problems = []
    for name, targets in graph.edges().items():
        for target, statement in targets.items():
            if statement.when is When.CALL and name not in exempt:
                loaded = graph.chains(graph.modules[target])
                if not any(package in loaded for package in heavy):
                    problems.append(f"{name} -> {target}")
    return sorted(problems)


def too_long(graph: ImportGraph, max_lines: int) -> list[str]:
    """Modules above `max_lines` lines."""
    return sorted(name for name, module in graph.modules.items() if module.num_lines > max_lines)
