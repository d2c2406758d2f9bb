"""Watch the live estimates of `<model>`: windows over time, and rules over keys that raise alerts.

Runs on its schedule or, without a schedule, when the stream has written new estimates. It processes the present
estimates and ends; its progress is in its checkpoints, so every estimate counts once. Safe to kill, retry and clear at
any moment. The pool `kalman_monitor__<model>` has one slot, so there is one monitor; if another process runs a monitor,
the task is *skipped*. The tables are `windows/<model>` and `alerts/<model>`.
"""

from __future__ import annotations

from kalman_dags import continuous, specs

# Airflow only parses files that contain both words: airflow, dag.

for one in specs.run_at_times("monitor"):
    continuous.build_following_dag(
        one, "monitor", __doc__, f"Windows and alerts over the estimates of {one.name}", does="watch"
    )
