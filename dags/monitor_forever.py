"""Keep the monitor of `<model>` running continuously, with one driver at any time.

The task starts a driver, or finds the running driver, and defers, so that no worker slot is occupied. A monitor that
fails or is killed is restarted from its checkpoints after a growing pause. If it keeps crashing without progress, it is
given up, and the task fails.

**To stop the monitor, pause this DAG.** `kalman-pipeline stop --model <model> --monitor` stops it until
`kalman-pipeline resume --model <model> --monitor`, whoever started it. A run watches for an hour; the next run finds
the monitor running.
"""

from __future__ import annotations

from kalman_dags import continuous, specs

# Airflow only parses files that contain both words: airflow, dag.

for one in specs.list_continuous_specs("monitor"):
    continuous.build_continuous_dag(
        one, "monitor", __doc__, f"Windows and alerts over the estimates of {one.name}, continuously"
    )
