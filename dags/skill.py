"""Compare forecasts from the live estimates of `<model>` with later measurements.

Runs on its schedule or, without a schedule, when the stream has written new estimates. It processes the present
estimates and ends; estimates that wait for their measurements are in its checkpoint, so every pair counts once. Safe to
kill, retry and clear at any moment. The pool `kalman_skill__<model>` has one slot; if another process runs the
comparison, the task is *skipped*. The table is `forecast_skill/<model>`; the task's log ends with the quality of the
forecasts by measurement and horizon.
"""

from __future__ import annotations

from kalman_dags import continuous, specs

# Airflow only parses files that contain both words: airflow, dag.

for one in specs.run_at_times("skill"):
    continuous.build_following_dag(
        one, "skill", __doc__, f"How good the forecasts of {one.name} are", does="compare"
    )
