"""Remove data that nothing needs any more, and compact and vacuum the tables.

`jobs.insight.retention_plan` decides what is removed. Every step is a commit, or finds by itself what is left to do:
killed between any two steps, a retry converges to the same end. A generation or snapshot is first marked as removed, in
one commit, and only then its checkpoint and report, or its rows, are removed; so nothing reads a half removed one.

The measurements are not touched. Their versions are the positions of streams, snapshots and backfills, so every version
must stay readable. OPTIMIZE with VACUUM would break that.
"""

from __future__ import annotations

from typing import Annotated

from typer import Option

from jobs.core.command import Model, timed
from jobs.core.progress import Progress
from jobs.core.report import Report
from jobs.core.settings import Settings


@timed
def run(
    settings: Settings,
    model: Model,
    dry_run: Annotated[
        bool,
        Option(
            "--dry-run",
            help="Report what would be removed; change nothing. Without Spark.",
        ),
    ] = False,
    estimates: Annotated[
        bool,
        Option(
            "--estimates",
            help="Also remove estimates of removed generations that are no part of the live ones.",
        ),
    ] = False,
) -> Report:
    """Remove what the spec's `retention` allows and nothing needs; compact and vacuum the tables. Idempotent.

    Raises:
        UserError: another command has just changed the model's generations, or a table cannot be changed.
    """
    from jobs.insight.maintenance import Maintenance, format_result
    from jobs.lineage.generations import DeployedModel
    from jobs.spark.conf import build_short_command_conf
    from jobs.spark.session import open_warehouse
    from jobs.specs.loading import load_spec

    spec = load_spec(model, settings.models)
    title, with_estimates = f"maintain {spec.name}", estimates or spec.retention.estimates
    warehouse = open_warehouse(settings, title, build_short_command_conf())
    with Progress(title, None, quiet=settings.quiet) as progress:
        work = Maintenance(DeployedModel(spec, warehouse), dry_run, with_estimates, progress.note)
        work.run()
    lines = format_result(spec.name, work.result, dry_run)
    return Report(lines, {"model": spec.name, "dry_run": dry_run, **work.result})


if __name__ == "__main__":
    run.main()
