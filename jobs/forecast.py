"""Forecast the state and the measurements of every key of a file, some steps ahead or until a given time. No Spark.

The rows are filtered as by `filter`, and each key is forecast from its newest row: one output row for each key and
future time.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

from typer import Option

from jobs.core.command import Model, Snapshot, command
from jobs.core.report import Report, plural
from jobs.core.settings import Settings

_UNITS = (("d", 86_400_000_000), ("h", 3_600_000_000), ("min", 60_000_000), ("s", 1_000_000), ("ms", 1_000))


@command
def run(
    settings: Settings,
    model: Model,
    input: Annotated[
        str,
        Option(
            help="The rows until now: a .csv or .parquet file, a folder of them, or a glob.",
            show_default=False,
        ),
    ],
    output: Annotated[str, Option(help="Where to write: a .csv or .parquet file.", show_default=False)],
    steps: Annotated[int | None, Option(min=1, help="How many steps ahead of each key's newest row.")] = None,
    until: Annotated[
        str | None,
        Option(help="Up to this time (ISO 8601) in steps of --every; without it at this time alone."),
    ] = None,
    every: Annotated[
        str | None,
        Option(help="A step, such as 1h. With --steps by default the median time between rows."),
    ] = None,
    probability: Annotated[float, Option(help="Probability that a value lies between the bounds.")] = 0.95,
    future: Annotated[
        str | None,
        Option(
            help="Of a model with control: a .csv or .parquet file of future rows, with key, time and control columns. "
            "Its rows are the steps unless --every is given.",
            show_default=False,
        ),
    ] = None,
    inputs: Annotated[
        str | None,
        Option(
            help="Of a model with inputs: a .csv or .parquet file with one row per key.", show_default=False
        ),
    ] = None,
    snapshot: Snapshot = None,
) -> Report:
    """Forecast the keys of a file, without Spark: state and measurement at future times.

    Raises:
        UserError: the model, the input, the output or the times cannot be used; no output is left then.
    """
    from jobs.ingestion.parsing import parse
    from jobs.offline.forecasting import forecast_keys, parse_horizon, write_forecasts
    from jobs.offline.future import read_future
    from jobs.offline.input_rows import read_rows
    from jobs.offline.key_inputs import join_file
    from jobs.offline.prior import prior_of
    from jobs.offline.result_files import check_target
    from jobs.snapshots.learned import learned_parameters
    from jobs.state.kernel import load_checked_spec

    start = perf_counter()
    spec = load_checked_spec(model, settings.models)
    source_path, target = Path(input), Path(output)
    check_target(target, source_path)
    horizon = parse_horizon(spec, steps, until, every, probability, future)
    learned = learned_parameters(settings.warehouse, spec, snapshot)
    source = read_rows(spec, input)
    rows = join_file(spec, parse(spec, source, input), [source.columns[name] for name in spec.key], inputs)
    prior = prior_of(spec, rows, source.columns, settings.warehouse, learned, snapshot is not None)
    ahead = None if future is None else read_future(spec, future)
    forecasts = forecast_keys(spec, source, rows, horizon, prior, ahead)
    write_forecasts(target, spec, forecasts, probability)
    data: dict[str, Any] = {
        "model": spec.name,
        "version": spec.version,
        "input": input,
        "output": output,
        "keys": forecasts.time.shape[1],
        "keys_past": forecasts.omitted,
        "forecasts": int(forecasts.wanted.sum()),
        "step_microseconds": forecasts.length,
        "probability": probability,
        "flagged": int((forecasts.expected.flag != 0)[forecasts.wanted].sum()),
        **prior.data,
        "seconds": round(perf_counter() - start, 3),
    }
    lines = _lines(data, every is None, future is not None)
    return Report(lines=[*lines[:1], *prior.lines, *lines[1:]], data=data)


def _lines(data: dict[str, Any], is_median: bool, through_rows: bool) -> list[str]:
    bounds = f"bounds hold {100 * data['probability']:g} %"
    if data["step_microseconds"]:
        bounds += f"; a step is {_duration(data['step_microseconds'])}"
        bounds += ", the median time between two rows of a key" if is_median else ""
    lines = [
        f"{data['model']} v{data['version']}: {plural(data['forecasts'], 'forecast')} of "
        f"{plural(data['keys'], 'key')} in {data['seconds']:.2f} s -> {data['output']}",
        bounds,
    ]
    if data["keys_past"]:
        why = "without a future row" if through_rows else "with rows after --until"
        lines.append(f"omitted {plural(data['keys_past'], 'key')} {why}")
    if data["flagged"]:
        lines.append(f"flagged {data['flagged']:,}")
    return lines


def _duration(micros: int) -> str:
    for unit, size in _UNITS:
        if micros % size == 0:
            return f"{micros // size} {unit}"
    return f"{micros} microseconds"


if __name__ == "__main__":
    run.main()
