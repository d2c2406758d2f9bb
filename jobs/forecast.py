"""Forecast every key of a file: its state and its measurements, some steps ahead or at a given time. No Spark.

The rows are filtered as `filter` does it, and each key is forecast from its newest row: one output row for each
key and time to come.
"""

from __future__ import annotations

from datetime import UTC
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from typer import Option

import kalman
from jobs.core.command import Model, command
from jobs.core.errors import UserError
from jobs.core.report import Report
from jobs.core.settings import Settings
from jobs.core.times import MAX_US, TimeParser, duration_us
from jobs.encoding import arrow
from jobs.ingestion.csv_parquet import read
from jobs.ingestion.parsing import ParsedRows, parse
from jobs.offline.filtering import in_order
from jobs.offline.result_files import check_target, lists, save
from jobs.specs.model_spec import ModelSpec, takes_steps
from jobs.state.expiry import run_lives
from jobs.state.kernel import load_checked_spec
from jobs.state.row_filter import RowFilter
from kalman.evaluation.forecast import Forecast, forecast, interval, variances

Ints = NDArray[np.int64]
_UNITS = (("d", 86_400_000_000), ("h", 3_600_000_000), ("min", 60_000_000), ("s", 1_000_000), ("ms", 1_000))
MOST = 50_000_000
"""Forecasts at most, so that a step that is much too short ends in a sentence and not in memory."""


class Ahead(NamedTuple):
    """When to forecast K keys: time (S, K) microseconds, wanted (S, K) bool, the step's length or None."""

    time: Ints
    wanted: NDArray[np.bool_]
    every: int | None


@command
def run(
    settings: Settings,
    model: Model,
    input: Annotated[str, Option(help="The rows until now: a .csv or .parquet file.", show_default=False)],
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
) -> Report:
    """Forecast the keys of a file, without Spark: state and measurement at future times.

    Raises:
        UserError: the model, the input, the output or the times cannot be used; no output is left then.
    """
    start = perf_counter()
    spec = load_checked_spec(model, settings.models)
    source_path, target = Path(input), Path(output)
    check_target(target, source_path)
    end, length = _asked(spec, steps, until, every, probability)
    source = read(source_path, spec.columns)
    if source.rows == 0:
        raise UserError(f"{source_path}: has no rows")
    rows = parse(spec, source, input)
    order, sorted_rows = in_order(rows, spec.duplicates)
    kernel = kalman.build(spec.definition())
    fresh = kalman.initial_states(kernel, rows.keys)
    if spec.idle_us is None:
        states, _ = kalman.run(kernel, fresh, sorted_rows, spec.unit_us)
    else:
        states = run_lives(RowFilter(kernel, spec.unit_us), fresh, fresh, sorted_rows, spec.idle_us).after
    places, states = _begun(rows, order, states)
    ahead = _times(sorted_rows, states, steps, end, length, int(spec.unit_us))
    kept = np.flatnonzero(ahead.wanted.any(axis=0))
    some = states.take(kept)
    time = ahead.time[:, kept]
    dt = np.diff(time, axis=0, prepend=some.event_time[None]) / spec.unit_us
    try:
        expected = forecast(kernel, some, dt)
    except kalman.ModelError as error:
        raise UserError(f"{spec.name} v{spec.version} cannot be forecast: {error}") from error
    keys = {name: source.columns[name].take(arrow.integers(places[kept])) for name in spec.key}
    _write(target, spec, keys, time, ahead.wanted[:, kept], expected, probability)
    data: dict[str, Any] = {
        "model": spec.name,
        "version": spec.version,
        "input": input,
        "output": output,
        "keys": len(kept),
        "keys_past": len(places) - len(kept),
        "forecasts": int(ahead.wanted.sum()),
        "step_microseconds": ahead.every,
        "probability": probability,
        "flagged": int((expected.flag != 0)[ahead.wanted[:, kept]].sum()),
        "seconds": round(perf_counter() - start, 3),
    }
    return Report(lines=_lines(data, every is None), data=data)


def _asked(
    spec: ModelSpec, steps: int | None, until: str | None, every: str | None, probability: float
) -> tuple[int | None, int | None]:
    """Return the last time and a step's length in microseconds, None where not given."""
    if (steps is None) == (until is None):
        raise UserError("give either --steps or --until")
    if not 0.0 < probability < 1.0:
        raise UserError(f"--probability: {probability:g} is not between 0 and 1; give one such as 0.95")
    end = length = None
    if every is not None:
        try:
            length = duration_us(every)
        except ValueError as error:
            raise UserError(
                f"--every: {error}; write a number and one of ms, s, min, h, d, w, such as 1h"
            ) from error
    if until is not None:
        end = TimeParser(None, UTC if spec.time_zone == "UTC" else ZoneInfo(spec.time_zone))(until)
        if end is None:
            raise UserError(f"--until: {until!r} is not a time; write one such as 2024-01-31T17:00")
        if length is None and takes_steps(spec.definition()):
            raise UserError(
                f"--until: {spec.name} has an explicit process, which takes one step a row whatever the time; "
                "add --every with the time of a step"
            )
    if spec.inputs is not None:
        raise UserError(
            f"{spec.name} has inputs from a table, which a forecast from a file does not know; append rows without "
            "measurements to the input, and use filter --inputs"
        )
    if spec.control:
        raise UserError(
            f"{spec.name} has control inputs, and those to come are not known to forecast; append rows with "
            "them and without measurements to the input, and use filter"
        )
    return end, length


