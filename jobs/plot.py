"""Draw estimates of some keys: measurements, estimates with their bands, and how much each row surprised the model.

They come from the live estimates or those of history in a local warehouse, or from a file that `filter` wrote.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

from typer import Option

from jobs.core.command import Model, answer
from jobs.core.errors import UserError
from jobs.core.report import Report, plural
from jobs.core.settings import Settings

if TYPE_CHECKING:
    from jobs.offline.estimate_series import Series
    from jobs.specs.model_spec import ModelSpec

CROWDED = 3_000
"""Rows of a key from which on a daily season is drawn as one blot."""


@answer
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
            help="A file that `filter` wrote; by default the live estimates, or those of history where none are live.",
            show_default=False,
        ),
    ] = None,
    measured: Annotated[
        str | None,
        Option(help="With --input: what was filtered, for the measured values.", show_default=False),
    ] = None,
    history: Annotated[
        bool, Option("--history", help="The estimates of history, as `estimate` made them.")
    ] = False,
    key: Annotated[
        list[str] | None,
        Option(
            help="Draw this key, of several columns such as a,b; may be repeated; by default the first ones.",
            show_default=False,
        ),
    ] = None,
    keys: Annotated[int, Option(min=1, max=20, help="How many keys to draw, if none are named.")] = 3,
    rows: Annotated[
        int | None,
        Option(min=2, help="Draw the newest rows of each key, so many; by default all.", show_default=False),
    ] = None,
) -> Report:
    """Draw estimates of some keys with their bands, as a PNG or an HTML page. No Spark.

    Raises:
        UserError: there are no such estimates or keys, or the picture cannot be written.
    """
    from jobs.state.kernel import load_checked_spec

    start = perf_counter()
    spec = load_checked_spec(model, settings.models)
    path = _target(output or f"{spec.name}.png")
    if input is not None and history:
        raise UserError("--input draws a file and --history a table: give one of them")
    if measured is not None and input is None:
        raise UserError("--measured goes with --input: the warehouse has the measurements")
    try:
        from jobs.offline.estimate_pictures import draw
    except ImportError:
        raise UserError("pictures need matplotlib: pip install kalman-pipeline[demo]") from None
    from jobs.offline.estimate_series import measuring, of_files

    if input is not None:
        what, series = Path(input).name, of_files(spec, Path(input).expanduser(), measured, key or [], keys)
    else:
        what, series = _of_warehouse(settings.warehouse, spec, history, key or [], keys)
    series = [one.newest(rows) for one in series]
    draw(path, spec, series, measuring(spec), f"{spec.name} v{spec.version}: {what}")
    drawn, seconds = sum(len(one.time) for one in series), round(perf_counter() - start, 3)
    data = {"model": spec.name, "estimates": what, "keys": [one.key for one in series], "rows": drawn}
    lines = [f"{what} of {plural(len(series), 'key')}, {plural(drawn, 'row')} -> {path}"]
    longest = max(len(one.time) for one in series)
    if longest > CROWDED:
        lines.append(f"note: {longest:,} rows of a key are drawn; --rows 500 shows the newest alone")
    return Report(lines, {**data, "output": str(path), "seconds": seconds})


def _target(output: str) -> Path:
    """Return where to draw.

    Raises:
        UserError: it is neither a PNG nor a page, or its folder does not exist.
    """
    path = Path(output).expanduser()
    if path.suffix.lower() not in (".png", ".html"):
        raise UserError(f"--output {path}: the file's ending must be .png or .html")
    if not path.parent.is_dir():
        raise UserError(f"--output {path}: there is no folder {path.parent}; create it first")
    return path


def _of_warehouse(
    root: str, spec: ModelSpec, history: bool, keys: list[str], count: int
) -> tuple[str, list[Series]]:
    """Return what is drawn of a warehouse, in words, and the series: live estimates where there are any."""
    from jobs.offline.estimate_series import HISTORY, LIVE, of_warehouse
    from jobs.warehouse.local_tables import local_tables
    from jobs.warehouse.tables import estimates, estimates_history

    tables = local_tables(root)
    if tables is None:
        raise UserError(f"{root}: the tables of a remote warehouse cannot be drawn: give --input")
    none_live = not tables.exists(estimates(spec.name)) and tables.exists(estimates_history(spec.name))
    which = HISTORY if history or none_live else LIVE
    what = "live estimates" if which == LIVE else "estimates of history"
    return what, of_warehouse(root, spec, which, keys, count)


if __name__ == "__main__":
    run.main()
