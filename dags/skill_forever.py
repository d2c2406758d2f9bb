"""Compare the forecasts of `<model>` continuously with later measurements, with one driver at any time.

The task starts a driver, or finds the running driver, and defers, so that no worker slot is occupied. A driver that
fails or is killed is restarted from its checkpoint after a growing pause. If drivers keep crashing without progress,
the comparison is given up, and the task fails.

**To stop the comparison, pause this DAG.** `kalman-pipeline stop --model <model> --skill` stops it until
`kalman-pipeline resume --model <model> --skill`, whoever started it. A run watches for an hour; the next run finds the
driver running.
"""

from __future__ import annotations

from kalman_dags import continuous, specs

# Airflow only parses files that contain both words: airflow, dag.

for one in specs.list_continuous_specs("skill"):
    continuous.build_continuous_dag(
        one, "skill", __doc__, f"How good the forecasts of {one.name} are, for ever"
    )
