"""Draw estimates of some keys: measurements, estimates with their bands, and how much each row surprised the model.

The estimates are live or of the history in a local warehouse, or come from a file that `filter` wrote.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

from typer import Option

from jobs.core.command import Model, command
from jobs.core.errors import UserError
from jobs.core.input_files import parse_path
from jobs.core.report import Report, format_count
from jobs.core.settings import Settings

if TYPE_CHECKING:
    from jobs.offline.estimate_series import DrawnSeries

MOST_KEYS = 20
"""Maximum number of keys that are drawn unless the user names others."""
CROWDED = 3_000
"""Number of a key's rows from which a daily season would be an unreadable blot."""


@command
def run(
    settings: Settings,
    model: Model,
    output: Annotated[
        str | None, Option(help="Where to draw: a .png or .html file; by default MODEL.png.")
    ] = None,
    input: Annotated[
        str | None,
        Option(help="An output file of `filter`; by default the live estimates, else those of history."),
    ] = None,
    measured: Annotated[
        str | None, Option(help="With --input: the file that was filtered, for its measured values.")
    ] = None,
    history: Annotated[
        bool, Option("--history", help="Draw the estimates of history, from `estimate`.")
    ] = False,
    key: Annotated[
        list[str] | None,
        Option(help="Draw this key (of several columns: a,b); may be repeated; by default the first ones."),
    ] = None,
    keys: Annotated[int, Option(min=1, max=MOST_KEYS, help="How many keys to draw, if none are named.")] = 3,
    quantity: Annotated[
        list[str] | None,
        Option(help="Draw this measurement or state; may be repeated; by default the first 3 measurements."),
    ] = None,
    rows: Annotated[
        int | None, Option(min=2, help="How many of each key's newest rows to draw; by default all.")
    ] = None,
) -> Report:
    """Draw estimates of some keys with their bands, as a PNG or an HTML page. No Spark.

    Raises:
        UserError: there are no such estimates or keys, or the picture cannot be written.
    """
    from jobs.insight.status import describe_other_version
    from jobs.lineage.catalog import Catalog
    from jobs.offline.estimate_series import LIVE, choose_estimates, read_file_series, read_warehouse_series
    from jobs.specs.loading import describe_broken_spec, find_deployed_spec
    from jobs.state.kernel import load_checked_spec
    from jobs.storage.warehouse import Tables

    start = perf_counter()
    name, spec = find_deployed_spec(model, settings.models)
    catalog = Catalog(Tables(settings.warehouse))
    if input is not None or spec is None and not catalog.generations(name):
        spec = load_checked_spec(model, settings.models)
    path = _check_target(output or f"{name}.png")
    if input is not None and history:
        raise UserError("--input draws a file and --history a table: give one of them")
    if measured is not None and input is None:
        raise UserError("--measured goes with --input: the warehouse has the measurements")
    which = "" if input is not None else choose_estimates(catalog, name, history)
    try:
        from jobs.offline.estimate_pictures import draw
    except ImportError:
        raise UserError("pictures need matplotlib: pip install kalman-pipeline[demo]") from None

    chosen, notes = (key or [], keys, quantity or []), []
    if input is not None and spec is not None:
        what, found = Path(input).name, read_file_series(spec, parse_path(input), measured, *chosen)
    else:
        what = "live estimates" if which == LIVE else "estimates of history"
        found = read_warehouse_series(catalog, name, spec, which, *chosen)
        broken = describe_broken_spec(name, spec, settings.models)
        notes = list(filter(None, [broken or describe_other_version(catalog, name, spec)]))
    found = found._replace(series=[one.newest(rows) for one in found.series])
    notes += _list_left_out(found, key, quantity)
    draw(path, found, f"{name} {found.versions}: {what}", notes)
    drawn, seconds = sum(len(one.time) for one in found.series), round(perf_counter() - start, 3)
    data = {
        "model": name,
        "version": found.spec.version,
        "estimates": what,
        "keys": [one.key for one in found.series],
        "quantities": found.quantities[: found.drawn],
        "rows": drawn,
    }
    lines = [f"{what} of {format_count(len(found.series), 'key')}, {format_count(drawn, 'row')} -> {path}"]
    longest = max(len(one.time) for one in found.series)
    if longest > CROWDED:
        notes.append(f"{longest:,} rows of a key are drawn; --rows 500 shows the newest alone")
    return Report(
        [*lines, *(f"note: {one}" for one in notes)], {**data, "output": str(path), "seconds": seconds}
    )


def _list_left_out(found: DrawnSeries, keys: list[str] | None, quantities: list[str] | None) -> list[str]:
    """Return a sentence for keys, and one for quantities, that are left out of the picture unless the user chose."""
    from jobs.state.kernel import list_quantities

    notes, drawn, count = [], found.quantities[: found.drawn], len(found.series)
    left = [one for one in list_quantities(found.spec) if one not in drawn]
    if left and not quantities:
        notes.append(f"{', '.join(left)} not drawn: --quantity {left[0]}")
    if count < found.keys and not keys:
        more = f"--keys {min(found.keys, MOST_KEYS)}, or " if count < MOST_KEYS else ""
        notes.append(f"{count:,} of {format_count(found.keys, 'key')}: {more}--key KEY")
    return notes


def _check_target(output: str) -> Path:
    """Return the path of the picture to write.

    Raises:
        UserError: it is neither a PNG nor a page, or its folder does not exist.
    """
    path = Path(output).expanduser()
    if path.suffix.lower() not in (".png", ".html"):
        raise UserError(f"--output {path}: the file's ending must be .png or .html")
    if not path.parent.is_dir():
        raise UserError(f"--output {path}: there is no folder {path.parent}; create it first")
    return path


if __name__ == "__main__":
    run.main()
