"""Try a mutant: put it into a copy of the tree, run the tests that reach its lines, stop at the first that fails."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from tests.mutants.children import KILLED_BY_TIME, in_child
from tests.mutants.drawing import Mutant, runs_on_import, statement_lines
from tests.mutants.equivalent import Judgement, judged
from tests.mutants.reach import OPTIONS, Reach
from tests.mutants.sources import ROOT

Verdict = Literal["killed", "timeout", "survived", "unreached", "equivalent"]
BUDGET = 60.0
"""Seconds of tests for one mutant, as measured without it (with coverage, so rather less)."""


@dataclass(frozen=True)
class Trial:
    """A mutant and what became of it."""

    mutant: Mutant
    verdict: Verdict
    tests: int  # that were chosen for it


def try_mutant(
    tree: Path, mutant: Mutant, reach: Reach, judgements: list[Judgement], patience: float = 1.0
) -> Trial:
    """Run the tests that reach a mutant's lines on a copy of the tree that holds it.

    Args:
        patience: factor on the seconds after which the mutant counts as endless, for a machine that is busy.
    """
    if not mutant.before and not mutant.after or judged(mutant, judgements):
        return Trial(mutant, "equivalent", 0)
    try:
        compile(mutant.code, mutant.path, "exec")
    except SyntaxError:
        return Trial(mutant, "killed", 0)
    original = (ROOT / mutant.path).read_text(encoding="utf-8")
    tests = reach.within(BUDGET, wanted(mutant.path, mutant.line, original, reach))
    if not tests:
        return Trial(mutant, "unreached", 0)
    file = tree / mutant.path
    _write(file, mutant.code)
    try:
        limit = patience * (30.0 + 4.0 * sum(reach.seconds[test] for test in tests))
        code = in_child(tree, lambda: _run(tests), limit)
    finally:
        _write(file, original)
    if code == KILLED_BY_TIME:
        return Trial(mutant, "timeout", len(tests))
    return Trial(mutant, "survived" if code == pytest.ExitCode.OK else "killed", len(tests))


def wanted(path: str, line: int, code: str, reach: Reach) -> list[str]:
    """Return the tests that a change of a line could fail, the likely ones first.

    A line that runs on import is measured in the tests alone that happen to be the first to import it.
    """
    tests = reach.of_lines(path, statement_lines(code, line))
    if runs_on_import(code, line):
        tests += [test for test in reach.of_file(path) if test not in tests]
    return tests


def _run(tests: list[str]) -> int:
    """In the child: run tests without writing compiled files, which would outlive the mutant."""
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    return int(pytest.main([*OPTIONS, "-x", *tests]))


def _write(file: Path, code: str) -> None:
    """Write a source, and remove what Python has compiled of it: two texts of one second and size look alike to it."""
    file.write_text(code, encoding="utf-8")
    for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
        compiled.unlink()
