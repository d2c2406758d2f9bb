"""A command that is started in the folder of the specs runs no code of that folder, in the driver or in its workers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.spark.conf import build_spark_conf
from tests.conftest import ROOT, cli_environment

MARK = (
    "import os, sys; open({mark!r}, 'a').write(f'{{os.getpid()}} {{sys.orig_argv}}\\n')\nraise ImportError\n"
)
SHADOWED = ("numpy", "pandas", "pyarrow", "psutil", "cloudpickle", "typer", "yaml", "sitecustomize")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of specs, with modules that have the names of the product's libraries."""
    folder = tmp_path / "models"
    folder.mkdir()
    shutil.copy(ROOT / "models" / "nile.yaml", folder)
    for name in SHADOWED:
        (folder / f"{name}.py").write_text(MARK.format(mark=str(tmp_path / "ran")))
    return folder


def run(folder: Path, *words: str, **environment: str) -> str:
    """Run a verb in the folder of specs as a process of its own; return the modules of that folder that ran."""
    given = {
        "KALMAN_MODELS": str(folder),
        "KALMAN_FUNCTIONS": "kalman_*",
        "KALMAN_MASTER": "local[1]",
        "PYTHONPATH": str(ROOT),
        **environment,
    }
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=cli_environment(str(folder.parent / "warehouse"), given),
        capture_output=True,
        text=True,
    )
    ran = folder.parent / "ran"
    assert not ran.exists(), ran.read_text()
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_verb_runs_no_module_of_the_current_folder(folder: Path) -> None:
    for words in (["-m", "jobs.describe"], [str(ROOT / "jobs" / "describe.py")]):
        assert "volume" in run(folder, *words, str(ROOT / "tests" / "fixtures" / "nile.csv"))


def test_workers_elsewhere_have_a_safe_path() -> None:
    assert build_spark_conf()["spark.executorEnv.PYTHONSAFEPATH"] == "1"


@pytest.mark.slow
def test_a_stream_runs_no_module_of_the_current_folder(folder: Path) -> None:
    """Neither in the workers and their daemon nor in the process of an operator's part in the driver."""
    lines = (ROOT / "tests" / "fixtures" / "nile.csv").read_text().splitlines()
    for name, some in (("old", lines[1:81]), ("new", lines[81:])):
        (folder.parent / f"{name}.csv").write_text("\n".join([lines[0], *some]) + "\n")
    main = str(Path(sys.executable).with_name("kalman-pipeline"))
    run(folder, main, "ingest", "--model", "nile", "--input", str(folder.parent / "old.csv"))
    run(folder, main, "pretrain", "--model", "nile")
    run(folder, main, "ingest", "--model", "nile", "--input", str(folder.parent / "new.csv"))
    run(folder, main, "stream", "--model", "nile", "--trigger", "available-now")
