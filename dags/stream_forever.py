"""Keep the stream of `<model>` running for ever, with one driver at any time.

The task starts a driver, or finds the one that runs, and defers, so that no worker is held. A driver is a process of
its own: it goes on when task, worker, scheduler or triggerer die. One that fails or is killed is started again from
its checkpoint, after a pause that grows; each measurement is reflected exactly once whatever happens. Where drivers
crash again and again before they have committed a micro-batch (`airflow.stream.give_up_after` of the spec), the stream
is given up: the task fails for good with the last error, until `kalman-pipeline resume --model <model>` or until it is
cleared.

**To stop the stream, pause this DAG**: the driver finishes its micro-batch within a minute or two. Switched on again,
it goes on. A task that is cleared, or whose state is marked, stops its driver too, and is followed by the next run.
`kalman-pipeline stop --model <model>` stops it until `kalman-pipeline resume --model <model>`, whoever started it.

A run watches for an hour; the next one finds the driver running.
"""

from __future__ import annotations

from kalman_dags import continuous, dag_defaults, specs

# Airflow takes for DAGs only files that have both words in them: airflow, dag.

for one in specs.kept_running("stream"):
    continuous.for_ever(
        one,
        "stream",
        __doc__,
        f"Keep the estimates of {one.name} up to date, for ever",
        outlets=[dag_defaults.estimates(one.name)],
    )
