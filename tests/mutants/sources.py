"""Which files are mutated: all of `kalman/`, and of `jobs/` what the tests run without Spark."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MUTATED = (
    "kalman",
    "jobs/core",
    "jobs/specs",
    "jobs/state/encoding",
    "jobs/state",
    "jobs/offline",
    "jobs/upgrades/migration/state_map.py",
    "jobs/upgrades/migration/versions.py",
    "jobs/upgrades/decision.py",
    "jobs/verification/matching.py",
)
"""Folders and files. Code that only tests with Spark reach would count as not noticed: they are not run here."""
LEFT_OUT = {
    "jobs/offline/plots.py": "what it draws is for the eye, and the tests only look whether there is a picture",
    "jobs/state/spark_values.py": "calls of Spark's state, which need Spark",
}
"""Not mutated, with the reason."""

TESTS = (
    "tests/jobs/cli",
    "tests/jobs/core",
    "tests/jobs/state",
    "tests/jobs/insight/test_comparison.py",
    "tests/jobs/upgrades",
    "tests/jobs/offline",
    "tests/jobs/specs",
    "tests/jobs/state",
    "tests/jobs/batch",
    "tests/jobs/upgrades",
    "tests/jobs/verification",
    "tests/kalman",
)
"""The rooms of the mutated files: their tests alone are run, and of these the ones without Spark."""
NO_SPARK = "not spark and not airflow and not slow and not soak"


def mutated_files() -> list[str]:
    """Return the files that are mutated, relative to the root, in a fixed order."""
    return sorted(set(_python_files(MUTATED)) - set(LEFT_OUT))


def test_files() -> list[str]:
    """Return the files with tests that need no Spark, relative to the root, in a fixed order."""
    return sorted(path for path in set(_python_files(TESTS)) if _has_tests_without_spark(ROOT / path))


test_files.__test__ = False  # pyright: ignore[reportFunctionMemberAccess]


def importers(path: str) -> list[str]:
    """Return the mutated files that import a file."""
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    package, _, name = module.rpartition(".")
    found = []
    for other in mutated_files():
        for node in ast.walk(ast.parse((ROOT / other).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import) and module in {one.name for one in node.names}:
                found.append(other)
            elif isinstance(node, ast.ImportFrom) and (
                node.module == module or node.module == package and name in {one.name for one in node.names}
            ):
                found.append(other)
    return sorted(set(found))


def _has_tests_without_spark(file: Path) -> bool:
    lines = file.read_text(encoding="utf-8").splitlines()
    return file.name.startswith("test_") and not any(
        line.startswith("pytestmark") and ("mark.spark" in line or "mark.airflow" in line) for line in lines
    )


def _python_files(places: tuple[str, ...]) -> Iterator[str]:
    for place in places:
        path = ROOT / place
        for file in [path] if path.is_file() else path.glob("**/*.py"):
            yield file.relative_to(ROOT).as_posix()
