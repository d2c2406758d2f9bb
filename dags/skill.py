"""Compare forecasts from the live estimates of `<model>` with what was measured later.

Runs on its schedule, or, without one, when the stream has brought new estimates. It takes what is there and ends; what
waits to be compared is in its checkpoint, so that every pair counts once. Safe to kill, retry and clear at any moment.
The pool `kalman_skill__<model>` has one slot; a comparison that somebody else runs makes the task *skipped*. The
table is `forecast_skill/<model>`; the task's log ends with how good the forecasts were, by measurement and horizon.
"""

from __future__ import annotations

from kalman_dags import continuous, specs

# Airflow takes for DAGs only files that have both words in them: airflow, dag.

for one in specs.run_at_times("skill"):
    continuous.following(one, "skill", __doc__, f"How good the forecasts of {one.name} are", does="compare")
