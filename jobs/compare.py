"""Compare models of the same measurements by their predictions of held-out rows.

For each sampled key every model learns from the first part of the rows, as its spec's `learn` says. Then it predicts
the other rows one by one. The rows are the landed rows of the first model, or the rows of files. No Spark.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from jobs.core.command import command
from jobs.core.errors import UserError
from jobs.core.report import Report, format_count
from jobs.core.settings import Settings

if TYPE_CHECKING:
    from jobs.choosing.ranking import ModelComparison


@command
def run(
    settings: Settings,
    model: Annotated[
        list[str],
        Option(
            help="A model's name, or the path of its spec; repeat it, or write a,b,c. The first is the reference."
        ),
    ],
    input: Annotated[
        str | None,
        Option(
            help="Rows: a .csv or .parquet file, a folder of them, or a glob; by default those that have landed for "
            "the first model."
        ),
    ] = None,
    keys: Annotated[int, Option(min=1, help="How many keys to sample.")] = 200,
    rows: Annotated[int, Option(min=50, help="How many of the last rows of each key to take.")] = 1000,
) -> Report:
    """Rank models by the log-likelihood of held-out rows, and say which is the best, or that none is.

    Raises:
        UserError: the models have no rows or measurements in common, or one of them cannot be fitted.
    """
    from jobs.choosing.ranking import check_comparable, compare, list_columns
    from jobs.landing.file_rows import read_rows
    from jobs.state.kernel import load_checked_spec

    start = perf_counter()
    names = [name.strip() for text in model for name in text.split(",") if name.strip()]
    if len(names) < 2:
        raise UserError("give two models or more: --model a --model b")
    specs = [load_checked_spec(name, settings.models) for name in names]
    check_comparable(specs)
    if input is not None:
        more = [name for name in list_columns(specs) if name not in specs[0].columns]
        names = {name: column for spec in specs for name, column in spec.files.names.items()}
        files = specs[0].files.model_copy(update={"names": names})
        wide = specs[0].model_copy(update={"control": [*specs[0].control, *more], "files": files})
        source, what = read_rows(wide, input), input
    else:
        from jobs.choosing.ranking import read_landed_rows
        from jobs.storage.tables import need_measurements
        from jobs.storage.warehouse import Tables

        need_measurements(Tables(settings.warehouse), specs[0].name)
        source = read_landed_rows(settings.warehouse, specs[0], list_columns(specs), keys, rows)
        what = f"the landed rows of {specs[0].name}"
    found = compare(specs, source, what, keys, rows)
    return _report(what, found, perf_counter() - start)


def _report(what: str, found: ModelComparison, seconds: float) -> Report:
    ranking = found.ranking
    best, equals = ranking.best, ranking.equals
    if len(equals) > 1:
        others = ", ".join(one.name for one in equals[1:])
        verdict = f"{best.name} has the highest, but cannot be told apart from {others}"
    else:
        verdict = f"{best.name} is the best"
    lines = [
        f"{what}: {format_count(ranking.rows, 'held-out row')} of {format_count(ranking.keys, 'key')} in "
        f"{seconds:.1f} s",
        "log-likelihood a held-out row:",
    ]
    for one in ranking.scores:
        text = f"  {one.name:<20} {one.mean:.4f}, best for {one.wins:.0%} of the keys"
        if one is not best:
            text += f"; {one.behind:.4f} +- {one.error:.4f} behind {best.name}"
        if one.missing:
            text += f"; gave none for {format_count(one.missing, 'row')}, which are left out for all"
        lines.append(text)
    lines.append(verdict)
    if found.rejected:
        lines.append(f"left out {format_count(found.rejected, 'row')} that a model rejects")
    data: dict[str, Any] = {
        "input": what,
        "keys": ranking.keys,
        "rows": ranking.rows,
        "rejected": found.rejected,
        "models": [one._asdict() | {"apart": one.is_apart} for one in ranking.scores],
        "best": best.name,
        "equals": [one.name for one in equals],
        "seconds": round(seconds, 3),
    }
    return Report(lines, data)


if __name__ == "__main__":
    run.main()
