"""Measure the structure of the code: `python scripts/structure.py [FOLDER]` prints a table for a checkout.

The figures that `tests/test_layout.py` checks: files a folder, circles, imports inside functions, long functions.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("jobs", "kalman")
LONGEST = 60
MOST_PARAMETERS = 8


def sources(root: Path, package: str) -> list[Path]:
    """Return the Python files of a package."""
    return sorted((root / package).rglob("*.py"))


def module_of(root: Path, path: Path) -> str:
    """Return the dotted name of a file."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function and method of a file."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def imports_in_functions(path: Path) -> list[int]:
    """Return the lines of a file that import inside a function."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {
        node.lineno
        for function in functions(tree)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    return sorted(found)


def imported_on_import(path: Path) -> list[str]:
    """Return the modules that importing a file imports: at its top, those for types not counted."""
    found: list[str] = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
    return found


def long_functions(path: Path, longest: int = LONGEST) -> list[tuple[str, int]]:
    """Return the functions of a file that have more lines than `longest`, with their lines.

    The options that a `@command` or an `@answer` declares do not count: they are the help that a user reads.
    """
    found = []
    for one in functions(ast.parse(path.read_text(encoding="utf-8"))):
        first = one.body[0].lineno if is_command(one) else one.lineno
        count = (one.end_lineno or first) - first + 1
        if count > longest:
            found.append((one.name, count))
    return found


def is_command(one: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is a verb: its parameters are options that a user sees."""
    return any(isinstance(name, ast.Name) and name.id in ("command", "answer") for name in one.decorator_list)


def wide_functions(path: Path, most: int = MOST_PARAMETERS) -> list[tuple[str, int]]:
    """Return the functions of a file that have more parameters than `most`, `self` and `cls` not counted.

    The parameters of a `@command` or an `@answer` are a verb's options: their number is the user's, not the caller's.
    """
    found = []
    for one in functions(ast.parse(path.read_text(encoding="utf-8"))):
        if is_command(one):
            continue
        given = [*one.args.posonlyargs, *one.args.args, *one.args.kwonlyargs]
        count = len([each for each in given if each.arg not in ("self", "cls")])
        if count > most:
            found.append((one.name, count))
    return found


def import_graph(root: Path, packages: tuple[str, ...] = PACKAGES) -> dict[str, set[str]]:
    """Return which of our modules each of them imports, imports inside functions counted and those for types not."""
    known = {module_of(root, path): path for package in packages for path in sources(root, package)}
    graph: dict[str, set[str]] = {}
    for name, path in known.items():
        found: set[str] = set()
        waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                waiting.extend(node.orelse)
                continue
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                submodules = {f"{node.module}.{alias.name}" for alias in node.names} & set(known)
                found |= submodules or {node.module}
            waiting.extend(ast.iter_child_nodes(node))
        graph[name] = (found & set(known)) - {name}
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = [stack.pop()]
            while group[-1] != name:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def figures(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the measured figures of a checkout, each with its name."""
    for package in PACKAGES:
        files = sources(root, package)
        folders = Counter(path.parent.relative_to(root) for path in files)
        folder, most = folders.most_common(1)[0]
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
        yield f"{package}/: lines", f"{lines:,} in {len(files)} files"
        yield f"{package}/: files in the largest folder", f"{most} ({folder})"
    groups = circles(import_graph(root))
    yield "circles of files", f"{len(groups)} ({', '.join(str(len(group)) for group in groups)} files)"
    inside = {path: imports_in_functions(path) for package in PACKAGES for path in sources(root, package)}
    inside = {path: lines for path, lines in inside.items() if lines}
    rooms = [path for path in inside if len(path.relative_to(root).parts) > 2]
    yield "imports inside functions", f"{sum(map(len, inside.values()))} in {len(inside)} files"
    yield "  of these in rooms", f"{sum(len(inside[path]) for path in rooms)} in {len(rooms)} files"
    longer = [one for package in PACKAGES for path in sources(root, package) for one in long_functions(path)]
    yield f"functions over {LONGEST} lines", str(len(longer))
    wider = [one for package in PACKAGES for path in sources(root, package) for one in wide_functions(path)]
    yield f"functions over {MOST_PARAMETERS} parameters", str(len(wider))


if __name__ == "__main__":
    for name, value in figures(Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()):
        print(f"{name:<42}{value}")
