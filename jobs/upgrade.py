"""Upgrade a model's stream to another version: no row is lost or counted twice, and a roll-back undoes it.

Each step detects the work of an earlier, killed attempt, so a retry converges to the same end. docs/upgrades.md
describes the modes and when to choose each.
"""

from __future__ import annotations

from typing import Annotated

from typer import Option

from jobs.core.command import Model, timed
from jobs.core.errors import ALREADY_RUNNING, UserError
from jobs.core.progress import Progress
from jobs.core.report import Report
from jobs.core.settings import Settings


@timed
def run(
    settings: Settings,
    model: Model,
    mode: Annotated[
        str, Option(help="blue-green, stop-start, retrain, stateless or repartition (docs/upgrades.md).")
    ] = "blue-green",
    partitions: Annotated[
        int | None,
        Option(
            min=1,
            help="With mode repartition: how many state partitions, if the spec has no stream.partitions.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        Option(
            "--dry-run",
            help="Report how the states would change; change nothing. Spark exports the state for it, except in modes "
            "retrain and stateless.",
        ),
    ] = False,
    promote: Annotated[bool, Option(help="Promote a new version that compares well (blue-green).")] = True,
    lose_state: Annotated[
        bool, Option("--lose-state", help="Allow mode stateless to forget every key.")
    ] = False,
    force: Annotated[
        bool,
        Option(
            "--force",
            help="Promote the new version whatever the comparison says, even without a row to compare.",
        ),
    ] = False,
    needed: Annotated[
        bool,
        Option(
            "--needed",
            help="Exit code 3 if there is nothing to upgrade, or the comparison cannot tell yet.",
        ),
    ] = False,
    catch_up: Annotated[
        bool,
        Option(
            "--catch-up",
            help="If the live stream lags its shadow and no driver runs it, let it read the same rows before the "
            "comparison (blue-green).",
        ),
    ] = False,
    drain: Annotated[
        bool,
        Option("--drain", help="Stop the stream first, and let Airflow start it again (not blue-green)."),
    ] = False,
) -> Report:
    """Upgrade the stream to the version of the model's spec, proved on live data first; or change its state's layout.

    Raises:
        UserError: no live generation, no migration between the versions, a driver in the way, a new version that
            predicts worse, or a comparison that cannot decide.
    """
    from jobs.insight.comparison_page import compare
    from jobs.lineage import generations, live_rows
    from jobs.lineage.generations import DeployedModel
    from jobs.spark.conf import build_interpreted_conf
    from jobs.spark.session import open_warehouse
    from jobs.state.kernel import load_checked_spec
    from jobs.storage.tables import need_measurements
    from jobs.upgrades.context import BLUE_GREEN, REPARTITION, STATELESS, UpgradeContext
    from jobs.upgrades.modes import MODES, upgrade

    if mode not in MODES:
        raise UserError(f"--mode {mode}: choose one of {', '.join(MODES)}")
    if mode == STATELESS and not lose_state:
        raise UserError("--mode stateless discards every key's state: add --lose-state to confirm")
    if drain and mode == BLUE_GREEN:
        raise UserError(
            "--drain stops the stream, and --mode blue-green keeps it running: leave one of them out"
        )
    if catch_up and mode != BLUE_GREEN:
        raise UserError("--catch-up is for --mode blue-green, whose comparison needs the same rows")
    if partitions is not None and mode != REPARTITION:
        raise UserError(
            "--partitions is for --mode repartition: a new version takes stream.partitions from its spec"
        )
    spec = load_checked_spec(model, settings.models)
    title = f"upgrade {spec.name}"
    kafka = spec.speaks_to_kafka
    warehouse = open_warehouse(
        settings, title, build_interpreted_conf(), kafka, reads_all_of=None if kafka else spec.name
    )
    need_measurements(warehouse, spec.name)
    with Progress(title, None, quiet=settings.quiet) as progress:
        live = generations.read_named(warehouse, spec.name)
        context = UpgradeContext(
            settings,
            DeployedModel(spec, warehouse),
            live,
            progress,
            compare,
            dry_run,
            promote,
            partitions,
            drain,
            force,
            needed,
            catch_up,
        )
        outcome = upgrade(context, mode)
        if not dry_run:
            live_rows.refresh_live_table(warehouse, spec.name)
    lines, data = outcome
    if needed and not data.get("upgraded", True):
        raise UserError(lines[0], ALREADY_RUNNING)
    return Report(lines, {"model": spec.name, "to": spec.version, "mode": mode, **data})


if __name__ == "__main__":
    run.main()
