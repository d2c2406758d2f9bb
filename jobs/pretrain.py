"""Pretrain a model in batch: learn its parameters, filter every key to its latest state, commit a snapshot.

The snapshot's id is a digest of everything that determines its content, so a retry gives the same snapshot, or finds it
committed. Nothing is visible before the manifest's commit.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from jobs.core.command import Model, Profile, timed
from jobs.core.errors import UserError
from jobs.core.progress import Progress
from jobs.core.report import Report, convert_to_json, format_count, round_numbers
from jobs.core.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame

    from jobs.batch.estimating import EstimateResult
    from jobs.batch.learning import LearningResult
    from jobs.batch.new_keys import Offer
    from jobs.batch.pretraining import PretrainedSnapshot, Summary
    from jobs.snapshots.manifests import Manifest
    from jobs.specs.model_spec import ModelSpec


@timed
def run(
    settings: Settings,
    model: Model,
    to_version: Annotated[
        int | None, Option(min=0, help="Use measurements up to this Delta version; by default the newest.")
    ] = None,
    as_of: Annotated[
        str | None, Option(help="Use measurements with event times before this (ISO 8601).")
    ] = None,
    learn_from: Annotated[
        str | None, Option(help="Learn from event times at or after this (ISO 8601).")
    ] = None,
    learn_to: Annotated[str | None, Option(help="Learn from event times before this (ISO 8601).")] = None,
    history: Annotated[
        bool,
        Option(
            "--history", help="Use only what `ingest --history` has landed, for running streams to import."
        ),
    ] = False,
    estimates: Annotated[
        bool,
        Option(
            "--estimates",
            help="Also write every row's estimate, with the snapshot's parameters, to estimates_history/MODEL.",
        ),
    ] = False,
    profile: Profile = False,
) -> Report:
    """Learn the model's parameters, filter the whole history, and commit a snapshot.

    Raises:
        UserError: no measurements, no such version, nothing to learn from.
    """
    from jobs.batch import new_keys
    from jobs.batch.batch_filter import Interval
    from jobs.batch.estimating import estimate_reflected
    from jobs.batch.pretraining import pretrain_snapshot, summarize_learning
    from jobs.lineage.generations import DeployedModel
    from jobs.spark.conf import build_short_rows_conf
    from jobs.spark.job_labels import build_task_counter
    from jobs.spark.session import open_warehouse
    from jobs.specs import sections
    from jobs.state.kernel import load_checked_spec
    from jobs.storage.positions import Cut, check_version, cut_at, parse_time
    from jobs.storage.tables import need_columns, need_measurements
    from jobs.supervision.batch_profile import VerbProfiler

    profiler = VerbProfiler(profile)
    spec = load_checked_spec(model, settings.models)
    before = None if as_of is None else parse_time(as_of, "--as-of")
    window = Interval.parse(learn_from, learn_to, ("--learn-from", "--learn-to"))
    if history and estimates:
        raise UserError("--history writes no estimates: run `estimate` for them")
    if history and (before, window.first, window.last) != (None, None, None):
        raise UserError("--history learns nothing and uses all history: combine it with --to-version only")
    title = f"pretrain {spec.name}"
    warehouse = open_warehouse(settings, title, build_short_rows_conf(), reads_all_of=spec.name)
    deployed, table = DeployedModel(spec, warehouse), need_measurements(warehouse, spec.name)
    need_columns(warehouse, spec.name, spec.columns)
    if history:
        with Progress(title, None, quiet=settings.quiet) as progress:
            offers = new_keys.offer_history_states(deployed, to_version, progress.note)
        return profiler.added_to(_report_offers(spec, offers))
    latest = check_version(warehouse, table, to_version)
    cut = Cut(latest, None) if before is None else cut_at(warehouse, table, latest, before)
    with Progress(title, None, quiet=settings.quiet) as progress:
        progress.follow(build_task_counter(warehouse))
        results: list[EstimateResult] = []

        def beside(manifest: Manifest, packed: DataFrame | None = None) -> None:
            results.append(estimate_reflected(deployed, manifest, cut, progress.note, packed))

        found = pretrain_snapshot(deployed, table, cut, window, progress, beside if estimates else None)
        if estimates and not results:
            beside(found.manifest)  # the snapshot already existed
        told = summarize_learning(warehouse, found.manifest)
        offers = []
        if spec.stream.new_keys == sections.PRETRAINED and cut.before is None:
            apart = DeployedModel(spec, warehouse.work(in_process=False))  # its rows are frames of Spark
            offers = new_keys.offer(apart, table, cut.version, progress.note)
    report = _report(spec, found, told, offers)
    return profiler.added_to(_add_estimates(report, results))


def _add_estimates(report: Report, results: list[EstimateResult]) -> Report:
    if not results:
        return report
    (made,) = results
    done = (
        "had already been committed" if not made.commits else f"{format_count(made.written, 'row')} written"
    )
    line = f"estimates of the rows that it reflects: {done}, run {made.run} -> {made.table}"
    data = {"run": made.run, "table": made.table, "made": made.commits > 0, "rows": made.written}
    return replace(report, lines=[*report.lines, line], data={**report.data, "estimates": data})


def _report_offers(spec: ModelSpec, offers: list[Offer]) -> Report:
    from jobs.batch import new_keys

    return Report(
        new_keys.format_offers(offers),
        {
            "model": spec.name,
            "model_version": spec.version,
            "snapshots": [one.manifest.snapshot_id for one in offers],
            "keys": sum(one.manifest.key_count for one in offers),
            "rows": sum(one.manifest.rows for one in offers),
            "keys_offered": sum(one.keys for one in offers),
        },
    )


def _report(spec: ModelSpec, found: PretrainedSnapshot, told: Summary | None, offers: list[Offer]) -> Report:
    from jobs.batch import new_keys

    manifest, learned, made, notes = found
    waiting = 0 if manifest.waiting is None else int(manifest.waiting["rows"])
    lines = [
        *_format_snapshot(manifest, waiting),
        *([] if learned is None else _format_learned(learned)),
        *([] if told is None else told.lines),
        *_format_inputs(manifest),
        *notes,
    ]
    if not made:
        lines.append("it had already been committed: the same inputs give the same snapshot")
    lines += new_keys.format_offers(offers)
    fit = None if learned is None else learned.fit
    data = {
        "model": spec.name,
        "model_version": spec.version,
        "made": made,
        "keys_offered": sum(one.keys for one in offers),
        "snapshot": manifest.snapshot_id,
        "keys": manifest.key_count,
        "rows": manifest.rows,
        "waiting": waiting,
        "version": manifest.version,
        "cut": manifest.cut,
        "inputs": manifest.inputs,
        "parameters": manifest.parameters,
        "standard_errors": convert_to_json(None if fit is None else fit.errors),
        "log_likelihood": None if fit is None else fit.log_likelihood,
        "converged": None if told is None else told.outcomes["converged"] == told.total,
        "outcome": None if fit is None else fit.outcome.name.lower(),
        "reason": None if fit is None else fit.reason,
        "learned": None if told is None else told._asdict(),
        "held_out": None if fit is None else fit.held_out,
        "notes": list(notes),
    }
    return Report(lines, data)


def _format_snapshot(manifest: Manifest, waiting: int) -> list[str]:
    from jobs.storage.positions import describe

    place = describe(manifest.position)
    if manifest.cut is not None:
        place += f", before {manifest.cut:%Y-%m-%d %H:%M} UTC (history only: a stream cannot start from it)"
    lines = [
        f"snapshot {manifest.snapshot_id}: {format_count(manifest.key_count, 'key')}, "
        f"{format_count(manifest.rows, 'row')}, {place}"
    ]
    if waiting:
        lines.append(f"waiting for the watermark: {format_count(waiting, 'row')}")
    return lines


def _format_learned(learned: LearningResult) -> list[str]:
    from jobs.batch.pretraining import TOLD
    from kalman.models.groups import GROUPS

    values = ", ".join(
        f"{name} = {json.dumps(round_numbers(value, 6))}" + _format_error(learned.fit.errors, name)
        for name, value in learned.parameters.items()
        if name != GROUPS
    )
    fit, told = learned.fit, TOLD[learned.fit.outcome.name.lower()]
    end = told if fit.reason is None else f"{told}: {fit.reason}"
    lines = [f"learned {values} from {learned.rows:,} rows ({fit.iterations} iterations, {end})"]
    if learned.groups is not None:
        lines.append(
            f"and for each of {len(learned.groups.values):,} groups of {', '.join(learned.groups.by)}"
        )
    if fit.held_out is not None:
        lines.append(f"log-likelihood of the held-out rows: {fit.held_out:.4f} a row")
    return lines


def _format_inputs(manifest: Manifest) -> list[str]:
    inputs = manifest.inputs
    if inputs is None:
        return []
    lines = [f"inputs of {inputs['table']} version {inputs['version']}"]
    if inputs["left_out"]:
        lines.append(
            f"left out {inputs['left_out']:,} rows whose keys are not in it: they stay in the measurements, and enter "
            f"the next snapshot once the table has their keys"
        )
    return lines


def _format_error(errors: Mapping[str, Any] | None, name: str) -> str:
    """Return a parameter's standard error in brackets, or nothing."""
    if errors is None or name not in errors:
        return ""
    error = json.dumps(convert_to_json(round_numbers(errors[name], 3)))
    return "" if error == "null" else f" (standard error {error})"


if __name__ == "__main__":
    run.main()
