"""Keep the comparison of `<model>`'s forecasts with what is measured later running for ever, one driver at any time.

As for a stream that runs for ever, the task starts a driver, or finds the one that runs, and defers, so that no worker
is held. One that fails or is killed is started again from its checkpoint, after a pause that grows; one that crashes
again and again and does nothing is given up, and the task fails.

**To stop it, pause this DAG.** `kalman-pipeline stop --model <model> --skill` stops it until
`kalman-pipeline resume --model <model> --skill`, whoever started it. A run watches for an hour; the next one finds
it running.
"""

from __future__ import annotations

from kalman_dags import continuous, specs

# Airflow takes for DAGs only files that have both words in them: airflow, dag.

for one in specs.kept_running("skill"):
    continuous.for_ever(one, "skill", __doc__, f"How good the forecasts of {one.name} are, for ever")
