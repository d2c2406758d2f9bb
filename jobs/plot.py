"""Draw estimates of some keys: measurements, estimates with their bands, and how much each row surprised the model.

The estimates are live or of the history in a local warehouse, or come from a file that `filter` wrote.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Annotated

from typer import Option

from jobs.core.command import Model, command
from jobs.core.errors import UserError
from jobs.core.input_files import parse_path
from jobs.core.report import Report, format_count
from jobs.core.settings import Settings

CROWDED = 3_000
"""Number of a key's rows from which a daily season would be an unreadable blot."""


@command
def run(
    settings: Settings,
    model: Model,
    output: Annotated[
        str | None,
        Option(help="Where to draw: a .png or .html file; by default MODEL.png.", show_default=False),
    ] = None,
    input: Annotated[
        str | None,
        Option(
            help="An output file of `filter`; by default the live estimates, else those of history.",
            show_default=False,
        ),
    ] = None,
    measured: Annotated[
        str | None,
        Option(help="With --input: the file that was filtered, for its measured values.", show_default=False),
    ] = None,
    history: Annotated[
        bool, Option("--history", help="Draw the estimates of history, from `estimate`.")
    ] = False,
    key: Annotated[
        list[str] | None,
        Option(
            help="Draw this key (of several columns: a,b); may be repeated; by default the first ones.",
            show_default=False,
        ),
    ] = None,
    keys: Annotated[int, Option(min=1, max=20, help="How many keys to draw, if none are named.")] = 3,
    rows: Annotated[
        int | None,
        Option(min=2, help="How many of each key's newest rows to draw; by default all.", show_default=False),
    ] = None,
) -> Report:
    """Draw estimates of some keys with their bands, as a PNG or an HTML page. No Spark.

    Raises:
        UserError: there are no such estimates or keys, or the picture cannot be written.
    """
    from jobs.state.kernel import load_checked_spec

    start = perf_counter()
    spec = load_checked_spec(model, settings.models)
    path = _check_target(output or f"{spec.name}.png")
    if input is not None and history:
        raise UserError("--input draws a file and --history a table: give one of them")
    if measured is not None and input is None:
        raise UserError("--measured goes with --input: the warehouse has the measurements")
    which = None if input is not None else _choose_estimates(settings.warehouse, spec.name, history)
    try:
        from jobs.offline.estimate_pictures import draw
    except ImportError:
        raise UserError("pictures need matplotlib: pip install kalman-pipeline[demo]") from None
    from jobs.offline.estimate_series import read_file_series, read_warehouse_series
    from jobs.state.kernel import find_measuring

    if input is not None:
        what, series = Path(input).name, read_file_series(spec, parse_path(input), measured, key or [], keys)
    else:
        what = "live estimates" if which == "live" else "estimates of history"
        series = read_warehouse_series(settings.warehouse, spec, str(which), key or [], keys)
    series = [one.newest(rows) for one in series]
    draw(path, spec, series, find_measuring(spec), f"{spec.name} v{spec.version}: {what}")
    drawn, seconds = sum(len(one.time) for one in series), round(perf_counter() - start, 3)
    data = {"model": spec.name, "estimates": what, "keys": [one.key for one in series], "rows": drawn}
    lines = [f"{what} of {format_count(len(series), 'key')}, {format_count(drawn, 'row')} -> {path}"]
    longest = max(len(one.time) for one in series)
    if longest > CROWDED:
        lines.append(f"note: {longest:,} rows of a key are drawn; --rows 500 shows the newest alone")
    return Report(lines, {**data, "output": str(path), "seconds": seconds})


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


def _choose_estimates(root: str, model: str, history: bool) -> str:
    """Return the estimates of a warehouse to draw: live ones if there are any, else those of the history.

    Raises:
        UserError: the model has no estimates.
    """
    from jobs.offline.estimate_series import HISTORY, LIVE, need_estimates
    from jobs.storage.tables import estimates, estimates_history
    from jobs.storage.warehouse import Tables

    tables = Tables(root)
    none_live = not tables.exists(estimates(model)) and tables.exists(estimates_history(model))
    which = HISTORY if history or none_live else LIVE
    need_estimates(tables, model, which)
    return which


if __name__ == "__main__":
    run.main()
