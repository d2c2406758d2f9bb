"""Explain how to mend rejected rows, and note doubts about accepted rows. No Spark."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jobs.core.errors import UserError
from jobs.core.report import format_count
from jobs.landing.checking import build_payloads
from jobs.landing.csv_parquet import read_schema
from jobs.landing.json_rows import SCHEMA_DOCUMENTS, has_member, is_json, parse_object, read_json_documents
from jobs.landing.parsing import ParsedRows
from jobs.landing.raw_rows import RawRows
from jobs.landing.text_lines import is_text
from jobs.landing.values.rejected import (
    describe_clock_changes,
    describe_repeats,
    explain_reasons,
    find_epoch_doubt,
)
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding import arrow

MOST_FILES = 20
"""Files that are searched for the cause of missing measurements."""


def list_remarks(spec: ModelSpec, source: RawRows, rows: ParsedRows, files: Sequence[Path]) -> list[str]:
    """Return remedies for rejected rows, and notes about repeats and times.

    Args:
        spec: the model.
        source: N rows as written.
        rows: the same N rows, parsed.
        files: the files of the rows.
    """
    bad = ~rows.accepted
    reasons, first = np.unique(rows.reason[bad].astype(str), return_index=True)
    places = np.flatnonzero(bad)[first]
    shown = (
        build_payloads(source, np.isin(np.arange(len(bad)), places))
        .take(arrow.build_integers(places))
        .to_pylist()
    )
    counts = Counter(rows.reason[bad].tolist())
    good = np.flatnonzero(~bad)
    times = rows.time[good]
    span = (int(times.min()), int(times.max())) if len(good) else (None, None)
    examples = dict(zip(reasons.tolist(), shown, strict=True))
    lines = [f"  {line}" for line in explain_reasons(spec, counts, examples, span[1])]
    if source.left_out:
        lines.append(
            f"left out {format_count(source.left_out, 'line')} between the rows: comments, and headers again"
        )
    lines += describe_clock_changes(spec, rows.clocks)
    repeats = len(good) - len(np.unique(np.stack([rows.key[good], times]), axis=1).T)
    if repeats and spec.duplicates is None:
        lines.append(describe_repeats(spec, repeats, span))
    lines += [f"note: {note}" for note in find_absent_notes(spec, rows, files)]
    doubt = find_epoch_doubt(spec, *span)
    return lines if doubt is None else [*lines, f"note: {doubt}"]


def format_absent_notes(
    spec: ModelSpec, absent: Mapping[str, int], rows: int, paths: Sequence[str | Path]
) -> list[str]:
    """Return a note for each measurement that some accepted rows lack.

    Args:
        spec: the model.
        absent: number of rows that lack each measurement, by its name.
        rows: number of accepted rows.
        paths: the files of the rows.
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
    """Return the notes of `format_absent_notes` on parsed rows."""
    accepted = rows.accepted
    counts = {
        name: int(np.isnan(values[accepted]).sum())
        for name, values in zip(spec.measurement, rows.y, strict=True)
    }
    return format_absent_notes(spec, counts, int(accepted.sum()), paths)


def _find_cause(spec: ModelSpec, path: Path, name: str) -> str | None:
    """Return why a file's rows lack a measurement, or None if the file does not show why."""
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
    """Return a name in one case, without the marks between its words."""
    return re.sub(r"[\W_]", "", name).casefold()
