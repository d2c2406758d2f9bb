"""Remove what nothing needs any more, and compact and vacuum the tables.

`jobs.operations.retention_plan` decides what is removed. Every step is a commit, or finds by itself what is left to do:
killed between any two steps, a retry converges to the same end. A generation or snapshot is first marked as removed, in
one commit, and only then its checkpoint and report, or its rows, are removed; so nothing reads a half removed one.

The measurements are not touched. Their versions are the positions of streams, snapshots and backfills, so every version
must stay readable, which OPTIMIZE with VACUUM would end.
"""

from __future__ import annotations

import time

from jobs.core.progress import Progress
from jobs.core.report import Report
from jobs.core.settings import Settings
from jobs.operations.maintenance import Maintenance
from jobs.specs.loading import load_spec
from jobs.warehouse.delta import Warehouse


def run(settings: Settings, model: str, dry_run: bool = False, estimates: bool = False) -> Report:
    """Take away what the model's spec (`retention`) lets go, and what nothing needs. Again it changes nothing more.

    Args:
        settings: of the command.
        model: name or path of its spec.
        dry_run: say what would go, and change nothing.
        estimates: also let estimates go that belong to removed generations and are no part of the live ones.

    Raises:
        UserError: another command has just changed the model's generations, or a table refuses.
    """
    from jobs.spark.conf import short_command_conf
    from jobs.spark.session import spark_session

    started = time.monotonic()
    spec = load_spec(model, settings.models)
    warehouse = Warehouse(
        spark_session(settings, f"maintain {spec.name}", short_command_conf()), settings.warehouse
    )
    with Progress(f"maintain {spec.name}", None, quiet=settings.quiet) as progress:
        work = Maintenance(warehouse, spec, dry_run, estimates or spec.retention.estimates, progress.note)
        work.run()
    seconds = time.monotonic() - started
    return Report(
        [*work.lines(), f"{seconds:.1f} s"],
        {"model": spec.name, "dry_run": dry_run, **work.result, "seconds": seconds},
    )


if __name__ == "__main__":
    from jobs.cli import main

    main("maintain")
