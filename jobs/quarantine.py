"""Look at rejected rows, land them after a fix (each at most once), or put them away; `maintain` removes them later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from jobs.core.command import Actions, Model, command
from jobs.core.errors import UserError
from jobs.core.report import Report, plural
from jobs.core.settings import Settings
from jobs.specs.loading import load_spec
from jobs.warehouse import quarantine
from jobs.warehouse.delta import Warehouse, utc
from jobs.warehouse.quarantine import DISCARDED, HELD, REPLAYED, REPLAYING, TABLE, Choice

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from jobs.ingestion.quarantine_replay import Outcome

ACTIONS = ("list", "show", "replay", "discard")


def act(
    settings: Settings,
    action: str,
    model: str,
    choice: Choice | None = None,
    *,
    limit: int = 20,
    output: str | None = None,
    edited: str | None = None,
    everything: bool = False,
) -> Report:
    """Do one of `ACTIONS` with a model's rejected rows.

    Args:
        settings: of the command.
        action: `list` sums up, `show` shows rows, `replay` lands those that fit now, `discard` puts rows away.
        model: name or path of its spec.
        choice: which rows.
        limit: rows that `show` shows at most.
        output: file of JSON lines to which `show` writes all the rows: id, reason and payload.
        edited: such a file with mended payloads; `replay` lands these rows, and no others.
        everything: discard all rows, if no condition is given.

    Raises:
        UserError: no such rows, or a file that cannot be read.
    """
    from pyspark.sql import functions as F

    from jobs.spark.conf import short_command_conf
    from jobs.spark.session import spark_session

    spec = load_spec(model, settings.models)
    choice = choice or Choice()
    if action == "discard" and choice.all and not everything:
        raise UserError("say which rows to discard: --reason, --since or --id, or --all for every held one")
    mended = None if edited is None else _read_edited(edited)
    spark = spark_session(settings, f"quarantine {spec.name}", short_command_conf())
    warehouse = Warehouse(spark, settings.warehouse)
    if not quarantine.ready(warehouse):
        return Report([f"nothing of {spec.name} is in quarantine"], {"model": spec.name, "rows": 0})
    meant = (F.col("model") == spec.name) & choice.condition()
    rows = warehouse.read(TABLE).filter(meant)
    if action == "list":
        return _list(spec.name, rows)
    held = rows.filter(F.col("status").isNull())
    if action == "show":
        return _show(spec.name, held, limit, output)
    if action == "discard":
        return _discard(warehouse, spec.name, meant & F.col("status").isNull())
    from jobs.ingestion.quarantine_replay import replay

    chosen = held if mended is None else _with_payloads(warehouse, held, mended)
    columns = ("id", "payload", "source", "generation", "batch_id")
    return _replayed(spec.name, spec.late, replay(warehouse, spec, chosen.select(*columns)))


def _list(model: str, rows: DataFrame) -> Report:
    from pyspark.sql import functions as F

    status = F.coalesce("status", F.lit(HELD))
    counts = [F.count(F.when(status == one, 1)).alias(one) for one in (HELD, REPLAYING, REPLAYED, DISCARDED)]
    found = (
        rows.groupBy("reason")
        .agg(*counts, F.min("quarantined_at").alias("first"), F.max("quarantined_at").alias("last"))
        .orderBy(F.desc(HELD), "reason")
        .collect()
    )
    data = [utc(row.asDict()) for row in found]
    held, begun = (sum(one[name] for one in data) for name in (HELD, REPLAYING))
    notes = [
        f"a replay of {begun:,} rows was interrupted: `kalman-pipeline quarantine replay --model {model}` ends it"
    ] * bool(begun)
    if not data:
        return Report([f"nothing of {model} is in quarantine"], {"model": model, "rows": 0, "reasons": []})
    return Report(
        [], {"model": model, "rows": held, "interrupted": begun, "reasons": data}, _table(model, data, notes)
    )


def _table(model: str, data: list[dict[str, Any]], notes: list[str]) -> Any:
    from rich import box
    from rich.console import Group
    from rich.table import Table

    table = Table(title=f"quarantine of {model}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("reason", HELD, REPLAYED, DISCARDED, "first", "last"):
        table.add_column(name, justify="left" if name in ("reason", "first", "last") else "right")
    for one in data:
        times = [f"{one[name]:%Y-%m-%d %H:%M}" for name in ("first", "last")]
        numbers = [f"{one[HELD] + one[REPLAYING]:,}", f"{one[REPLAYED]:,}", f"{one[DISCARDED]:,}"]
        table.add_row(one["reason"], *numbers, *times)
    return Group(table, *notes)


def _show(model: str, held: DataFrame, limit: int, output: str | None) -> Report:
    columns = ("id", "reason", "source", "position", "batch_id", "generation", "quarantined_at", "payload")
    ordered = held.select(*columns).orderBy("quarantined_at", "reason", "id")
    if output is not None:
        return _written(model, ordered, Path(output).expanduser())
    data = [utc(row.asDict()) for row in ordered.limit(limit).collect()]
    if not data:
        return Report([f"no such row of {model} is held"], {"model": model, "rows": []})
    lines: list[str] = []
    for one in data:
        where = (
            one["source"]
            if one["generation"] is None
            else f"{one['generation']}, micro-batch {one['batch_id']}"
        )
        lines += [
            f"{one['id']}  {one['reason']}",
            f"  {where}, {one['quarantined_at']:%Y-%m-%d %H:%M:%S} UTC",
            f"  {one['payload']}",
        ]
    if len(data) == limit:
        lines.append(f"shown are {limit} at most (--limit); --output FILE writes all")
    return Report(lines, {"model": model, "rows": data})


def _written(model: str, ordered: DataFrame, path: Path) -> Report:
    count = 0
    try:
        with path.open("w", encoding="utf-8") as file:
            for row in ordered.toLocalIterator():
                text = row["payload"]
                try:
                    payload = json.loads(text)
                except (TypeError, ValueError):
                    payload = text  # what was no JSON stays text
                line = {"id": row["id"], "reason": row["reason"], "payload": payload}
                print(json.dumps(line, ensure_ascii=False), file=file)
                count += 1
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error
    hint = f"kalman-pipeline quarantine replay --model {model} --edited {path}"
    return Report(
        [f"wrote {plural(count, 'row')} to {path}", f"mend the payloads there, then: {hint}"],
        {"model": model, "rows": count, "output": str(path)},
    )


def _discard(warehouse: Warehouse, model: str, meant: Column) -> Report:
    from pyspark.sql import functions as F

    count = warehouse.read(TABLE).filter(meant).count()
    if count:
        values = {"status": F.lit(DISCARDED), "resolved_at": F.current_timestamp()}
        quarantine.update(warehouse, meant, values)
    return Report(
        [f"discarded {plural(count, 'row')} of {model}: they stay, marked, until `maintain` removes them"],
        {"model": model, "discarded": count},
    )


def _replayed(model: str, late: str, outcome: Outcome) -> Report:
    lines = [f"landed {plural(outcome.landed, 'row')} of {model}"]
    if outcome.version is not None:
        lines[0] += f", up to version {outcome.version} of its measurements"
    if outcome.ended:
        lines.append(f"landed {plural(outcome.ended, 'row')} of a replay that had been interrupted")
    if outcome.late:
        again = " (late: quarantine refuses them again)" if late == "quarantine" else ""
        lines.append(
            f"{outcome.late:,} of them were late: they come at the end, and the stream decides again{again}"
        )
    stay = sum(outcome.reasons.values())
    if stay:
        said = "; ".join(f"{count:,} {reason}" for reason, count in sorted(outcome.reasons.items()))
        lines.append(f"quarantine keeps {plural(stay, 'row')} that still did not fit: {said}")
    return Report(
        lines,
        {
            "model": model,
            "landed": outcome.landed,
            "late": outcome.late,
            "landed_of_interrupted": outcome.ended,
            "stay": stay,
            "reasons": outcome.reasons,
            "version": outcome.version,
        },
    )


def _read_edited(name: str) -> dict[str, str]:
    """Return mended payloads by id from a file of JSON lines with `id` and `payload`."""
    path = Path(name).expanduser()
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    found: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            identity, payload = row["id"], row["payload"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f'{path}:{number}: each line is a JSON object {{"id": ..., "payload": {{...}}}} as '
                f"`quarantine show --output` writes it"
            ) from error
        if identity in found:
            raise UserError(f"{path}:{number}: row {identity} is there twice; keep one of them")
        found[identity] = payload if isinstance(payload, str) else json.dumps(payload, ensure_ascii=False)
    return found


def _with_payloads(warehouse: Warehouse, held: DataFrame, mended: dict[str, str]) -> DataFrame:
    """Return the held rows that have a mended payload, with it.

    Raises:
        UserError: a row of the file is not held.
    """
    from pyspark.sql import functions as F

    payloads = warehouse.spark.createDataFrame(list(mended.items()), "id string, payload string")
    joined = held.drop("payload").join(F.broadcast(payloads), on="id", how="inner")
    known = {row["id"] for row in joined.select("id").collect()}
    absent = [one for one in mended if one not in known]
    if absent:
        raise UserError(
            f"{len(absent):,} rows of the file are not held in quarantine, such as {absent[0]}: "
            f"they were replayed or discarded, or are of another model; leave them out"
        )
    return joined


Reason = Annotated[
    str | None, Option(help="Only rows whose reason starts with this, such as late.", show_default=False)
]
Since = Annotated[
    str | None, Option(help="Only rows rejected since a time (ISO 8601), or for a duration such as 2d.")
]
Ids = Annotated[list[str] | None, Option("--id", help="Only this row; may be repeated.", show_default=False)]


@command
def list_(settings: Settings, model: Model, reason: Reason = None, since: Since = None) -> Report:
    """Count rejected rows by reason: held, replayed and discarded."""
    return act(settings, "list", model, _choice(reason, since))


@command
def show(
    settings: Settings,
    model: Model,
    reason: Reason = None,
    since: Since = None,
    id: Ids = None,
    limit: Annotated[int, Option(min=1, help="Rows to show at most.")] = 20,
    output: Annotated[
        str | None, Option(help="Write all the rows to this file, as JSON lines to mend.", show_default=False)
    ] = None,
) -> Report:
    """Show held rows, with their payload and where they came from."""
    return act(settings, "show", model, _choice(reason, since, id), limit=limit, output=output)


@command
def replay(
    settings: Settings,
    model: Model,
    reason: Reason = None,
    since: Since = None,
    id: Ids = None,
    edited: Annotated[
        str | None,
        Option(
            help="Land the rows of this file, as `show --output` wrote it, with their payloads mended.",
            show_default=False,
        ),
    ] = None,
) -> Report:
    """Land held rows that fit the spec as it is now, each at most once."""
    return act(settings, "replay", model, _choice(reason, since, id), edited=edited)


@command
def discard(
    settings: Settings,
    model: Model,
    reason: Reason = None,
    since: Since = None,
    id: Ids = None,
    all: Annotated[bool, Option("--all", help="Every held row of the model.")] = False,
) -> Report:
    """Mark held rows as discarded; they stay in the table."""
    return act(settings, "discard", model, _choice(reason, since, id), everything=all)


def _choice(reason: str | None, since: str | None, ids: list[str] | None = None) -> Choice:
    from jobs.warehouse.quarantine import Choice

    return Choice(reason, since, tuple(ids or ()))


run = Actions(
    "Look at rejected rows, land them after a fix, or discard them.",
    {"list": list_, "show": show, "replay": replay, "discard": discard},
)

if __name__ == "__main__":
    run.main()
