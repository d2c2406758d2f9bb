"""Show how files are read: the first rows as written and as parsed, and the role of each column. No Spark.

Without a model the columns are found as `init` finds them; with a model they are read by its spec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from jobs.core.command import answer
from jobs.core.errors import INPUT_ERROR
from jobs.core.report import Report, format_count
from jobs.core.settings import Settings

if TYPE_CHECKING:
    from jobs.choosing.describing import Description


@answer
def run(
    settings: Settings,
    file: Annotated[
        str,
        Argument(
            help="A file, a folder or a glob: .csv, .json, .jsonl, .parquet or .orc, or as --model reads them."
        ),
    ],
    model: Annotated[
        str | None, Option(help="A model: read the file as its spec says, and do not guess.")
    ] = None,
) -> Report:
    """Show how files are read: the first rows as written and as understood, and each column's role with its reason.

    Raises:
        UserError: a file cannot be read, or lacks a column that the spec names.
    """
    from jobs.choosing.describing import describe, describe_by_spec
    from jobs.specs.loading import load_spec

    found = describe(file) if model is None else describe_by_spec(file, load_spec(model, settings.models))
    lines = [
        f"{found.first}: {format_count(found.rows, 'row')} looked at"
        + (f", the first of {format_count(found.files, 'file')}" if found.files > 1 else ""),
        *([f"files        {'; '.join(found.dialect)}"] if found.dialect else []),
        *(f"rejected     {format_count(count, 'row')}: {reason}" for reason, count in found.rejected.items()),
        *found.notes,
    ]
    errors = [] if found.refusal is None else [found.refusal]
    return Report(
        lines, _build_data(found), errors=errors, tables=_build_tables(found), error_code=INPUT_ERROR
    )


def _build_data(found: Description) -> dict[str, Any]:
    return {
        **found._asdict(),
        "first": str(found.first),
        "columns": [one._asdict() for one in found.columns],
    }


def _build_tables(found: Description) -> list[Any]:
    """Return three tables: the rows as written, the rows as parsed, and the roles of the columns."""
    tables = [_build_table("as written", found.written)]
    if found.understood:
        tables.append(_build_table("as understood, times in UTC", found.understood))
    headings = ("column", "first value", "taken as", "why", "otherwise", "settings")
    readings: list[dict[str, Any]] = [dict(zip(headings, one, strict=True)) for one in found.columns]
    return [*tables, *([] if found.refusal else [_build_table("columns", readings)])]


def _build_table(title: str, rows: list[dict[str, Any]]) -> Any:
    """Return rows as a table with all columns; a missing value is blank."""
    from rich import box
    from rich.table import Table

    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in names:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*("" if row.get(name) is None else str(row[name]) for name in names))
    return table


if __name__ == "__main__":
    run.main()
