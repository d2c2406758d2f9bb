"""Keep the stream of `<model>` running continuously, with one driver at any time.

The task starts a driver, or finds the running driver, and defers, so that no worker slot is occupied. A driver is a
separate process, so it survives the death of task, worker, scheduler and triggerer. A driver that fails or is killed is
restarted from its checkpoint after a growing pause; each measurement is reflected exactly once whatever happens. If
drivers keep crashing before they commit a micro-batch (`airflow.stream.give_up_after` of the spec), the stream is given
up: the task fails for good with the last error, until `kalman-pipeline resume --model <model>`, or until the task is
cleared.

**To stop the stream, pause this DAG**: the driver finishes its micro-batch within a minute or two. When the DAG is
unpaused, the stream resumes. If a task is cleared, or its state is marked, its driver stops too; the next run starts a
new driver. `kalman-pipeline stop --model <model>` stops the stream until `kalman-pipeline resume --model <model>`,
whoever started it.

A run watches for an hour; the next run finds the driver running.
"""

from __future__ import annotations

from kalman_dags import continuous, dag_defaults, specs

# Airflow only parses files that contain both words: airflow, dag.

for one in specs.list_continuous_specs("stream"):
    continuous.build_continuous_dag(
        one,
        "stream",
        __doc__,
        f"Keep the estimates of {one.name} up to date, continuously",
        outlets=[dag_defaults.build_asset("estimates", one.name)],
    )
