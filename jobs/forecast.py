"""Forecast the state and the measurements of keys, some steps ahead, until a given time, or at the spec's horizons.

A forecast starts from the state of the running stream after its last micro-batch, or from a snapshot, for all keys or
some. It writes a table, on Spark unless it starts from few keys of a snapshot, or a file, without Spark. With a file
of rows (`--input`) the command filters the rows as `filter` does, without Spark, and forecasts each key from its newest
row. The result has one row for each key and future time.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from jobs.core.command import Model, command
from jobs.core.errors import UserError
from jobs.core.report import Report, format_count, format_span
from jobs.core.settings import Settings

if TYPE_CHECKING:
    from jobs.offline.ahead import Ahead
    from jobs.offline.horizon import ForecastRequest
    from jobs.specs.model_spec import ModelSpec

_FILES = (".csv", ".parquet")


@command
def run(
    settings: Settings,
    model: Model,
    input: Annotated[
        str | None,
        Option(
            help="Forecast from the rows of a .csv or .parquet file, a folder of them, or a glob. By default from the "
            "live stream's state, or the newest snapshot."
        ),
    ] = None,
    output: Annotated[
        str | None,
        Option(
            help="Where to write: a .csv or .parquet file, without Spark; or a Delta table, in the warehouse or at a "
            "path. By default the table forecasts/MODEL."
        ),
    ] = None,
    steps: Annotated[int | None, Option(min=1, help="How many steps ahead of each key's newest row.")] = None,
    until: Annotated[
        str | None,
        Option(
            "--until",
            "--to",
            help="Up to this time (ISO 8601) in steps of --every; without it at this time alone.",
        ),
    ] = None,
    every: Annotated[
        str | None,
        Option(
            help="A step, such as 1h; 1mo, 1q and 1y follow the calendar. With --steps and --input by default the "
            "rows' usual step; without --input the spec's `forecast.step`."
        ),
    ] = None,
    probability: Annotated[float, Option(help="Probability that a value lies between the bounds.")] = 0.95,
    future: Annotated[
        str | None,
        Option(
            help="Of a model with control: a .csv or .parquet file of future rows, a folder of them, or a glob, with "
            "key, time and control columns. "
            "Its rows are the steps unless --every is given."
        ),
    ] = None,
    inputs: Annotated[
        str | None,
        Option(
            help="Of a model with inputs: a .csv or .parquet file with one row per key, a folder of them, or a glob. "
            "A table takes them from the "
            "table of inputs."
        ),
    ] = None,
    snapshot: Annotated[
        str | None,
        Option(
            help="Without --input: forecast from the state of this snapshot, or `newest`, in place of the live "
            "stream's. With it: take learned parameters from this snapshot; `none`: the spec's values."
        ),
    ] = None,
    key: Annotated[
        list[str] | None, Option(help="Without --input: this key, as the estimates have it; may be repeated.")
    ] = None,
    all_columns: Annotated[
        bool,
        Option("--all-columns", help="Of a file: also states, covariances and flag, as a table has them."),
    ] = False,
    run: Annotated[
        str | None,
        Option(
            help="Id of the run: its rows in the table are replaced. By default it follows from the state and the "
            "options."
        ),
    ] = None,
) -> Report:
    """Forecast state and measurement of keys: from the live stream or a snapshot, or from a file.

    Raises:
        UserError: the model, the state, the input, the output or the times cannot be used; nothing is written then.
    """
    from jobs.offline.horizon import ForecastRequest, parse_horizon

    start = perf_counter()
    spec, notes = _find_spec(settings, model, input is None and snapshot is None)
    horizon = parse_horizon(spec, steps, until, every, probability, future, input is not None)
    request = ForecastRequest(
        horizon, probability, tuple(key or ()), snapshot, future, inputs, output, run, all_columns
    )
    to_file = output is not None and output.lower().endswith(_FILES)
    if run is not None and (to_file or input is not None):
        raise UserError("--run: names the rows of a table: leave it out for a file")
    if input is not None:
        if key:
            raise UserError("--key: chooses keys of a state; with --input the file's rows do")
        if output is None:
            raise UserError("--output: name a .csv or .parquet file for the forecasts of --input")
        return _forecast_rows(settings, spec, input, request, every is None, start)
    if inputs is not None and not to_file:
        raise UserError(
            f"--inputs: a table of forecasts takes the inputs from {spec.inputs_table}: leave it out"
        )
    done = (_forecast_snapshot if to_file else _forecast_table)(settings, spec, request, start)
    return Report([*done.lines, *notes], done.data)


def _find_spec(settings: Settings, model: str, is_live: bool) -> tuple[ModelSpec, list[str]]:
    """Return the live spec if it is asked for and there is one, with notes on the deployed spec; else the deployed one.

    Raises:
        UserError: nothing is live, and the deployed spec cannot be used.
    """
    from jobs.insight.status import describe_other_version
    from jobs.lineage.catalog import Catalog
    from jobs.specs.loading import find_deployed_spec
    from jobs.state.kernel import load_checked_spec
    from jobs.storage.warehouse import Tables

    if is_live:
        name, deployed = find_deployed_spec(model, settings.models)
        catalog = Catalog(Tables(settings.warehouse))
        live = catalog.live_spec(name, deployed) if catalog.live(name) else None
        if live is not None:
            note = describe_other_version(catalog, name, deployed)
            return live, [] if note is None else [f"note: {note}"]
    return load_checked_spec(model, settings.models), []


def _forecast_rows(
    settings: Settings, spec: ModelSpec, input: str, request: ForecastRequest, is_median: bool, start: float
) -> Report:
    """Filter the rows of a file, and forecast each key from its newest row."""
    from jobs.landing.checking import parse
    from jobs.landing.file_rows import read_rows
    from jobs.offline.ahead import forecast_keys, read_future, write_forecasts
    from jobs.offline.filtering import check_target
    from jobs.offline.key_inputs import join_file
    from jobs.offline.prior import build_prior
    from jobs.snapshots.learned import find_learned_parameters

    assert request.output is not None
    target, snapshot = Path(request.output), request.snapshot
    check_target(target, Path(input))
    learned = find_learned_parameters(settings.warehouse, spec, snapshot)
    source = read_rows(spec, input)
    rows = join_file(
        spec, parse(spec, source, input), [source.columns[name] for name in spec.key], request.inputs
    )
    prior = build_prior(spec, rows, source.columns, settings.warehouse, learned, snapshot is not None)
    future = None if request.future is None else read_future(spec, request.future)
    found, keys = forecast_keys(spec, source, rows, request.horizon, prior, future)
    write_forecasts(target, spec, found, keys, request)
    data = _build_data(spec, found, request, start, {"input": input, **prior.data})
    lines = _format_lines(data, is_median, future is not None)
    return Report(lines=[*lines[:1], *prior.lines, *lines[1:]], data=data)


def _forecast_snapshot(settings: Settings, spec: ModelSpec, request: ForecastRequest, start: float) -> Report:
    """Forecast keys of the live stream or of a snapshot into a file, without Spark."""
    from jobs.core.times import now
    from jobs.offline.ahead import forecast_ahead, read_future, write_forecasts
    from jobs.offline.filtering import check_target
    from jobs.offline.stored_keys import read_live_keys, read_snapshot_keys

    assert request.output is not None
    target, keys = Path(request.output), request.keys
    check_target(target, Path(request.future or "."))
    named = None if request.snapshot == "newest" else request.snapshot
    found = why = None
    if request.snapshot is None:
        found = read_live_keys(settings.warehouse, spec, keys, request.inputs)
    if found is None or isinstance(found, str):
        why, found = found, read_snapshot_keys(settings.warehouse, spec, named, keys, request.inputs)
    why = why or found.why
    future = None if request.future is None else read_future(spec, request.future)
    forecasts = forecast_ahead(spec, found.kernel, found.keys, request.horizon, future)
    write_forecasts(target, spec, forecasts, found.columns, request)
    age = None if found.committed_at is None else (now() - found.committed_at).total_seconds()
    state = {
        "snapshot": found.snapshot,
        "generation": found.generation,
        "taken_at": found.committed_at,
        "age_seconds": age,
        "position": found.position,
        "newest_microseconds": found.newest,
    }
    data = _build_data(spec, forecasts, request, start, state)
    lines = _format_lines(data, False, future is not None)
    old = "" if age is None else f" of {found.committed_at:%Y-%m-%d %H:%M:%S} UTC ({format_span(age)} ago)"
    source = (
        f"snapshot {found.snapshot}" if found.generation is None else f"latest states of {found.generation}"
    )
    notes = [f"state: {source}{old}", *([] if why is None else [f"not from the live stream: {why}"])]
    return Report(lines=[*lines[:1], *notes, *lines[1:]], data=data)


def _forecast_table(settings: Settings, spec: ModelSpec, request: ForecastRequest, start: float) -> Report:
    """Forecast from the live state or a snapshot on Spark."""
    from jobs.batch.forecast_run import forecast_live, report_lines
    from jobs.lineage.generations import DeployedModel
    from jobs.spark.session import open_warehouse

    done = forecast_live(DeployedModel(spec, open_warehouse(settings, f"forecast {spec.name}")), request)
    origin, written = done.origin, done.written
    data: dict[str, Any] = {
        "model": spec.name,
        "version": origin.spec.version,
        "run": done.run,
        "output": done.table,
        "keys": written.keys,
        "keys_past": done.past,
        "forecasts": written.forecasts,
        "flagged": written.flagged,
        "unbounded": written.unbounded,
        "probability": request.probability,
        "snapshot": origin.manifest.snapshot_id,
        "generation": origin.generation,
        "batch": origin.batch,
        "position": origin.position,
        "taken_at": origin.taken_at,
        "age_seconds": None if done.age is None else done.age.total_seconds(),
        "newest_microseconds": written.newest,
        "inputs_version": done.inputs,
        "seconds": round(perf_counter() - start, 3),
    }
    step = request.horizon.calendar
    steps = [] if step is None else [f"a step is {step}"]
    return Report([_format_head(data), *steps, *report_lines(done, spec)], data)


def _build_data(
    spec: ModelSpec, found: Ahead, request: ForecastRequest, start: float, more: dict[str, Any]
) -> dict[str, Any]:
    from jobs.choosing.rhythm import format_span as format_step

    step = found.length
    return {
        "model": spec.name,
        "version": spec.version,
        "output": request.output,
        "keys": len(found.kept),
        "keys_past": found.omitted,
        "forecasts": found.count,
        "step_microseconds": step if isinstance(step, int) else None,
        "step": format_step(step) if isinstance(step, int) else None if step is None else str(step),
        "probability": request.probability,
        "flagged": found.flagged,
        "unbounded": found.unbounded,
        **more,
        "seconds": round(perf_counter() - start, 3),
    }


def _format_head(data: dict[str, Any]) -> str:
    return (
        f"{data['model']} v{data['version']}: {format_count(data['forecasts'], 'forecast')} of "
        f"{format_count(data['keys'], 'key')} in {data['seconds']:.2f} s -> {data['output']}"
    )


def _format_lines(data: dict[str, Any], is_median: bool, through_rows: bool) -> list[str]:
    from jobs.offline.ahead import format_flawed

    bounds = f"bounds hold {100 * data['probability']:g} %"
    if data["step"]:
        bounds += f"; a step is {data['step']}"
        bounds += ", as usual between two rows of a key" if is_median else ""
    lines = [_format_head(data), bounds]
    if data["keys_past"]:
        why = "without a future row" if through_rows else "with rows after --until"
        lines.append(f"omitted {format_count(data['keys_past'], 'key')} {why}")
    return [*lines, *format_flawed(data["flagged"], data["unbounded"])]


if __name__ == "__main__":
    run.main()
