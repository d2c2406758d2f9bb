"""Filter a file without Spark, to try a model out, with the step function of batch and stream.

The command writes one row for each input row, in input order: key and time unchanged, mean, covariance, log-likelihood,
NIS and flag, and the columns of the spec's `outputs`; with --smooth also the state given all rows of the key.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from jobs.core.command import Model, Snapshot, command
from jobs.core.errors import INPUT_ERROR
from jobs.core.report import Report, format_count
from jobs.core.settings import Settings

if TYPE_CHECKING:
    from jobs.landing.checking import ParsedRows
    from jobs.landing.raw_rows import RawRows
    from jobs.offline.filtering import FilteredRows
    from jobs.specs.model_spec import ModelSpec


@command
def run(
    settings: Settings,
    model: Model,
    input: Annotated[
        str,
        Option(
            help="Rows to filter: a .csv, .json, .jsonl, .parquet or .orc file, or with line_pattern a .txt or .log "
            "file; a folder of them, or a glob."
        ),
    ],
    output: Annotated[str, Option(help="Where to write: a .csv or .parquet file.")],
    smooth: Annotated[
        bool, Option("--smooth", help="Also smooth: estimate each row's state from all rows of its key.")
    ] = False,
    inputs: Annotated[
        str | None,
        Option(
            help="Of a model with inputs: a .csv or .parquet file with one row per key, a folder of them, or a glob."
        ),
    ] = None,
    snapshot: Snapshot = None,
) -> Report:
    """Try a model on a file, without Spark: one output row for each input row.

    Raises:
        UserError: the model, the input or the output cannot be used; no output is left then.
    """
    import pyarrow as pa

    from jobs.core.progress import Progress
    from jobs.landing.checking import parse
    from jobs.landing.file_rows import describe_dialects, list_input_files, read_rows
    from jobs.landing.reading import list_endings
    from jobs.landing.remarks import list_remarks
    from jobs.offline.filtering import check_target, filter_rows, write
    from jobs.offline.key_inputs import join_file
    from jobs.offline.prior import build_prior
    from jobs.snapshots.learned import find_learned_parameters
    from jobs.state.encoding import arrow
    from jobs.state.kernel import load_checked_spec

    start = perf_counter()
    spec = load_checked_spec(model, settings.models)
    source_path, target = Path(input), Path(output)
    check_target(target, source_path)
    learned = find_learned_parameters(settings.warehouse, spec, snapshot)
    title = f"filter {spec.name}"
    with Progress(title, None, settings.quiet) as progress:
        progress.note("reading")
        source = read_rows(spec, input)
        rows = parse(spec, source, input)
        pa.default_memory_pool().release_unused()  # the pieces of the files
        files = list_input_files(input, list_endings(spec))
    # Rows without inputs, and duplicates, are rejected below: they are no remarks on the file.
    checked = rows._replace(reason=rows.reason.copy()) if spec.inputs or spec.duplicates else rows
    rows = join_file(spec, rows, [source.columns[name] for name in spec.key], inputs)
    prior = build_prior(spec, rows, source.columns, settings.warehouse, learned, snapshot is not None)
    with Progress(title, source.rows, settings.quiet, "row") as progress:
        progress.note("filtering")
        on_rows = partial(progress.advance, detail="filtering")
        estimates = filter_rows(spec, rows, smooth, prior, settings.cores, on_rows)
    repeats = None if spec.inputs else estimates.repeats
    told = [*describe_dialects(spec, files), *list_remarks(spec, source, checked, files, repeats)]
    with Progress(title, None, settings.quiet) as progress:
        progress.note("writing")
        written = {name: source.columns[name] for name in (*spec.key, spec.time)}
        if target.suffix.lower() == ".parquet" and files[0].suffix.lower() not in (".parquet", ".orc"):
            # CSV, JSON and text files store times as text; Parquet has a type for them.
            written[spec.time] = arrow.build_times(rows.time, estimates.applied)
        write(target, spec, written, estimates, rows.reason, settings.cores)
    told += _list_faults(spec, source, rows, estimates)
    report = _report(spec, input, output, rows, estimates, perf_counter() - start)
    if not estimates.applied.any():
        reason, count = Counter(rows.reason.tolist()).most_common(1)[0]
        errors = [
            f"{input}: every row was rejected, {count:,} for {reason}; the lines above say what mends it"
        ]
    else:
        errors = []
    lines = [*report.lines[:1], *prior.lines, *report.lines[1:], *told]
    return Report(lines, {**report.data, **prior.data}, errors=errors, error_code=INPUT_ERROR)


def _list_faults(spec: ModelSpec, source: RawRows, rows: ParsedRows, estimates: FilteredRows) -> list[str]:
    """Return what is to be said of lost keys, of steps that are not equal, and of rows that cannot be smoothed."""
    from jobs.offline.row_faults import format_gaps, format_lost, list_row_step_kinds

    found = (
        [] if estimates.gaps is None else format_gaps(list_row_step_kinds(spec.definition()), estimates.gaps)
    )
    if unsmoothed := estimates.unsmoothed:
        found.append(
            f"warning: {format_count(unsmoothed, 'row')} cannot be smoothed, since rounding has left "
            f"nothing of a variance; "
            "leave states of a wide initial.covariance diffuse"
        )
    if estimates.lost is None:
        return found
    place = int((rows.key == estimates.lost.worst).argmax())
    name = "/".join(str(source.columns[column][place]) for column in spec.key) or spec.name
    return [*found, format_lost(estimates.lost, name, spec.name)]


def _report(
    spec: ModelSpec, input: str, output: str, rows: ParsedRows, estimates: FilteredRows, seconds: float
) -> Report:
    import numpy as np

    from jobs.offline.filtering import compute_nis_ratio
    from kalman import FLAGS

    applied, flag = estimates.applied, estimates.flag
    rejected = Counter(rows.reason[~applied].tolist())
    flagged = Counter(str(FLAGS[code]) for code in flag[flag != 0].tolist())
    nis = np.where(applied & (flag == 0), estimates.read_numbers("nis"), np.nan)
    ratio = compute_nis_ratio(nis, rows.y)
    keys = rows.key if applied.all() else rows.key[applied]
    data: dict[str, Any] = {
        "model": spec.name,
        "version": spec.version,
        "input": input,
        "output": output,
        "rows": len(applied),
        "keys": int(np.count_nonzero(np.bincount(keys))),
        "rejected": sum(rejected.values()),
        "rejected_by_reason": dict(rejected.most_common()),
        "flagged": sum(flagged.values()),
        "flagged_by_reason": dict(flagged.most_common()),
        "keys_lost": 0 if estimates.lost is None else estimates.lost.keys,
        "gaps": None if estimates.gaps is None else estimates.gaps.gaps,
        "log_likelihood": float(np.nansum(estimates.read_numbers("log_likelihood"))),
        "nis_per_component": ratio,
        **({} if estimates.fit is None else estimates.fit._asdict()),
        "seconds": round(seconds, 3),
    }
    lines = [
        f"{spec.name} v{spec.version}: {format_count(data['rows'], 'row')} of {format_count(data['keys'], 'key')} "
        f"in {seconds:.2f} s -> {output}",
        f"log-likelihood {data['log_likelihood']:.6f}"
        + ("" if ratio is None else f", NIS per measured component {ratio:.3f} (1 is expected)"),
        *([] if estimates.fit is None else estimates.fit.lines),
        f"rejected {data['rejected']:,}, flagged {data['flagged']:,}",
    ]
    for outcome, counts in (("rejected", rejected), ("flagged", flagged)):
        lines += [f"  {outcome}: {reason}: {count:,}" for reason, count in counts.most_common(10)]
    return Report(lines=lines, data=data)


if __name__ == "__main__":
    run.main()
