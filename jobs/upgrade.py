"""Upgrade a model's stream to another version: no row is lost or counted twice, and a roll-back undoes it.

Each step finds what an earlier, killed attempt has left, so a retry converges to the same end. docs/upgrades.md says
what each mode does and when to choose it.
"""

from __future__ import annotations

import time

from jobs.core.errors import ALREADY_RUNNING, UserError
from jobs.core.progress import Progress
from jobs.core.report import Report
from jobs.core.settings import Settings
from jobs.lineage import generations
from jobs.specs.loading import load_spec
from jobs.upgrades.context import BLUE_GREEN, REPARTITION, STATELESS, UpgradeContext
from jobs.upgrades.modes import MODES
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.tables import need_measurements


def run(
    settings: Settings,
    model: str,
    mode: str = BLUE_GREEN,
    dry_run: bool = False,
    promote: bool = True,
    lose_state: bool = False,
    needed: bool = False,
    partitions: int | None = None,
    drain: bool = False,
) -> Report:
    """Bring a model's stream to the version of its spec, or its state to another layout.

    Args:
        settings: of the command.
        model: name or path of its spec.
        mode: one of `MODES`.
        dry_run: say what would become of the states, and write nothing but an export.
        promote: in mode blue-green, let the new generation take over if the comparison is good.
        lose_state: must be true for mode stateless.
        needed: end with exit code 3 where there is nothing to upgrade.
        partitions: of mode repartition: how many state partitions; by default as the spec says, else as many as now.
        drain: in the modes that need a stopped stream stop it first, and let Airflow start it again after.

    Raises:
        UserError: no live generation, no way between the versions, a driver in the way, a new version that is worse.
    """
    from jobs.spark.conf import interpreted_conf
    from jobs.spark.session import spark_session

    started = time.monotonic()
    if mode not in MODES:
        raise UserError(f"--mode {mode}: choose one of {', '.join(MODES)}")
    if mode == STATELESS and not lose_state:
        raise UserError("--mode stateless discards every key's state: add --lose-state to confirm")
    if drain and mode == BLUE_GREEN:
        raise UserError(
            "--drain stops the stream, and --mode blue-green keeps it running: leave one of them out"
        )
    if partitions is not None and mode != REPARTITION:
        raise UserError(
            "--partitions is for --mode repartition: a new version takes stream.partitions from its spec"
        )
    spec = load_spec(model, settings.models, deep=True)
    spark = spark_session(settings, f"upgrade {spec.name}", interpreted_conf(), spec.speaks_to_kafka)
    warehouse = Warehouse(spark, settings.warehouse)
    need_measurements(warehouse, spec.name)
    with Progress(f"upgrade {spec.name}", None, quiet=settings.quiet) as progress:
        live = generations.named(warehouse, spec.name)
        context = UpgradeContext(
            settings, warehouse, spec, live, progress, dry_run, promote, partitions, drain
        )
        lines, data = MODES[mode](context)
    if needed and not data.get("upgraded", True):
        raise UserError(lines[0], ALREADY_RUNNING)
    return Report(
        [*lines, f"{time.monotonic() - started:.1f} s"],
        {"model": spec.name, "to": spec.version, "mode": mode, **data, "seconds": time.monotonic() - started},
    )


if __name__ == "__main__":
    from jobs.cli import main

    main("upgrade")
