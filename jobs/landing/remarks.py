"""Report on the rows of a source: counts, reasons of rejection with remedies, and warnings about accepted rows."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jobs.core.errors import UserError
from jobs.core.report import Report, format_count
from jobs.landing.checking import ParsedRows, build_payloads
from jobs.landing.csv_parquet import read_schema
from jobs.landing.json_rows import SCHEMA_DOCUMENTS, has_member, is_json, parse_object, read_json_documents
from jobs.landing.raw_rows import RawRows
from jobs.landing.text_lines import is_text
from jobs.landing.values.rejected import (
    describe_clock_changes,
    describe_repeats,
    explain_reasons,
    find_epoch_doubt,
)
from jobs.landing.written_pieces import RowCounts
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding import arrow
from jobs.state.encoding.row_order import count_repeats
from jobs.storage.tables import measurements
from jobs.storage.warehouse import Tables

MOST_FILES = 20
"""Maximum number of files that are searched for the cause of missing measurements."""


def list_remarks(
    spec: ModelSpec, source: RawRows, rows: ParsedRows, files: Sequence[Path], repeats: int | None = None
) -> list[str]:
    """Return remedies for rejected rows, and notes on repeated rows, missing measurements and doubtful times.

    Args:
        spec: spec of the model.
        source: N unparsed rows.
        rows: the same N rows after parsing.
        files: files that contain the rows.
        repeats: number of accepted rows with the key and the time of another row; None means that it is unknown.
    """
    bad = ~rows.accepted
    reasons, first = np.unique(rows.reason[bad].astype(str), return_index=True)
    places = np.flatnonzero(bad)[first]
    wanted = np.zeros(len(bad), bool)
    wanted[places] = True
    shown = build_payloads(source, wanted).take(arrow.build_integers(places)).to_pylist()
    counts = Counter(rows.reason[bad].tolist())
    good = np.flatnonzero(~bad) if bad.any() else slice(None)
    times = rows.time[good]
    span = (int(times.min()), int(times.max())) if len(times) else (None, None)
    examples = dict(zip(reasons.tolist(), shown, strict=True))
    lines = [f"  {line}" for line in explain_reasons(spec, counts, examples, span[1])]
    if source.left_out:
        lines.append(
            f"left out {format_count(source.left_out, 'line')} between the rows: comments, and headers again"
        )
    lines += describe_clock_changes(spec, rows.clocks)
    if repeats is None and spec.duplicates is None:
        repeats = count_repeats(rows.key[good], times)
    if repeats and spec.duplicates is None:
        lines.append(describe_repeats(spec, repeats, span))
    lines += [f"note: {note}" for note in find_absent_notes(spec, rows, files)]
    doubt = find_epoch_doubt(spec, *span)
    return lines if doubt is None else [*lines, f"note: {doubt}"]


def format_absent_notes(
    spec: ModelSpec, absent: Mapping[str, int], rows: int, paths: Sequence[str | Path]
) -> list[str]:
    """Return a note for each measurement that is missing in accepted rows.

    Args:
        spec: spec of the model.
        absent: number of accepted rows without a measurement, by name of the measurement.
        rows: number of accepted rows.
        paths: files that contain the rows.
    """
    notes = []
    for name in spec.measurement:
        if count := absent.get(name, 0):
            causes = (
                _find_cause(spec, Path(path), spec.list_file_columns([name])[0])
                for path in paths[:MOST_FILES]
            )
            cause = next((one for one in causes if one is not None), "")
            notes.append(f"{name} is missing in {count:,} of {format_count(rows, 'row')}{cause}")
    return notes


def find_absent_notes(spec: ModelSpec, rows: ParsedRows, paths: Sequence[str | Path]) -> list[str]:
    """Return the notes of `format_absent_notes` for parsed rows."""
    accepted = rows.accepted
    counts = {
        name: int(np.isnan(values[accepted]).sum())
        for name, values in zip(spec.measurement, rows.y, strict=True)
    }
    return format_absent_notes(spec, counts, int(accepted.sum()), paths)


def _find_cause(spec: ModelSpec, path: Path, name: str) -> str | None:
    """Return why a measurement is missing in the rows of a file; None if the file does not show the cause."""
    try:
        if is_json(path):
            return _find_document_cause(path, name)
        if is_text(path):
            return None
        names = read_schema(path, spec.file_columns, spec.files).names
        others = [other for other in names if other != name and _simplify_name(other) == _simplify_name(name)]
    except UserError:
        return None
    return f": {path.name} has the column {others[0]!r} too; give both one name" if others else None


def _find_document_cause(path: Path, name: str) -> str | None:
    rows = [parse_object(document)[0] for document in read_json_documents(path, SCHEMA_DOCUMENTS)]
    lacking = [row for row in rows if not has_member(row, name)]
    if not lacking:
        return None
    others = Counter(
        other for row in lacking for other in row if _simplify_name(other) == _simplify_name(name)
    )
    instead = "".join(
        f"; {count:,} of these have {other!r}: give both one name" for other, count in others.most_common(1)
    )
    return f": member {name!r} is absent in {len(lacking):,} of the first {len(rows):,} rows of {path.name}{instead}"


def _simplify_name(name: str) -> str:
    """Return a name in lower case, without the punctuation between its words."""
    return re.sub(r"[\W_]", "", name).casefold()


def describe_rows(
    spec: ModelSpec,
    counts: RowCounts,
    reasons: Mapping[str, int],
    spans: Iterable[tuple[int, int] | tuple[None, None]],
    in_parts: bool,
    lacking: Sequence[str] = (),
    unit: str = "row",
) -> list[str]:
    """Return lines on the quarantined rows with remedies, and notes on accepted rows.

    The notes are about rows that repeat other rows, have doubtful times, or lack a measurement.

    Args:
        spec: spec of the model.
        counts: counts of all rows.
        reasons: number of rows that this run has quarantined, by reason.
        spans: first and last time of each file or source, in microseconds since 1970.
        in_parts: whether repeated rows were counted only within each part of a file or source.
        lacking: files with rows that lack a measurement.
        unit: word for a row, such as "message".
    """
    lines: list[str] = []
    if reasons:
        each = "; ".join(f"{count:,} {reason}" for reason, count in sorted(reasons.items()))
        lines.append(f"quarantined {format_count(sum(reasons.values()), unit)}: {each}")
        lines += [f"  {line}" for line in explain_reasons(spec, reasons, counts.examples, counts.span[1])]
    if counts.repeats and spec.duplicates is None:
        lines.append(describe_repeats(spec, counts.repeats, counts.span, in_parts))
    doubts = {find_epoch_doubt(spec, *one) for one in spans} - {None}
    notes = format_absent_notes(spec, counts.absent, counts.rows, lacking)
    return [*lines, *(f"note: {note}" for note in (*doubts, *notes))]


def build_row_data(counts: RowCounts, reasons: Mapping[str, int]) -> dict[str, Any]:
    """Return the row counts of a report as data for JSON output."""
    return {
        "rows": counts.rows,
        "quarantined": sum(reasons.values()),
        "reasons": dict(sorted(reasons.items())),
        "repeats": counts.repeats,
        "absent": dict(+counts.absent),
    }


def build_source_report(
    warehouse: Tables,
    spec: ModelSpec,
    counts: RowCounts,
    began: float,
    place: tuple[str | None, str, dict[str, Any]] = (None, "", {}),
    unit: str = "row",
) -> Report:
    """Return the report of a landing.

    Args:
        warehouse: warehouse with the measurements table.
        spec: spec of the model.
        counts: counts of the rows of this run.
        began: start of the run, in seconds of the monotonic clock.
        place: text on skipped data, or None; landed position in words; landed position as data.
        unit: word for a row, such as "message".
    """
    assert spec.source is not None
    note, upto, data = place
    version = warehouse.latest_version(measurements(spec.name))
    lines = [] if note is None else [note]
    lines.append(f"landed {format_count(counts.rows, unit)} of {spec.source.title} for {spec.name}{upto}")
    lines += describe_rows(spec, counts, counts.reasons, [counts.span], in_parts=True, unit=unit)
    lines.append(f"the measurements table is at version {version}")
    about = {
        "model": spec.name,
        "source": spec.source.title,
        **data,
        **build_row_data(counts, counts.reasons),
    }
    return Report(lines, {**about, "version": version, "seconds": time.monotonic() - began})
