"""Estimate every row of a table in batch, with the same bits as the stream's estimates of these rows.

The rows of an interval of event time are replaced in the table, never doubled, in a few commits, each of some of the
keys. A run that was killed is continued after its last commit (`jobs.batch.history_table`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Option

from jobs.core.command import Model, Profile, timed
from jobs.core.progress import Progress
from jobs.core.report import Report, format_count
from jobs.core.settings import Settings

if TYPE_CHECKING:
    from jobs.batch.estimating import EstimateResult
    from jobs.specs.model_spec import ModelSpec


@timed
def run(
    settings: Settings,
    model: Model,
    since: Annotated[
        str | None,
        Option("--from", help="Estimate rows from this event time on (ISO 8601); by default from the first."),
    ] = None,
    to: Annotated[
        str | None, Option(help="Estimate rows before this event time (ISO 8601); by default to the last.")
    ] = None,
    snapshot: Annotated[
        str | None,
        Option(
            help="Take learned parameters from this snapshot, and its states if it reflects exactly the rows before "
            "--from; `none`: the spec's values. By default the newest such snapshot, else the newest good one."
        ),
    ] = None,
    smooth: Annotated[
        bool,
        Option(
            "--smooth", help="Also smooth: estimate each row's state from all rows of its key before --to."
        ),
    ] = False,
    input: Annotated[
        str | None,
        Option(
            help="Read this in place of the measurements: a Delta table, by its name in the warehouse or its path; or "
            "a file, a folder or a glob, as ingest reads them."
        ),
    ] = None,
    output: Annotated[
        str | None, Option(help="Delta table to write, by name or path; by default estimates_history/MODEL.")
    ] = None,
    to_version: Annotated[
        int | None, Option(min=0, help="Read the table at this Delta version; by default the newest.")
    ] = None,
    profile: Profile = False,
) -> Report:
    """Estimate every row of the measurements, or of any table, in batch.

    Raises:
        UserError: an option, the rows or the snapshot cannot be used.
    """
    from jobs.batch.batch_filter import Interval
    from jobs.batch.estimating import EstimateRequest, estimate
    from jobs.lineage.generations import DeployedModel
    from jobs.spark.conf import build_short_rows_conf
    from jobs.spark.job_labels import build_task_counter
    from jobs.spark.session import open_warehouse
    from jobs.state.kernel import load_checked_spec
    from jobs.supervision.batch_profile import VerbProfiler

    profiler = VerbProfiler(profile)
    spec = load_checked_spec(model, settings.models)
    interval = Interval.parse(since, to, ("--from", "--to"))
    warehouse = open_warehouse(settings, f"estimate {spec.name}", build_short_rows_conf())
    with Progress(f"estimate {spec.name}", None, quiet=settings.quiet) as progress:
        progress.follow(build_task_counter(warehouse))
        request = EstimateRequest(interval, snapshot, smooth, input, output, to_version)
        result = estimate(DeployedModel(spec, warehouse), request, progress.note)
    return profiler.added_to(_report(spec, result))


def _report(spec: ModelSpec, result: EstimateResult) -> Report:
    counts, start = result.counts, result.start
    of = "" if result.version is None else f" of version {result.version}"
    lines = [f"run {result.run}: {format_count(result.written, 'row')} estimated{of} -> {result.table}"]
    if not result.commits:
        lines = [f"run {result.run}{of} had already been committed: the same rows give the same estimates"]
    elif result.continued:
        lines.append(
            "it had been interrupted: what it had committed was kept, and the rest was estimated now"
        )
    elif result.written < counts.rows:
        lines.append(
            f"without an estimate: {format_count(counts.rows - result.written, 'row')} that are duplicates, "
            f"or of keys that "
            f"have no valid state"
        )
    lines += _explain_left_out(spec, result)
    if result.commits and not counts.rows:
        lines.append("warning: there are no rows in the interval")
    lines.append(_start_line(result))
    data = {
        "model": spec.name,
        "model_version": spec.version,
        "run": result.run,
        "table": result.table,
        "version": result.version,
        "made": result.commits > 0,
        "continued": result.continued,
        "commits": result.commits,
        "rows": result.written,
        "rows_in_interval": counts.rows,
        "rows_before": counts.before,
        "unfit": counts.unfit,
        "rejected_by_reason": {reason: one.rows for reason, one in result.rejected.items()},
        "without_inputs": counts.without_inputs,
        "snapshot": None if start.manifest is None else start.manifest.snapshot_id,
        "began_from_states": start.before is not None,
    }
    return Report(lines, data)


def _explain_left_out(spec: ModelSpec, result: EstimateResult) -> list[str]:
    """Return which rows have no estimate, and what mends it."""
    from jobs.landing.values.rejected import explain_reasons

    counts, rejected = result.counts, result.rejected
    lines = []
    if counts.unfit:
        by_reason = {reason: one.rows for reason, one in rejected.items()}
        reasons = "; ".join(f"{rows:,} {reason}" for reason, rows in sorted(by_reason.items()))
        lines.append(f"left out: {format_count(counts.unfit, 'row')} that ingest would quarantine: {reasons}")
        examples = {reason: one.example for reason, one in rejected.items()}
        lines += [f"  {line}" for line in explain_reasons(spec, by_reason, examples)]
    if counts.without_inputs:
        lines.append(f"left out: {format_count(counts.without_inputs, 'row')} whose keys have no inputs")
    return lines


def _start_line(result: EstimateResult) -> str:
    """Return where parameters and states came from."""
    manifest = result.start.manifest
    owner = "the spec's" if manifest is None else f"snapshot {manifest.snapshot_id}: its"
    if result.start.before is not None:
        return f"{owner} parameters, and its states before the interval"
    before = format_count(result.counts.before, "row")
    return f"{owner} parameters; {before} before the interval filtered, from each key's first"


if __name__ == "__main__":
    run.main()
