"""Compare forecasts from the live estimates of `<model>` with what was measured later.

Runs on its schedule, or, without one, when the stream has written new estimates. It processes what is there and ends;
estimates that wait to be compared are in its checkpoint, so every pair counts once. Safe to kill, retry and clear at
any moment. The pool `kalman_skill__<model>` has one slot; if another process runs the comparison, the task is
*skipped*. The table is `forecast_skill/<model>`; the task's log ends with the quality of the forecasts by measurement
and horizon.
"""

from __future__ import annotations

from kalman_dags import continuous, specs

# Airflow only parses files that contain both words: airflow, dag.

for one in specs.run_at_times("skill"):
    continuous.build_following_dag(
        one, "skill", __doc__, f"How good the forecasts of {one.name} are", does="compare"
    )
