"""Run a model over a file without Spark, for trying it out: the same step function as in batch and stream.

The command writes one row for each input row, in input order: key and time as they came, mean, covariance,
log-likelihood, NIS and flag; with --smooth also the state given all rows of its key.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

import kalman
from jobs import arrays, duplicates
from jobs.consistency import Fit, fit, watch
from jobs.errors import UserError
from jobs.expiry import lives
from jobs.inputs_file import join_file
from jobs.order import order_rows
from jobs.report import Report, counted
from jobs.result_files import check_target, lists, save
from jobs.row_files import read
from jobs.rows import ParsedRows, parse
from jobs.settings import Settings
from jobs.spec import ModelSpec, load_spec
from jobs.spec_time import Duplicates

Floats = NDArray[np.float64]


class Estimates(NamedTuple):
    """What the filter says of N input rows, in input order; NaN where a row was not applied.

    mean (n, N), covariance (n*n, N) row by row, log_likelihood (N,), nis (N,), flag (N,) text or None,
    extra name -> (d, N); fit: how the model suits the keys, None where the filter does not say.
    """

    applied: NDArray[np.bool_]
    mean: Floats
    covariance: Floats
    log_likelihood: Floats
    nis: Floats
    flag: NDArray[np.object_]
    extra: dict[str, Floats]
    fit: Fit | None = None


def run(
    settings: Settings,
    model: str,
    input: str,
    output: str,
    smooth: bool = False,
    inputs: str | None = None,
) -> Report:
    """Filter the rows of a file with a model and write what comes out to another.

    Args:
        settings: of this process.
        model: a model's name, or its spec's path.
        input: a .csv or .parquet file.
        output: a .csv or .parquet file to be written.
        smooth: also give each row's state given all rows of its key; takes memory for one state a row.
        inputs: of a model with inputs, a .csv or .parquet file of them, a row a key.

    Raises:
        UserError: the model, the input or the output cannot be used; no output is left then.
    """
    start = perf_counter()
    spec = load_spec(model, settings.models, deep=True)
    source_path, target = Path(input), Path(output)
    check_target(target, source_path)
    source = read(source_path, spec.columns)
    if source.rows == 0:
        raise UserError(f"{source_path}: has no rows")
    rows = parse(spec, source, input)
    rows = join_file(spec, rows, [source.columns[name] for name in spec.key], inputs)
    estimates = filter_rows(spec, rows, smooth)
    written = {name: source.columns[name] for name in (*spec.key, spec.time)}
    if target.suffix.lower() == ".parquet" and source_path.suffix.lower() != ".parquet":
        # Text is all that a CSV file can say of a time; Parquet has a type for it.
        written[spec.time] = arrays.times(rows.time, estimates.applied)
    write(target, spec.states, written, estimates)
    return _report(spec, input, output, rows, estimates, perf_counter() - start)


def filter_rows(spec: ModelSpec, rows: ParsedRows, smooth: bool = False) -> Estimates:
    """Filter rows that are in any order, and `smooth` them; the rejected ones are left out.

    Raises:
        UserError: the model's filter cannot be smoothed.
    """
    model = kalman.build(spec.definition())
    order, sorted_rows = in_order(rows, spec.duplicates)
    keys = rows.keys
    if spec.idle_us is not None:
        sorted_rows, keys = lives(model, keys, sorted_rows, spec.unit_us, spec.idle_us)
    states = kalman.initial_states(model, keys)
    n = len(spec.states)
    places = [max(i, j) * (max(i, j) + 1) // 2 + min(i, j) for i in range(n) for j in range(n)]
    look = watch(model, states, sorted_rows)
    smoothed: dict[str, Floats] = {}
    if smooth:
        from kalman.smoothing import smooth as smooth_rows

        try:
            _, out, given_all = smooth_rows(model, states, sorted_rows, spec.unit_us, look)
        except kalman.ModelError as error:
            raise UserError(f"--smooth: {spec.name}: {error}") from error
        smoothed = {
            "smoothed_mean": given_all.mean,
            "smoothed_covariance": given_all.covariance[places],
            **{f"smoothed_{name}": values for name, values in given_all.extra.items()},
        }
    else:
        _, out = kalman.run(model, states, sorted_rows, spec.unit_us, look)
    judged = None if look is None else fit(sorted_rows.key, out, keys, look.normalised())
    total = len(rows.reason)

    def back(values: Floats) -> Floats:
        result = np.full((*values.shape[:-1], total), np.nan)
        result[..., order] = values
        return result

    applied = np.zeros(total, dtype=bool)
    applied[order] = True
    flag = np.full(total, None, dtype=object)
    flag[order] = np.array(kalman.FLAGS, dtype=object)[out.flag]
    flag[~applied] = np.array([f"rejected: {said}" for said in rows.reason[~applied]], dtype=object)
    return Estimates(
        applied,
        back(out.mean),
        back(out.covariance[places]),
        back(out.log_likelihood),
        back(out.nis),
        flag,
        {name: back(values) for name, values in (out.extra | smoothed).items()},
        judged,
    )


def in_order(rows: ParsedRows, rule: Duplicates | None = None) -> tuple[NDArray[np.int64], kalman.SortedRows]:
    """Return where the rows that are not rejected are in the order in which they are applied, and those rows.

    Where there is a rule for rows that repeat another, these are rejected first.
    """
    good = np.flatnonzero(rows.reason == None)  # noqa: E711 - elementwise
    order = good[order_rows(rows.key[good], rows.time[good], rows.y[:, good], rows.u[:, good])]
    if rule is not None:
        if rule.id is None:
            again = duplicates.repeated(_taken(rows, order))
        else:
            named = np.flatnonzero(rows.ids[order] >= 0)
            there = order[named]
            again = np.zeros(len(order), bool)
            marks = duplicates.Marks(rows.key[there], rows.ids[None, there], rows.time[there])
            again[named] = duplicates.resent(marks, rule.within_us)
        rows.reason[order[again]] = duplicates.REASON if rule.id is None else duplicates.SAME_ID
        order = order[~again]
    return order, _taken(rows, order)


def _taken(rows: ParsedRows, order: NDArray[np.int64]) -> kalman.SortedRows:
    return kalman.SortedRows(rows.key[order], rows.time[order], rows.y[:, order], rows.u[:, order])


def write(path: Path, states: list[str], columns: dict[str, pa.Array], estimates: Estimates) -> None:
    """Write the output table; the file appears whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    table = dict(columns)
    for field, values in (("mean", estimates.mean), ("covariance", estimates.covariance)):
        table |= lists(path, field, values, estimates.applied, _parts(field, len(values), states))
    table["log_likelihood"] = arrays.numbers(estimates.log_likelihood)
    table["nis"] = arrays.numbers(estimates.nis)
    table["flag"] = arrays.texts(list(estimates.flag))
    for field, values in estimates.extra.items():
        table |= lists(path, field, values, estimates.applied, _parts(field, len(values), states))
    save(path, table)


