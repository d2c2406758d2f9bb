"""Run DAGs one after the other in this process: `python -m demo.dag_runner`.

Airflow is configured by the environment. A line of JSON on standard input, `["DAG_ID", {CONF}]`, asks for a run; the
state in which it ended is the answer on standard output. A run equals one of `airflow dags test`, with two differences:
Airflow starts once for all runs, and a failed task is not retried, because the demo kills drivers on purpose and
decides when to run the DAG again.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

DAGS = Path(__file__).resolve().parent.parent / "dags"


def run(dag_id: str, conf: dict[str, object]) -> str:
    """Run a DAG to its end and return the state of the run.

    Raises:
        LookupError: the DAG does not exist.
    """
    from airflow.dag_processing.dagbag import DagBag

    verb = dag_id.removeprefix("kalman_").partition("__")[0]
    bag = DagBag(str(DAGS / f"{verb}.py"))
    dag = bag.dags.get(dag_id)
    if dag is None:
        raise LookupError(f"there is no DAG {dag_id}: {bag.import_errors or sorted(bag.dags)}")
    for task in dag.tasks:
        task.retries = 0
    return str(dag.test(run_conf=conf).state)


def serve() -> None:
    """Answer requests until standard input ends."""
    # Airflow's log and the drivers' lines go to standard error: standard output has the answers only.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.insert(0, str(DAGS))  # as Airflow does before it parses DAG files
    for line in sys.stdin:
        dag_id, conf = json.loads(line)
        print(run(dag_id, conf), file=answers, flush=True)


if __name__ == "__main__":
    serve()
