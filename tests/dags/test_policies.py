"""Rules that every DAG keeps, whichever family comes next."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from airflow.dag_processing.dagbag import DagBag

from tests.dags.conftest import ROOT

pytestmark = [pytest.mark.airflow, pytest.mark.core]

DAG_FILES = sorted((ROOT / "dags").glob("*.py"))
HEAVY = ("pyspark", "numpy", "pandas", "scipy", "pyarrow", "kalman")
PARSE_SECONDS = 2.0


def test_every_dag_says_what_it_is_and_whose(bag: DagBag) -> None:
    for dag in bag.dags.values():
        model = dag.dag_id.split("__")[1]
        assert dag.description, dag.dag_id
        assert dag.doc_md and "tiny" in dag.doc_md and "<model>" not in dag.doc_md, dag.dag_id
        assert {"kalman", f"model:{model}", "test"} <= dag.tags, dag.dag_id
        assert {task.owner for task in dag.tasks} == {"weather"}, dag.dag_id


def test_the_page_is_the_docstring_of_the_dags_file(bag: DagBag) -> None:
    for dag in bag.dags.values():
        first = Path(dag.fileloc).read_text().splitlines()[0].removeprefix('"""')
        assert dag.doc_md and dag.doc_md.startswith(first.replace("<model>", "tiny")), dag.dag_id


def test_no_dag_catches_up_or_starts_at_a_naive_time(bag: DagBag) -> None:
    for dag in bag.dags.values():
        assert dag.catchup is False, dag.dag_id
        assert dag.start_date is not None and dag.start_date.utcoffset() == timedelta(0), dag.dag_id
        assert dag.max_active_runs == 1, dag.dag_id


def test_every_task_is_retried_and_ends(bag: DagBag) -> None:
    for dag in bag.dags.values():
        for task in dag.tasks:
            assert task.retries and task.retries >= 1, task
            assert task.retry_delay >= timedelta(seconds=10), task
            assert task.execution_timeout and task.execution_timeout <= timedelta(days=1), task


def test_no_task_is_durable(bag: DagBag) -> None:
    # A durable one keeps its job id over a clear, and returns without running.
    for dag in bag.dags.values():
        for task in dag.tasks:
            assert getattr(task, "durable", False) is False, task


def test_every_field_of_a_form_explains_itself(bag: DagBag) -> None:
    for dag in bag.dags.values():
        assert dag.params, dag.dag_id
        for name in dag.params:
            param = dag.params.get_param(name)
            assert param.description and param.description.endswith("."), (dag.dag_id, name)
            assert param.schema.get("type") and param.schema.get("title"), (dag.dag_id, name)
            param.resolve()  # the default is valid, so that a run by schedule is


def test_parsing_is_quick_and_loads_nothing_heavy(models: Path) -> None:
    # A process of its own, as this one has loaded everything. Airflow itself is there before it parses.
    code = f"""
import sys, time, runpy
from airflow.sdk import DAG
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
before = {{name.split('.')[0] for name in sys.modules}}
for file in {[str(path) for path in DAG_FILES]!r}:
    started = time.process_time()
    runpy.run_path(file)
    print(file, time.process_time() - started)
print(*({{name.split('.')[0] for name in sys.modules}} - before) & set({HEAVY!r}))
"""
    path = os.pathsep.join([str(ROOT), str(ROOT / "dags")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *files, heavy = done.stdout.splitlines()
    assert heavy == ""
    seconds = dict(line.rsplit(" ", 1) for line in files)
    assert len(seconds) == len(DAG_FILES)
    assert {file: took for file, took in seconds.items() if float(took) > PARSE_SECONDS} == {}
