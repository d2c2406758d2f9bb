"""Which tests reach which lines: each test file is run once with coverage, each test as a context of its own.

What a fixture of a wider scope than one test reaches counts for its whole file. The result is kept in
`var/mutants`, one JSON file a test file, until the test or any source changes.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import coverage  # pyright: ignore[reportMissingImports]
import pytest

from tests.mutants.children import KILLED_BY_TIME, in_child
from tests.mutants.sources import NO_SPARK, ROOT, importers, mutated_files, test_files

KEPT = ROOT / "var" / "mutants"
OPTIONS = [
    "-q",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "-m",
    NO_SPARK,
    "-p",
    "no:randomly",
    "--hypothesis-seed=0",
]
ALONE = 900.0
"""Seconds that one test file may take with coverage."""


@dataclass
class Reach:
    """The tests by the lines that they reach, and the seconds that they take."""

    lines: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    files: dict[str, set[str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, found: dict[str, Any]) -> None:
        """Add what one test file was found to reach."""
        self.seconds.update(found["seconds"])
        for path, lines in found["lines"].items():
            for line, tests in lines.items():
                good = {test for test in tests if test in found["seconds"]}
                self.lines.setdefault((path, int(line)), set()).update(good)
                self.files.setdefault(path, set()).update(good)

    def of_lines(self, path: str, lines: range) -> list[str]:
        """Return the tests that reach one of `lines`, the fast ones first."""
        return self._ordered(set().union(*(self.lines.get((path, line), set()) for line in lines)))

    def of_file(self, path: str) -> list[str]:
        """Return the tests that reach anything of a file, then those of its room and of the files that import it.

        They stand for the lines that run on import (constants, fields), which belong to no test.
        """
        room = f"tests/{path.rpartition('/')[0]}/"
        near = self.files.get(path, set())
        far = set().union(*(self.files.get(other, set()) for other in importers(path)))
        far |= {test for test in self.seconds if test.startswith(room) and "::" in test}
        return [*self._ordered(near), *self._ordered(far - near)]

    def within(self, budget: float, wanted: list[str]) -> list[str]:
        """Return the tests that one after the other fit into `budget` seconds, and the first in any case."""
        chosen, spent = [], 0.0
        for test in wanted:
            if not chosen or spent + self.seconds[test] <= budget:
                spent += self.seconds[test]
                chosen.append(test)
        return chosen

    def _ordered(self, tests: set[str]) -> list[str]:
        return sorted(tests, key=lambda one: (self.seconds[one], one))


class _Contexts:
    """A pytest plugin: tell coverage which test runs, and note which passed and how long they took."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self.measured, self.context = measured, ""
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    def _switch(self, context: str) -> None:
        self.context = context
        self.measured.switch_context(context)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        began, name = time.perf_counter(), item.nodeid.split("[")[0]
        self._switch(name)
        try:
            return (yield)
        finally:
            self._switch("")
            took = time.perf_counter() - began
            whole = name.split("::")[0]
            for one in (name, whole):
                self.seconds[one] = self.seconds.get(one, 0.0) + took

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
        before = self.context
        if fixturedef.scope != "function":
            self._switch(before.split("::")[0])
        try:
            return (yield)
        finally:
            self._switch(before)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            name = report.nodeid.split("[")[0]
            self.failed |= {name, name.split("::")[0]}


def measure(tree: Path, out: Any = print) -> Reach:
    """Run the tests of every file in `tree` once, unless that is known, and return what they reach."""
    reach, state = Reach(), _digest(mutated_files())
    KEPT.mkdir(parents=True, exist_ok=True)
    for path in test_files():
        kept = KEPT / f"{path.removesuffix('.py').replace('/', '.')}.json"
        key = _digest([path]) + state
        known = json.loads(kept.read_text()) if kept.exists() else {}
        if known.get("key") != key:
            began = time.perf_counter()
            code = in_child(tree, partial(_measure_file, path, kept, key), ALONE)
            known = json.loads(kept.read_text()) if kept.exists() else {}
            slow = " (too slow: not used)" if code == KILLED_BY_TIME else ""
            out(f"  {path}: {time.perf_counter() - began:.0f} s{slow}")
        if known.get("key") == key:
            reach.add(known)
    return reach


def _measure_file(path: str, kept: Path, key: str) -> int:
    """In the child: run one test file with coverage and write what its tests reach."""
    include = [str(Path.cwd() / one) for one in mutated_files()]
    measured = coverage.Coverage(data_file=None, include=include, config_file=False)
    contexts = _Contexts(measured)
    measured.start()
    code = pytest.main([*OPTIONS, path], plugins=[contexts])
    measured.stop()
    data, lines = measured.get_data(), {}
    for file in data.measured_files():
        by_line = data.contexts_by_lineno(file)
        lines[str(Path(file).relative_to(Path.cwd()))] = {
            line: sorted(filter(None, tests)) for line, tests in by_line.items() if any(tests)
        }
    seconds = {test: took for test, took in contexts.seconds.items() if test not in contexts.failed}
    kept.write_text(json.dumps({"key": key, "seconds": seconds, "lines": lines}))
    return int(code)


def _digest(paths: list[str]) -> str:
    return hashlib.sha256(b"".join((ROOT / path).read_bytes() for path in paths)).hexdigest()[:16]
