"""Where things are: verbs are the files of `jobs/`, a room imports rooms below it, functions are short."""

from __future__ import annotations

import ast
import importlib.util
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from jobs.cli import VERBS
from jobs.core.command import name_module

ROOT = Path(__file__).resolve().parent.parent
NO_VERBS = {"__init__", "api", "cli", "warm_up"}
FORMER_NAMES = {"jars"}
"""Documented names of programs that have moved: they work, with a notice, for one release."""


def load_structure() -> ModuleType:
    """Import scripts/structure.py, which measures what these tests hold."""
    spec = importlib.util.spec_from_file_location("structure", ROOT / "scripts" / "structure.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


structure = load_structure()
FILES = [path for package in structure.PACKAGES for path in structure.sources(ROOT, package)]


def named(measure: Callable[[Path], list[tuple[str, int]]]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}: {name} has {count}" for path in FILES for name, count in measure(path)
    ]


def test_the_files_of_jobs_are_the_verbs() -> None:
    files = {path.stem for path in (ROOT / "jobs").glob("*.py")}
    assert files - NO_VERBS - FORMER_NAMES == {name_module(verb) for verb in VERBS}


def test_each_room_says_what_it_is() -> None:
    for package in (*structure.PACKAGES, "benchmarks"):
        for folder in {path.parent for path in structure.sources(ROOT, package)} - {
            ROOT / "benchmarks/models"
        }:
            text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
            assert text, f"{folder.relative_to(ROOT)}/__init__.py has no charter"


def test_no_room_is_crowded() -> None:
    # The files of `jobs` itself are the verbs, one each: no room.
    rooms = Counter(path.parent for path in FILES if path.parent != ROOT / "jobs")
    assert not {folder: count for folder, count in rooms.items() if count > 26}


def test_no_file_imports_another_in_a_circle() -> None:
    assert structure.circles(structure.import_graph(ROOT)) == []


def test_a_circle_would_be_found() -> None:
    assert structure.circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c"]]


def test_imports_stand_inside_functions_in_verbs_alone() -> None:
    rooms = [
        path for path in FILES if path.parent != ROOT / "jobs" or path.stem in ("__init__", "cli", "api")
    ]
    assert [
        f"{path.relative_to(ROOT)}:{line}" for path in rooms for line in structure.imports_in_functions(path)
    ] == []


def test_a_verb_imports_nothing_heavy_before_it_runs() -> None:
    light = set(sys.stdlib_module_names) | {"typer", "__future__"}
    for verb in sorted(VERBS):
        for module in structure.imported_on_import(ROOT / "jobs" / f"{name_module(verb)}.py"):
            assert module.startswith("jobs.core.") or module.split(".")[0] in light, (
                f"{verb} imports {module}"
            )


def test_functions_are_short() -> None:
    assert named(structure.long_functions) == []


def test_functions_have_few_parameters() -> None:
    assert named(structure.wide_functions) == []


@pytest.mark.parametrize(
    "contract", tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
)
def test_no_import_is_excused_from_the_layers(contract: dict) -> None:
    assert not contract.get("ignore_imports"), contract["name"]
