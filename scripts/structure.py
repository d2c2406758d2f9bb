"""Measure the structure of the code: `python scripts/structure.py [FOLDER] [--way]` prints a table for a checkout.

`tests/test_layout.py` holds some of the figures. What it exempts, such as commands, is counted, too. `--way` lands and
streams one CSV in a new warehouse, and counts the files of which a function runs between the row and its estimate.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGES = ("jobs", "kalman")
LONGEST = 60
MOST_PARAMETERS = 8
SHORT_FILE = 80
VERBS = frozenset(
    "abandon accept accumulate act add adopt advance allow answer append apply are ask await begin build can "
    "catch check choose clean climb close combine commit compact compare complete compose copy count create "
    "cut decide decode delete describe detach discard do draw drive drop encode end estimate evaluate execute "
    "exists expire explain export fill filter find finish fit fold forget gather get give group handle has "
    "hold import init interrupt is join judge keep know land launch learn leave lift list load lock look make "
    "map mark match maximise may measure meet merge migrate move need needs note observe offer open overwrite "
    "pack parse pin predict prepare promote prove prune publish put quote raise rank read record refuse reject "
    "release remember remove rename renew repartition repeat replace replay report request resolve restore "
    "resume retire retrain reverse round run save scale score search select send serve set settle ship show "
    "smooth solve sort split stamp start stop store stream sum sweep switch take tell train trigger try unpack "
    "update upgrade upsert vacuum verify wait wake walk warn weigh whiten work write yield".split()
)
"""Verbs that begin function names; a question (`is_live`) counts, too."""
TRACER = """
import os, sys, threading
seen = set()
def profile(frame, event, argument):
    if event == "call":
        name = frame.f_code.co_filename
        if name not in seen:
            if frame.f_code.co_name == "<module>":
                return
            seen.add(name)
            if name.startswith(os.environ["WAY_ROOT"]):
                with open(os.environ["WAY_FILE"], "a") as out:
                    out.write(name + chr(10))
sys.setprofile(profile)
threading.setprofile(profile)
"""
"""A `sitecustomize.py` by which each process records each file at the first call of one of its functions."""
WAY_SPEC = """{name: way, version: 1, key: [id], time: at, measurement: [level], states: [level],
process: {kind: random_walk, variance: 0.1}, observation: {R: [[1.0]]},
initial: {mean: [0.0], covariance: [[10.0]]}, stream: {partitions: 2}}
"""


def sources(root: Path, package: str) -> list[Path]:
    """Return the Python files of a package."""
    return sorted((root / package).rglob("*.py"))


def module_of(root: Path, path: Path) -> str:
    """Return the dotted name of a file."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


