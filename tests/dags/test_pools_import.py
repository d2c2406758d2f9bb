"""The pools of `make airflow`, made beside another import on the same SQLite: neither fails."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

from tests.dags.conftest import ROOT

pytestmark = [pytest.mark.airflow, pytest.mark.slow]

POOLS = {f"pool_{number}": {"slots": 1, "description": "one"} for number in range(3)}
IMPORT = """
import os, sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
loader = SourceFileLoader("airflow_standalone", sys.argv[1])
script = module_from_spec(spec_from_loader(loader.name, loader))
loader.exec_module(script)
script.make_pools(dict(os.environ), Path(sys.argv[2]).read_text(), Path(sys.argv[3]))
"""
SCRIPT = ROOT / "scripts" / "airflow-standalone"


def script():
    """Return scripts/airflow-standalone as a module."""
    loader = SourceFileLoader("airflow_standalone", str(SCRIPT))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_two_imports_at_once(tmp_path: Path) -> None:
    database = tmp_path / "airflow.db"
    environment = {
        **os.environ,
        "AIRFLOW_HOME": str(tmp_path),
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{database}?timeout=60",
        "PYTHONPATH": str(ROOT),
    }
    subprocess.run(
        [sys.executable, "-m", "airflow", "db", "migrate"], env=environment, check=True, capture_output=True
    )
    pools = tmp_path / "pools.json"
    pools.write_text(json.dumps(POOLS))
    with sqlite3.connect(database, timeout=60) as writer:
        # Nobody may write until all of them have looked for the first pool.
        writer.execute("BEGIN IMMEDIATE")
        running = [
            subprocess.Popen(
                [sys.executable, "-c", IMPORT, str(SCRIPT), str(pools), str(tmp_path / f"{number}.log")],
                env=environment,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for number in range(2)
        ]
        time.sleep(30)
        writer.commit()
    said = [one.communicate(timeout=300)[0] for one in running]
    assert [one.returncode for one in running] == [0, 0], said
    with sqlite3.connect(database) as reader:
        made = reader.execute("select count(*) from slot_pool where pool like 'pool_%'").fetchone()
    assert made == (len(POOLS),)


def test_the_reason_is_the_exceptions_line() -> None:
    said = """Traceback (most recent call last):
  File "x.py", line 1, in <module>
sqlalchemy.exc.IntegrityError: (sqlite3.IntegrityError) UNIQUE constraint failed: slot_pool.pool
[SQL: INSERT INTO slot_pool (pool) VALUES (?)]
(Background on this error at: ...)
"""
    assert script().reason(said).startswith("sqlalchemy.exc.IntegrityError")
    assert script().reason("Missing pools file x.json\n") == "Missing pools file x.json"
    assert script().reason("") == "no reason given"
