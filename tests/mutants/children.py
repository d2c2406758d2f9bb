"""Run pytest in a forked process, on a copy of the tree.

The libraries that take seconds to import are imported once, before the fork; `kalman`, `jobs` and the tests never are.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.mutants.sources import ROOT

HEAVY = (
    "_pytest.assertion.rewrite", "hypothesis", "hypothesis.strategies", "numpy", "numpy.testing", "pandas", "psutil",
    "pyarrow.parquet", "pydantic", "pyspark.sql.types", "rich.table", "scipy.linalg", "scipy.optimize", "scipy.special",
    "scipy.stats", "statsmodels.api", "statsmodels.tsa.statespace.api", "typer.testing", "yaml",
)  # fmt: skip
KILLED_BY_TIME = -9


def import_libraries() -> None:
    """Import what every forked process would import again; what is not installed is left out."""
    for name in HEAVY:
        try:
            importlib.import_module(name)
        except ImportError:
            continue


def copy_tree(folder: Path) -> None:
    """Copy the files that git knows or would take, as they are in the working tree."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, names.split("\0")):
        source, target = ROOT / name, folder / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def in_child(tree: Path, work: Callable[[], int], seconds: float) -> int:
    """Fork, call `work` in `tree`, and return its exit code, or KILLED_BY_TIME once `seconds` have passed."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _live(tree, work)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(
        child, signal.SIGKILL
    )  # the child leads a group of its own, with the processes that its tests started
    os.waitpid(child, 0)
    return KILLED_BY_TIME


def _live(tree: Path, work: Callable[[], int]) -> None:
    """Be the child: look at `tree` alone, be silent, and end with what `work` returns."""
    code = 99
    try:
        os.setsid()
        os.chdir(tree)
        sys.path[:] = [str(tree), *(place for place in sys.path if Path(place or ".").resolve() != ROOT)]
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "kalman", "jobs")]:
            del sys.modules[name]
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silence, stream)
        code = work()
    finally:
        os._exit(code)