def _begun(rows: ParsedRows, order: Ints, states: kalman.KeyStates) -> tuple[Ints, kalman.KeyStates]:
    """Return the keys that have a state, in the order of the input: a row of each, and their states."""
    codes, firsts = np.unique(rows.key[order], return_index=True)
    earliest = np.full(len(codes), len(rows.key))
    np.minimum.at(earliest, np.searchsorted(codes, rows.key[order]), order)
    begun = np.flatnonzero(states.count[codes] > 0)
    if len(begun) == 0:
        raise UserError("no row of the input could be applied: there is nothing to forecast from")
    begun = begun[np.argsort(earliest[begun])]
    return earliest[begun], states.take(codes[begun])


def _times(
    rows: kalman.SortedRows,
    states: kalman.KeyStates,
    steps: int | None,
    end: int | None,
    length: int | None,
    unit: int,
) -> Ahead:
    """Return when to forecast each key."""
    last = states.event_time
    if end is not None and length is None:
        return Ahead(np.maximum(last, end)[None], (last <= end)[None], None)
    if length is None:
        gaps = np.diff(rows.time)[rows.key[1:] == rows.key[:-1]]
        gaps = gaps[gaps > 0]
        length = int(np.median(gaps)) if len(gaps) else unit
    if end is not None:
        steps = max(int((end - last.min()) // length), 1)
    if (steps or 1) * len(last) > MOST:
        raise UserError(f"these are {(steps or 1) * len(last):,} forecasts; take fewer or longer steps")
    if int(last.max()) + length * (steps or 1) > MAX_US:
        raise UserError("the last step is after the year 9999; take fewer or shorter steps")
    time = last + length * np.arange(1, (steps or 1) + 1)[:, None]
    return Ahead(time, time <= end if end is not None else np.ones(time.shape, bool), length)


def _write(
    path: Path,
    spec: ModelSpec,
    keys: dict[str, pa.Array],
    time: Ints,
    wanted: NDArray[np.bool_],
    expected: Forecast,
    probability: float,
) -> None:
    """Write a row for each key and wanted time, the keys' rows together."""
    key, step = np.nonzero(wanted.T)
    flag = expected.flag[step, key]
    well = flag == 0
    columns = {name: values.take(arrow.integers(key)) for name, values in keys.items()}
    everyone = np.ones(len(key), bool)
    taken = {*keys, spec.time} & {"step", "flag"}
    columns[spec.time] = arrow.times(time[step, key], everyone)
    columns["step"] = arrow.integers(step + 1)
    for what, names, mean, packed in (
        ("", spec.states, expected.mean, expected.covariance),
        (
            "measurement_",
            spec.measurement,
            expected.measurement_mean,
            expected.measurement_covariance,
        ),
    ):
        n = len(names)
        places = [max(i, j) * (max(i, j) + 1) // 2 + min(i, j) for i in range(n) for j in range(n)]
        mean, packed = mean[:, step, key], packed[:, step, key]
        low, high = interval(mean, variances(packed), probability)
        pairs = [f"{a}_{b}" for a in names for b in names]
        for field, values, parts in (
            ("mean", mean, names),
            ("covariance", packed[places], pairs),
            ("lower", low, names),
            ("upper", high, names),
        ):
            new = lists(path, what + field, values, well, parts)
            taken |= columns.keys() & new.keys()
            columns |= new
    columns["flag"] = arrow.texts(list(np.array(kalman.FLAGS, dtype=object)[flag]))
    if taken:
        raise UserError(f"column {sorted(taken)[0]} of the input is called as one of the output; rename it")
    save(path, columns)


def _lines(data: dict[str, Any], by_default: bool) -> list[str]:
    lines = [
        f"{data['model']} v{data['version']}: {data['forecasts']:,} forecast"
        f"{'s'[: data['forecasts'] != 1]} of {data['keys']:,} key{'s'[: data['keys'] != 1]} "
        f"in {data['seconds']:.2f} s -> {data['output']}",
        f"bounds hold {100 * data['probability']:g} %"
        + (
            f"; a step is {_duration(data['step_microseconds'])}"
            + (", the median time between two rows of a key" if by_default else "")
            if data["step_microseconds"]
            else ""
        ),
    ]
    if data["keys_past"]:
        lines.append(f"left out {data['keys_past']:,} with rows after the time asked for")
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
