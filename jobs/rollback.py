"""Make an earlier version live again: from its own checkpoint, or with the newer version's state, migrated back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Option

from jobs.core.command import Model, command
from jobs.core.errors import UserError
from jobs.core.progress import Progress
from jobs.core.report import Report
from jobs.core.settings import Settings

if TYPE_CHECKING:
    from jobs.lineage.generations import Generation
    from jobs.specs.model_spec import ModelSpec
    from jobs.storage.warehouse import Tables
    from jobs.upgrades.reverse_migration import ReversedMigration


@command
def run(
    settings: Settings,
    model: Model,
    to: Annotated[str | None, Option(help="A retired generation; by default the previous one.")] = None,
    last_state: Annotated[
        bool,
        Option(
            "--last-state",
            help="Continue from the live generation's state, migrated back, not from the older checkpoint.",
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        Option(
            "--dry-run",
            help="With --last-state: report how the states would change. Spark exports the state for it.",
        ),
    ] = False,
) -> Report:
    """Make the previous version live again, from its own checkpoint or with the last state. Idempotent.

    Raises:
        UserError: there is no generation to roll back to, or the state cannot be migrated back.
    """
    from jobs.lineage import live_rows
    from jobs.specs.loading import load_spec
    from jobs.storage.warehouse import Tables

    if dry_run and not last_state:
        raise UserError("--dry-run is for --last-state: without it no state changes")
    spec, tables = load_spec(model, settings.models), Tables(settings.warehouse)
    if last_state:
        report = _migrate_last_state(settings, spec, to, dry_run)
    else:
        report = _resume_checkpoint(tables, spec, to)
    if not dry_run:  # even without a change: an earlier attempt may have ended just before
        live_rows.refresh_live_table(tables, spec.name)
    return report


def _resume_checkpoint(warehouse: Tables, spec: ModelSpec, to: str | None) -> Report:
    from jobs.lineage import generations, promotion
    from jobs.storage.positions import describe

    live, retired = promotion.roll_back(warehouse, spec.name, to)
    lines = [
        f"generation {live.generation} of version {live.model_version} is live again, at "
        f"{describe(generations.read_position(warehouse, live))}: `kalman-pipeline stream --model {spec.name}` "
        f"resumes it from there"
    ]
    if retired is not None:
        lines.append(f"{retired.generation} of version {retired.model_version} is retired")
    return Report(lines, _build_data(spec, live, retired))


def _migrate_last_state(settings: Settings, spec: ModelSpec, to: str | None, dry_run: bool) -> Report:
    from jobs.lineage.generations import DeployedModel
    from jobs.spark.conf import build_short_command_conf
    from jobs.spark.session import open_warehouse
    from jobs.state.kernel import check_numerics
    from jobs.upgrades.reverse_migration import reverse_migration

    title = f"rollback {check_numerics(spec).name}"
    warehouse = open_warehouse(settings, title, build_short_command_conf())
    with Progress(title, None, quiet=settings.quiet) as progress:
        done = reverse_migration(DeployedModel(spec, warehouse), to, dry_run, progress.note)
    return _report_migration(spec, done)


def _report_migration(spec: ModelSpec, done: ReversedMigration) -> Report:
    from jobs.storage.positions import describe
    from jobs.upgrades.migration.apply import format_change

    live, retired = done.live, done.retired
    data = {
        **_build_data(spec, live, retired),
        "snapshot": done.snapshot,
        "change": done.change,
        "dry_run": done.dry,
    }
    table = format_change(spec.name, done.change)
    if done.dry:
        first = f"the state of {live.generation} (version {live.model_version})"
        before = [f"migrated back before: snapshot {done.snapshot}"] if done.snapshot else []
        return Report([first, *before, *table, "dry run: nothing was written but the export"], data)
    if retired is None:
        return Report(
            [f"generation {live.generation} is of version {live.model_version}: nothing to do"], data
        )
    return Report(
        [
            f"generation {live.generation} of version {live.model_version} is live, from snapshot {done.snapshot} "
            f"({describe(live.start_position)}): the state of {retired.generation}, migrated back",
            *table,
            f"{retired.generation} of version {retired.model_version} is retired",
            f"continue with `kalman-pipeline stream --model {spec.name}`",
        ],
        data,
    )


def _build_data(spec: ModelSpec, live: Generation, retired: Generation | None) -> dict[str, object]:
    return {
        "model": spec.name,
        "generation": live.generation,
        "model_version": live.model_version,
        "retired": retired and retired.generation,
    }


if __name__ == "__main__":
    run.main()
