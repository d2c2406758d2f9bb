"""Say where every model stands: what has landed, its snapshots, its generations, how far its stream has come."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from jobs.errors import UserError
from jobs.positions import KAFKA, said
from jobs.quarantine_table import held_by_model
from jobs.report import Report
from jobs.settings import Settings
from jobs.spec import load_spec, spec_files
from jobs.tables import Warehouse, measurements

if TYPE_CHECKING:
    from jobs.generations import Generation
    from jobs.snapshots import Manifest


NUMBERS = ("landed", "quarantined", "keys", "position", "behind")


def run(settings: Settings, model: str | None = None) -> Report:
    """Report on one model, or on all that have a spec or anything in the warehouse.

    Raises:
        UserError: the model is unknown.
    """
    from jobs import generations, snapshots
    from jobs.session import spark_session
    from jobs.spark_conf import glance_conf

    names = [load_spec(model, settings.models).name] if model else _spec_names(settings)
    spark = spark_session(settings, "status", glance_conf())
    warehouse = Warehouse(spark, settings.warehouse)
    manifests, lineages = snapshots.all_of(warehouse), generations.all_of(warehouse)
    if model is None:
        names = sorted({*names, *(one.model for one in manifests), *(one.model for one in lineages)})
    quarantined = held_by_model(warehouse)
    data = [
        _model(
            warehouse,
            name,
            [one for one in manifests if one.model == name],
            [one for one in lineages if one.model == name],
            quarantined.get(name, 0),
        )
        for name in names
    ]
    return Report([], {"warehouse": settings.warehouse, "models": data}, _table(settings.warehouse, data))


def _spec_names(settings: Settings) -> list[str]:
    try:
        return [path.stem for path in spec_files(settings.models)]
    except UserError:
        return []  # a warehouse can be looked at without the specs


def _model(
    warehouse: Warehouse, name: str, manifests: list[Manifest], lineages: list[Generation], quarantined: int
) -> dict[str, Any]:
    table = measurements(name)
    landed = warehouse.exists(table)
    version = warehouse.latest_version(table) if landed else None
    return {
        "model": name,
        "measurements": {
            "version": version,
            "rows": warehouse.read(table).count() if landed else 0,
            "quarantined": quarantined,
        },
        "snapshots": [
            {
                "snapshot": one.snapshot_id,
                "model_version": one.model_version,
                "version": one.version,
                "cut": one.cut,
                "keys": one.key_count,
                "rows": one.rows,
                "status": one.status,
                "committed_at": one.committed_at,
            }
            for one in manifests
        ],
        "generations": [_lineage(warehouse, one, version) for one in lineages],
    }


def _lineage(warehouse: Warehouse, one: Generation, newest: int | None) -> dict[str, Any]:
    from jobs.checkpoints import Checkpoint
    from jobs.generations import position_of
    from jobs.owners import Owner

    checkpoint = Checkpoint(warehouse, one.checkpoint)
    done = checkpoint.progressed()
    version = one.start_version if done is None else done.version
    holder = Owner.parse(one.owner)
    running = holder is not None and holder.alive(one.heartbeat)
    return {
        "generation": one.generation,
        "model_version": one.model_version,
        "status": one.status,
        "snapshot": one.snapshot_id,
        "batches": 0 if done is None else done.batch + 1,
        "version": version,
        "position": position_of(warehouse, one),
        "versions_behind": None
        if one.topic is not None or newest is None or one.status == "retired"
        else max(0, newest - version),
        "rows_behind": None
        if one.topic is not None or one.status == "retired"
        else _rows_behind(warehouse, one.model, version),
        "driver": None if holder is None or not running else {"host": holder.host, "pid": holder.pid},
        # A lease whose driver is gone: it was killed, and the next start goes on from the checkpoint.
        "driver_lost": holder is not None and not running,
        "heartbeat": one.heartbeat,
        "last_error": one.last_error,
    }


def _rows_behind(warehouse: Warehouse, model: str, version: int) -> int | None:
    """Return how many landed rows the stream has still to take, as the table's own log counts them."""
    from delta.tables import DeltaTable
    from pyspark.sql import functions as F

    if not warehouse.exists(measurements(model)):
        return None
    history = DeltaTable.forPath(warehouse.spark, warehouse.path(measurements(model))).history()
    added = F.col("operationMetrics")["numOutputRows"].try_cast("bigint")
    row = (
        history.filter((F.col("version") > version) & (F.col("operation") == "WRITE"))
        .agg(F.sum(added))
        .first()
    )
    return int(row[0] or 0) if row is not None else None


def _table(root: str, data: list[dict[str, Any]]) -> Any:
    from rich import box
    from rich.console import Group
    from rich.table import Table

    table = Table(title=f"warehouse {root}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in (
        "model",
        "landed",
        "quarantined",
        "newest snapshot",
        "keys",
        "generation",
        "position",
        "behind",
        "driver",
    ):
        table.add_column(column, justify="right" if column in NUMBERS else "left")
    errors: list[str] = []
    for one in data:
        landed, last = one["measurements"], one["snapshots"][-1:]
        shown = (
            [g for g in one["generations"] if g["status"] != "retired"] or one["generations"][-1:] or [None]
        )
        for lineage in shown:
            table.add_row(
                one["model"],
                f"{landed['rows']:,}" if landed["version"] is not None else "-",
                f"{landed['quarantined']:,}",
                last[0]["snapshot"] if last else "-",
                f"{last[0]['keys']:,}" if last else "-",
                "-" if lineage is None else f"{lineage['generation']} ({lineage['status']})",
                "-" if lineage is None else _place(lineage, landed["version"]),
                "-"
                if lineage is None or lineage["rows_behind"] is None
                else f"{lineage['rows_behind']:,} rows",
                "-" if lineage is None else _driver(lineage),
            )
            if lineage is not None and lineage["last_error"]:
                errors.append(f"{lineage['generation']}: last error: {lineage['last_error']}")
    return Group(table, *errors)


def _place(lineage: dict[str, Any], newest: int | None) -> str:
    """Return how far a generation has come, and of how much where that is known."""
    if lineage["position"]["source"] == KAFKA:
        return said(lineage["position"])
    return f"{lineage['version']} of {newest}"


def _driver(lineage: dict[str, Any]) -> str:
    if lineage["driver"]:
        return f"process {lineage['driver']['pid']} on {lineage['driver']['host']}"
    if lineage["driver_lost"]:
        beat: datetime | None = lineage["heartbeat"]
        seen = "" if beat is None else f", seen {beat.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
        return f"lost{seen}"
    return "none"


if __name__ == "__main__":
    from jobs.cli import main

    main("status")