@cache
def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function and method of a file."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def imports_in_functions(path: Path) -> list[int]:
    """Return the lines of a file that import inside a function."""
    tree = parse(path)
    found = {
        node.lineno
        for function in functions(tree)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    return sorted(found)


def imported_on_import(path: Path) -> list[str]:
    """Return the modules that a file imports at its top, except those for types only."""
    found: list[str] = []
    for node in parse(path).body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
    return found


def long_functions(path: Path, longest: int = LONGEST, whole: bool = False) -> list[tuple[str, int]]:
    """Return the functions of a file that have more lines than `longest`, with their lines.

    The options that a `@command` or an `@answer` declares count only if `whole`: they are the help that a user reads.
    """
    found = []
    for one in functions(parse(path)):
        first = one.body[0].lineno if is_command(one) and not whole else one.lineno
        count = (one.end_lineno or first) - first + 1
        if count > longest:
            found.append((one.name, count))
    return found


def is_command(one: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is a verb: its parameters are options that a user sees."""
    names = [name.id for name in one.decorator_list if isinstance(name, ast.Name)]
    return bool({"command", "timed", "answer"}.intersection(names))


def wide_functions(path: Path, most: int = MOST_PARAMETERS, whole: bool = False) -> list[tuple[str, int]]:
    """Return the functions of a file that have more parameters than `most`, `self` and `cls` not counted.

    The parameters of a `@command` or an `@answer` count only if `whole`: they are a verb's options, which a user gives.
    """
    found = []
    for one in functions(parse(path)):
        if is_command(one) and not whole:
            continue
        given = [*one.args.posonlyargs, *one.args.args, *one.args.kwonlyargs]
        count = len([each for each in given if each.arg not in ("self", "cls")])
        if count > most:
            found.append((one.name, count))
    return found


def import_graph(
    root: Path, packages: tuple[str, ...] = PACKAGES, for_types: bool = False
) -> dict[str, set[str]]:
    """Return our modules that each of our modules imports, also inside functions; for_types: also for types alone."""
    known = {module_of(root, path): path for package in packages for path in sources(root, package)}
    graph: dict[str, set[str]] = {}
    for name, path in known.items():
        found: set[str] = set()
        waiting: list[ast.AST] = [parse(path)]
        while waiting:
            node = waiting.pop()
            if not for_types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
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


def code_lines(path: Path) -> int:
    """Return the lines of a file without blanks, comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    said: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            said.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(line.strip()) and line.lstrip()[0] != "#" and at not in said for at, line in lines)


def rooms_of(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the rooms of `jobs` that each room imports; verbs belong to no room."""
    rooms: dict[str, set[str]] = {}
    for name, others in graph.items():
        parts = name.split(".")
        if parts[0] == "jobs" and len(parts) > 2:
            far = {
                other.split(".")[1] for other in others if other.startswith("jobs.") and other.count(".") > 1
            }
            rooms.setdefault(parts[1], set()).update(far - {parts[1]})
    return rooms


def floors(rooms: dict[str, set[str]]) -> int:
    """Return the length of the longest chain of imports between rooms; a circle counts as one floor."""
    known: dict[str, int] = {}

    def floor(room: str, above: frozenset[str] = frozenset()) -> int:
        if room not in known:
            below = (rooms.get(room, set()) - above) - {room}
            known[room] = 1 + max((floor(other, above | {room}) for other in below), default=0)
        return known[room]

    return max(map(floor, rooms), default=0)


def verb_first(paths: list[Path]) -> float:
    """Return the share of functions and methods whose name begins with a verb; properties and `__x__` do not count."""
    found = []
    for path in paths:
        for one in functions(parse(path)):
            marks = {ast.unparse(mark).rpartition(".")[2] for mark in one.decorator_list}
            if not one.name.startswith("__") and not marks & {"property", "cached_property", "setter"}:
                found.append(one.name.lstrip("_").split("_")[0] in VERBS)
    return sum(found) / max(len(found), 1)


def repeated_classes(paths: list[Path]) -> list[str]:
    """Return the names shared by several classes."""
    trees = (parse(path) for path in paths)
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return sorted(name for name, count in names.items() if count > 1)


def taking(paths: list[Path], *parameters: str) -> int:
    """Return the number of functions with all of these parameters."""
    trees = (parse(path) for path in paths)
    taken = (
        {arg.arg for arg in [*one.args.args, *one.args.kwonlyargs]}
        for tree in trees
        for one in functions(tree)
    )
    return sum(set(parameters) <= names for names in taken)


def files_on_the_way(root: Path) -> tuple[int, int]:
    """Return the number of files that run between a CSV row and its estimate: in `ingest`, and in `stream`."""
    found: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "sitecustomize.py").write_text(TRACER)
        (place / "models").mkdir()
        (place / "models" / "way.yaml").write_text(WAY_SPEC)
        rows = [f"{key},2024-01-0{day}T00:00:00Z,{key + day}.5" for day in (1, 2) for key in range(4)]
        for number, part in enumerate((rows[:4], rows[4:]), 1):
            (place / f"{number}.csv").write_text("id,at,level\n" + "\n".join(part) + "\n")
        model = ("--model", "way")
        steps: list[tuple[bool, tuple[str, ...]]] = [
            (False, ("ingest", *model, "--input", "1.csv")),
            (False, ("pretrain", *model)),
            (True, ("ingest", *model, "--input", "2.csv")),
            (True, ("stream", *model)),
        ]
        for traced, words in steps:
            log = place / f"{len(found)}.files"
            paths = [str(place)] * traced + [str(root)]
            given = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "WAY_ROOT": str(root / "jobs"),
                "WAY_FILE": str(log),
                "KALMAN_WAREHOUSE": str(place / "warehouse"),
                "KALMAN_MODELS": str(place / "models"),
                "KALMAN_MASTER": "local[2]",
            }
            subprocess.run(
                [sys.executable, "-m", "jobs.cli", *words], cwd=place, env=given, check=True, stdout=2
            )
            if traced:
                found.append(len(set(log.read_text().splitlines())))
    return found[0], found[1]


def figures(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the measured figures of a checkout, each with its name."""
    for package in (*PACKAGES, "dags"):
        files = sources(root, package)
        folders = Counter(path.parent.relative_to(root) for path in files)
        folder, most = folders.most_common(1)[0]
        lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in files]
        yield f"{package}/: lines", f"{sum(lines):,} in {len(files)} files"
        yield "  of code", f"{sum(map(code_lines, files)):,}"
        yield f"  files under {SHORT_FILE} lines", str(sum(count < SHORT_FILE for count in lines))
        yield "  files in the largest folder", f"{most} ({folder})"
    yield "tests/: lines", f"{sum(len(path.read_text().splitlines()) for path in sources(root, 'tests')):,}"
    graph = import_graph(root)
    rooms = rooms_of(graph)
    yield "rooms of jobs/; floors", f"{len(rooms)}; {floors(rooms)}"
    yield (
        "circles of files",
        f"{len(circles(graph))}, {len(circles(import_graph(root, for_types=True)))} with types",
    )
    paths = [path for package in PACKAGES for path in sources(root, package)]
    every = [*paths, *sources(root, "dags")]
    inside = {path: lines for path in paths if (lines := imports_in_functions(path))}
    in_rooms = [path for path in inside if len(path.relative_to(root).parts) > 2]
    yield "imports inside functions", f"{sum(map(len, inside.values()))} in {len(inside)} files"
    yield "  of these in rooms", f"{sum(len(inside[path]) for path in in_rooms)} in {len(in_rooms)} files"
    long = sum(len(long_functions(path)) for path in every)
    longer = sum(len(long_functions(path, whole=True)) for path in every) - long
    yield f"functions over {LONGEST} lines", f"{long} + {longer} commands"
    wide = sum(len(wide_functions(path)) for path in every)
    wider = sum(len(wide_functions(path, whole=True)) for path in every) - wide
    yield f"functions over {MOST_PARAMETERS} parameters", f"{wide} + {wider} commands"
    yield "functions with warehouse and spec", str(taking(every, "warehouse", "spec"))
    yield "function names that begin with a verb", f"{verb_first(every):.0%}"
    yield "class names used twice or more", str(len(repeated_classes(every)))
    pages = [path for path in (root / "docs").rglob("*.md") if "decisions" not in path.parts]
    yield "words of docs/ without decisions", f"{sum(len(path.read_text().split()) for path in pages):,}"
    yield "decision records", str(len(list((root / "docs" / "decisions").glob("[0-9]*.md"))))


def main() -> None:
    """Print the figures of a checkout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=".", help="the checkout")
    parser.add_argument(
        "--way", action="store_true", help="count the files on the way of a CSV row, by running it"
    )
    given = parser.parse_args()
    root = Path(given.folder).resolve()
    for name, value in figures(root):
        print(f"{name:<42}{value}")
    if given.way:
        landed, streamed = files_on_the_way(root)
        print(f"{'files of jobs/ that run: ingest; stream':<42}{landed}; {streamed}")


if __name__ == "__main__":
    main()
