"""List, show, replay (after a fix, each row at most once) or discard rejected rows; `maintain` removes them later."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from jobs.core.command import Actions, Model, answer, command
from jobs.core.errors import UserError
from jobs.core.report import Report, format_count
from jobs.core.settings import Settings

if TYPE_CHECKING:
    from jobs.landing.rejected.replay import ReplayOutcome
    from jobs.storage.quarantine import RowSelection


def act(
    settings: Settings,
    action: str,
    model: str,
    choice: RowSelection | None = None,
    *,
    limit: int = 20,
    output: str | None = None,
    edited: str | None = None,
    everything: bool = False,
) -> Report:
    """Do one of four actions with a model's rejected rows.

    `list` counts rows, `show` shows them, `replay` lands those that fit now, `discard` marks them. The
    function takes the options of all actions; `everything` discards all rows if no condition is given.

    Raises:
        UserError: no such rows, or a file that cannot be read.
    """
    from jobs.landing.rejected import held
    from jobs.landing.rejected.replay import replay
    from jobs.specs.loading import load_spec
    from jobs.storage.quarantine import RowSelection
    from jobs.storage.warehouse import Tables

    spec, choice = load_spec(model, settings.models), choice or RowSelection()
    if action == "discard" and choice.all and not everything:
        raise UserError("name the rows to discard: --reason, --since or --id, or --all for every held row")
    payloads = None if edited is None else held.read_edited(edited)
    tables = Tables(settings.warehouse)
    if not held.prepare_quarantine(tables):
        return Report([f"nothing of {spec.name} is in quarantine"], {"model": spec.name, "rows": 0})
    if action == "discard":
        count = held.discard(tables, spec.name, choice)
        stay = "they stay, marked, until `maintain` removes them"
        return Report(
            [f"discarded {format_count(count, 'row')} of {spec.name}: {stay}"],
            {"model": spec.name, "discarded": count},
        )
    rows = held.read_selected(tables, spec.name, choice)
    if action == "replay":
        mended, before = (
            (held.list_quarantined_rows(rows), 0) if payloads is None else held.apply_payloads(rows, payloads)
        )
        return _report_replay(spec.name, spec.late, replay(tables, spec, mended), before)
    if action == "list":
        return _list(spec.name, held.count_by_reason(rows))
    if output is None:
        return _show(spec.name, held.list_quarantined_rows(rows, limit), limit)
    path, found = Path(output).expanduser(), held.list_quarantined_rows(rows)
    held.export_rows(found, path)
    hint = f"`kalman-pipeline quarantine replay --model {spec.name} --edited {shlex.quote(str(path))}`"
    return Report(
        [f"wrote {format_count(len(found), 'row')} to {path}", f"edit the payloads there, then run {hint}"],
        {"model": spec.name, "rows": len(found), "output": str(path)},
    )


def _list(model: str, data: list[dict[str, Any]]) -> Report:
    from jobs.storage.quarantine import HELD, REPLAYING

    if not data:
        return Report([f"nothing of {model} is in quarantine"], {"model": model, "rows": 0, "reasons": []})
    held, interrupted = (sum(one[name] for one in data) for name in (HELD, REPLAYING))
    notes = [
        f"a replay of {interrupted:,} rows was interrupted: "
        f"`kalman-pipeline quarantine replay --model {model}` completes it"
    ] * bool(interrupted)
    summary = {"model": model, "rows": held, "interrupted": interrupted, "reasons": data}
    return Report([], summary, _build_table(model, data, notes))


def _build_table(model: str, data: list[dict[str, Any]], notes: list[str]) -> Any:
    from rich import box
    from rich.console import Group
    from rich.table import Table

    from jobs.storage.quarantine import DISCARDED, HELD, REPLAYED, REPLAYING

    table = Table(title=f"quarantine of {model}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("reason", HELD, REPLAYED, DISCARDED, "first", "last"):
        table.add_column(name, justify="left" if name in ("reason", "first", "last") else "right")
    for one in data:
        times = [f"{one[name]:%Y-%m-%d %H:%M}" for name in ("first", "last")]
        numbers = [f"{one[HELD] + one[REPLAYING]:,}", f"{one[REPLAYED]:,}", f"{one[DISCARDED]:,}"]
        table.add_row(one["reason"], *numbers, *times)
    return Group(table, *notes)


def _show(model: str, data: list[dict[str, Any]], limit: int) -> Report:
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
        lines.append(f"at most {limit} rows are shown (--limit); --output FILE writes all")
    return Report(lines, {"model": model, "rows": data})


def _report_replay(model: str, late: str, outcome: ReplayOutcome, before: int) -> Report:
    lines = [f"landed {format_count(outcome.landed, 'row')} of {model}"]
    if outcome.version is not None:
        lines[0] += f", up to version {outcome.version} of its measurements"
    if outcome.completed:
        lines.append(f"landed {format_count(outcome.completed, 'row')} of an interrupted replay")
    if outcome.late:
        again = " (late: quarantine rejects them again)" if late == "quarantine" else ""
        lines.append(
            f"{outcome.late:,} of them were late: copies are appended, and the stream checks them again{again}"
        )
    if outcome.copies:
        lines.append(
            f"marked {format_count(outcome.copies, 'further row')} as replayed: their messages have landed, each once"
        )
    if before:
        lines.append(f"an earlier replay had {format_count(before, 'row')} of the file already")
    stay = sum(outcome.reasons.values())
    if stay:
        counts = "; ".join(f"{count:,} {reason}" for reason, count in sorted(outcome.reasons.items()))
        lines.append(f"quarantine keeps {format_count(stay, 'row')} that are still rejected: {counts}")
    return Report(
        lines,
        {
            "model": model,
            "landed": outcome.landed,
            "late": outcome.late,
            "copies": outcome.copies,
            "before": before,
            "landed_of_interrupted": outcome.completed,
            "stay": stay,
            "reasons": outcome.reasons,
            "version": outcome.version,
        },
    )


Reason = Annotated[str | None, Option(help="Only rows whose reason starts with this, such as late.")]
Since = Annotated[
    str | None, Option(help="Only rows rejected since a time (ISO 8601), or for a duration such as 2d.")
]
Ids = Annotated[list[str] | None, Option("--id", help="Only this row; may be repeated.")]


@answer
def list_(settings: Settings, model: Model, reason: Reason = None, since: Since = None) -> Report:
    """Count rejected rows by reason: held, replayed and discarded."""
    return act(settings, "list", model, _build_choice(reason, since))


@answer
def show(
    settings: Settings,
    model: Model,
    reason: Reason = None,
    since: Since = None,
    id: Ids = None,
    limit: Annotated[int, Option(min=1, help="Rows to show at most.")] = 20,
    output: Annotated[
        str | None, Option(help="Write all the rows to this file, as JSON lines to mend.")
    ] = None,
) -> Report:
    """Show held rows, with their payload and where they came from."""
    return act(settings, "show", model, _build_choice(reason, since, id), limit=limit, output=output)


@command
def replay(
    settings: Settings,
    model: Model,
    reason: Reason = None,
    since: Since = None,
    id: Ids = None,
    edited: Annotated[
        str | None,
        Option(help="Land the rows of this file, as `show --output` wrote it, with their payloads mended."),
    ] = None,
) -> Report:
    """Land held rows that fit the spec as it is now, each at most once."""
    return act(settings, "replay", model, _build_choice(reason, since, id), edited=edited)


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
    return act(settings, "discard", model, _build_choice(reason, since, id), everything=all)


def _build_choice(reason: str | None, since: str | None, ids: list[str] | None = None) -> RowSelection:
    from jobs.storage.quarantine import RowSelection

    return RowSelection(reason, since, tuple(ids or ()))


run = Actions(
    "Look at rejected rows, land them after a fix, or discard them.",
    {"list": list_, "show": show, "replay": replay, "discard": discard},
)

if __name__ == "__main__":
    run.main()
