"""Turn a table of states of `<model>`, made by another system or by hand, into a snapshot. Started by hand.

Each key's state is checked as in a migration; a key with an invalid state is left out and put into quarantine. Unless
the form's *Dry run* is switched off, the run checks every key and writes nothing. The same table gives the same
snapshot, so the run can be cleared and retried. A stream without a live generation starts from the new snapshot. A
running stream adopts the snapshot only on request (*Adopt* in the form of `kalman_stream__<model>`).
"""

from __future__ import annotations

from airflow.sdk import DAG, Param

from jobs.specs.model_spec import ModelSpec
from kalman_dags import dag_defaults, specs
from kalman_dags.verb_dag import verb_dag


def build(spec: ModelSpec) -> DAG:
    """Make the DAG that imports a table of one model's states."""
    return verb_dag(
        spec,
        "import",
        __doc__,
        f"Make a snapshot of {spec.name} from a table of states",
        hours=2,
        params={
            "input": Param(
                "",
                type="string",
                title="Table",
                description="A .csv or .parquet file, or a Delta table by its path or its name below the "
                "warehouse: a row a key, with the key columns, event_time, mean and covariance.",
            ),
            "to_version": Param(
                0,
                type="integer",
                minimum=0,
                title="Version",
                description="The version of the measurements that the states reflect; 0: none of the landed rows.",
            ),
            "dry_run": dag_defaults.build_flag_field(
                "Dry run", "Check every key; write nothing.", default=True
            ),
        },
        verb="import_states",
        needs=("{{ params.input }}", "name the table of states in the form's field *Table*"),
        outlets=[dag_defaults.build_asset("snapshots", spec.name)],
    )


for one in specs.load_specs():
    build(one)
