"""Report the status of every model: landed rows, snapshots, generations, and the position and lag of its stream."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from jobs.core.command import answer, parse_duration_option
from jobs.core.report import Report, format_rate, show_again
from jobs.core.settings import Settings

if TYPE_CHECKING:
    from jobs.lineage.catalog import Catalog
    from jobs.storage.warehouse import Tables

_READERS = 16
"""Number of models that are read at once."""
NUMBERS = ("landed", "quarantined", "keys", "position", "behind")


@answer
def run(
    settings: Settings,
    model: Annotated[str | None, Option(help="Only this model.")] = None,
    watch: Annotated[bool, Option("--watch", help="Refresh the table until Ctrl-C.")] = False,
    every: Annotated[float, Option(min=0.5, help="With --watch: seconds between refreshes.")] = 5.0,
    alarm_after: Annotated[
        str | None,
        Option(help="Fail if a stream has rows to read but has read none for this long, such as 10m."),
    ] = None,
) -> Report:
    """Show models, snapshots, generations, positions, lag and the last error.

    Raises:
        UserError: the model is unknown, or `alarm_after` is not a duration.
    """
    from jobs.storage.warehouse import Tables

    after = (
        None
        if alarm_after is None
        else parse_duration_option("--alarm-after", re.sub("m$", "min", alarm_after)).total_seconds()
    )
    tables = Tables(settings.warehouse)

    def look() -> Report:
        return _report(settings, tables, model, after)

    return show_again(look, every, settings.json) if watch else look()


def _report(settings: Settings, warehouse: Tables, model: str | None, after: float | None) -> Report:
    from jobs.insight.status import find_alarms, read_status
    from jobs.lineage.catalog import Catalog
    from jobs.specs.loading import find_deployed_spec, list_model_names, load_spec
    from jobs.verification.runs import read_last_outcomes

    catalog = Catalog(warehouse)
    if model is None:
        names = sorted({*list_model_names(settings.models), *catalog.models})
    else:
        names = [find_deployed_spec(model, settings.models)[0]]
        if names[0] not in catalog.models:
            load_spec(model, settings.models)  # raises an error if there is no such model
    with ThreadPoolExecutor(_READERS) as readers:  # a store answers many questions in the time of one
        data = list(readers.map(partial(read_status, catalog, read_last_outcomes(warehouse)), names))
    advice = _list_advice(settings, catalog, names)
    problems = [] if after is None else find_alarms(data, after, datetime.now(UTC))
    return Report(
        [],
        {"warehouse": settings.warehouse, "models": data, "alarms": problems, "advice": advice},
        _build_table(settings.warehouse, data, advice),
        problems,
    )


def _list_advice(settings: Settings, catalog: Catalog, names: list[str]) -> list[str]:
    """Return what was measured of these models says about their layout and retention."""
    from jobs.insight.status import advise, describe_other_version, measure_stream
    from jobs.specs.loading import describe_broken_spec, find_deployed_spec

    found: list[str] = []
    cores = os.cpu_count() if settings.master.startswith("local") else None
    for name in names:
        spec = find_deployed_spec(name, settings.models)[1]
        broken = describe_broken_spec(name, spec, settings.models)
        found += filter(None, [broken or describe_other_version(catalog, name, spec)])
        found += advise(measure_stream(catalog, name, spec, cores), datetime.now(UTC))
    return found


def _build_table(root: str, data: list[dict[str, Any]], advice: list[str]) -> Any:
    from rich import box
    from rich.console import Group
    from rich.table import Table

    from jobs.downstream.queries import build_downstream_table
    from jobs.insight.status import ENDED

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
        "last micro-batch",
        "driver",
    ):
        table.add_column(column, justify="right" if column in NUMBERS else "left")
    errors: list[str] = []
    for one in data:
        landed, last = one["measurements"], one["snapshots"][-1:]
        lineages = (
            [g for g in one["generations"] if g["status"] not in ENDED] or one["generations"][-1:] or [None]
        )
        for lineage in lineages:
            table.add_row(
                one["model"],
                f"{landed['rows']:,}" if landed["version"] is not None else "-",
                f"{landed['quarantined']:,}",
                last[0]["snapshot"] if last else "-",
                f"{last[0]['keys']:,}" if last else "-",
                *(["-"] * 5 if lineage is None else _format_lineage(lineage, landed["version"])),
            )
            if lineage is not None and lineage["last_error"]:
                errors.append(f"{lineage['generation']}: last error: {lineage['last_error']}")
    errors += [text for one in data for text in one["given_up"]]
    errors += [f"advice: {one}" for one in advice]
    followed = build_downstream_table(data)
    return Group(table, *([] if followed is None else [followed]), *errors)


def _format_lineage(lineage: dict[str, Any], newest: int | None) -> list[str]:
    """Return the cells of a generation; newest: the latest version of the measurements."""
    from jobs.downstream.queries import format_driver
    from jobs.storage.positions import KAFKA, describe

    waiting, position = lineage["rows_behind"], lineage["position"]
    return [
        f"{lineage['generation']} ({lineage['status']}, v{lineage['model_version']})",
        describe(position) if position["source"] == KAFKA else f"{lineage['version']} of {newest}",
        "-" if waiting is None else f"{waiting:,} rows",
        _format_last_batch(lineage),
        format_driver(lineage),
    ]


def _format_last_batch(lineage: dict[str, Any]) -> str:
    at: datetime | None = lineage["last_batch_at"]
    if at is None:
        return "-"
    last = lineage["progress"] or {}
    speed = f", {format_rate(last['rows_per_second'], 1.0)}" if last.get("rows_per_second") else ""
    return f"{at.astimezone(UTC):%m-%d %H:%M:%S}{speed}"


if __name__ == "__main__":
    run.main()
