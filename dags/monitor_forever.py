"""Keep the monitor of `<model>` running for ever, with one driver at any time.

As for a stream that runs for ever, the task starts a driver, or finds the one that runs, and defers, so that no worker
is held. A monitor that fails or is killed is started again from its checkpoints, after a pause that grows; one that
crashes again and again and does nothing is given up, and the task fails.

**To stop the monitor, pause this DAG.** `kalman-pipeline stop --model <model> --monitor` stops it until
`kalman-pipeline resume --model <model> --monitor`, whoever started it. A run watches for an hour; the next one finds
the monitor running.
"""

from __future__ import annotations

from kalman_dags import continuous, specs

# Airflow takes for DAGs only files that have both words in them: airflow, dag.

for one in specs.kept_running("monitor"):
    continuous.for_ever(
        one, "monitor", __doc__, f"Windows and alerts over the estimates of {one.name}, for ever"
    )
