"""Watch the live estimates of `<model>`: windows over time, and rules over keys that raise alerts.

Runs on its schedule, or, without one, when the stream has brought new estimates. It takes what is there and ends; what
it has watched is in its checkpoints, so that every estimate counts once. Safe to kill, retry and clear at any moment.
The pool `kalman_monitor__<model>` has one slot, so that there is one monitor; one that somebody else runs makes the
task *skipped*. The tables are `windows/<model>` and `alerts/<model>`.
"""

from __future__ import annotations

from kalman_dags import continuous, specs

# Airflow takes for DAGs only files that have both words in them: airflow, dag.

for one in specs.run_at_times("monitor"):
    continuous.following(
        one, "monitor", __doc__, f"Windows and alerts over the estimates of {one.name}", does="watch"
    )