def _parts(field: str, width: int, states: list[str]) -> list[str] | None:
    """Return what each of a list's numbers is called in CSV: a state, a pair of states, or a number."""
    if field.endswith("mean") and width == len(states):
        return states
    if field.endswith("covariance") and width == len(states) ** 2:
        return [f"{a}_{b}" for a in states for b in states]
    return None if width == 1 else [str(index) for index in range(width)]


def _report(
    spec: ModelSpec, input: str, output: str, rows: ParsedRows, estimates: Estimates, seconds: float
) -> Report:
    applied = estimates.applied
    rejected = Counter(str(said) for said in rows.reason[~applied])
    flagged = Counter(str(flag) for flag in estimates.flag[applied] if flag is not None)
    observed = np.isfinite(estimates.nis) & (estimates.flag == None)  # noqa: E711 - elementwise
    components = int((~np.isnan(rows.y[:, observed])).sum())
    ratio = float(estimates.nis[observed].sum()) / components if components else None
    data: dict[str, Any] = {
        "model": spec.name,
        "version": spec.version,
        "input": input,
        "output": output,
        "rows": len(applied),
        "keys": len(np.unique(rows.key[applied])),
        "rejected": sum(rejected.values()),
        "rejected_by_reason": dict(rejected.most_common()),
        "flagged": sum(flagged.values()),
        "flagged_by_reason": dict(flagged.most_common()),
        "log_likelihood": float(np.nansum(estimates.log_likelihood)),
        "nis_per_component": ratio,
        **({} if estimates.fit is None else estimates.fit.data),
        "seconds": round(seconds, 3),
    }
    lines = [
        f"{spec.name} v{spec.version}: {counted(data['rows'], 'row')} of {counted(data['keys'], 'key')} "
        f"in {seconds:.2f} s -> {output}",
        f"log-likelihood {data['log_likelihood']:.6f}"
        + ("" if ratio is None else f", NIS per measured component {ratio:.3f} (1 is expected)"),
        *([] if estimates.fit is None else estimates.fit.lines),
        f"rejected {data['rejected']:,}, flagged {data['flagged']:,}",
    ]
    for what, counts in (("rejected", rejected), ("flagged", flagged)):
        lines += [f"  {what}: {reason}: {count:,}" for reason, count in counts.most_common(10)]
    return Report(lines=lines, data=data)


if __name__ == "__main__":
    from jobs.cli import main

    main("filter")
