"""Remove what nothing needs any more, and compact and vacuum the tables.

`jobs.operations.retention_plan` decides what is removed. Every step is a commit, or finds by itself what is left to do:
killed between any two steps, a retry converges to the same end. A generation or snapshot is first marked as removed, in
one commit, and only then its checkpoint and report, or its rows, are removed; so nothing reads a half removed one.

The measurements are not touched. Their versions are the positions of streams, snapshots and backfills, so every version
must stay readable, which OPTIMIZE with VACUUM would end.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from jobs.core.command import Model, command
from jobs.core.progress import Progress
from jobs.core.report import Report
from jobs.core.settings import Settings

if TYPE_CHECKING:
    from jobs.specs.model_spec import ModelSpec


@command
def run(
    settings: Settings,
    model: Model,
    dry_run: Annotated[
        bool,
        Option(
            "--dry-run",
            help="Report what would be removed; change nothing. Of a local warehouse without Spark.",
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
    from jobs.operations.maintenance_preview import preview, result_lines
    from jobs.specs.loading import load_spec
    from jobs.storage.warehouse import Tables

    started = time.monotonic()
    spec = load_spec(model, settings.models)
    with_estimates = estimates or spec.retention.estimates
    if dry_run:
        result = preview(Tables(settings.warehouse), spec, with_estimates)
    else:
        result = _maintained(settings, spec, with_estimates)
    seconds = time.monotonic() - started
    return Report(
        [*result_lines(spec.name, result, dry_run), f"{seconds:.1f} s"],
        {"model": spec.name, "dry_run": dry_run, **result, "seconds": seconds},
    )


def _maintained(settings: Settings, spec: ModelSpec, with_estimates: bool) -> dict[str, Any]:
    """Maintain with Spark, and return what was removed."""
    from jobs.operations.maintenance import Maintenance
    from jobs.spark.conf import short_command_conf
    from jobs.spark.session import spark_session
    from jobs.spark.warehouse import Warehouse

    spark = spark_session(settings, f"maintain {spec.name}", short_command_conf())
    with Progress(f"maintain {spec.name}", None, quiet=settings.quiet) as progress:
        work = Maintenance(Warehouse(spark, settings.warehouse), spec, False, with_estimates, progress.note)
        work.run()
    return work.result


if __name__ == "__main__":
    run.main()
