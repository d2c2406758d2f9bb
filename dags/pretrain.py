"""Learn the parameters of `<model>` and filter its history into a snapshot.

The run's data interval determines the result: history is cut at the interval's end (rows with an earlier event time
count), and parameters are learned from the spec's `learn.window` before that cut. So a run gives the same snapshot
whenever it runs. It can be cleared, and any part of the past can be backfilled, even while a stream is live, because a
stream never adopts a newer snapshot by itself. With `airflow.pretrain.schedule: on-landing` a run takes history up to
the version of the measurements whose landing has started the run. The form overrides the cut (an instant, or a version
of the measurements table) and the learning window.
"""

from __future__ import annotations

from airflow.sdk import DAG

from jobs.specs.airflow import ON_LANDING
from jobs.specs.model_spec import ModelSpec
from kalman_dags import cut, dag_defaults, specs
from kalman_dags.verb_dag import verb_dag


def build(spec: ModelSpec) -> DAG:
    """Make the DAG that pretrains one model."""
    window = spec.learn and spec.learn.window_us
    before = f"{spec.learn.window} before the cut" if spec.learn and window else "the beginning"
    return verb_dag(
        spec,
        "pretrain",
        __doc__,
        f"Learn {spec.name} and filter its history into a snapshot",
        hours=12,
        params={
            "as_of": dag_defaults.build_instant_field(
                "As of",
                "Take only history before this instant (empty: the end of the run's data interval).",
            ),
            "to_version": dag_defaults.build_number_field(
                "To version",
                "Take history up to this version of measurements, instead of a cut in time.",
                least=0,
            ),
            "learn_from": dag_defaults.build_instant_field(
                "Learn from",
                f"Learn from rows at or after this instant (empty: {before}).",
            ),
            "learn_to": dag_defaults.build_instant_field(
                "Learn to", "Learn from rows before this instant (empty: the cut)."
            ),
        },
        schedule=(
            [dag_defaults.build_asset("measurements", spec.name)]
            if spec.airflow.pretrain.schedule == ON_LANDING
            else dag_defaults.build_interval_timetable(spec.airflow.pretrain.schedule)
        ),
        macros={
            "as_of": cut.as_of,
            "learn_from": cut.learn_from,
            "to_version": cut.to_version,
        },
        options={
            "--to-version": "{{ to_version(params, triggering_asset_events) }}",
            "--as-of": "{{ as_of(params, dag_run, triggering_asset_events) }}",
            "--learn-from": f"{{{{ learn_from(params, dag_run, {window}, triggering_asset_events) }}}}",
        },
        outlets=[dag_defaults.build_asset("snapshots", spec.name)],
    )


for one in specs.load_specs():
    build(one)
