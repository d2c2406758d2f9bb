"""Report on landed rows of any source: counts, reasons and notes. No Spark."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jobs.core.report import Report, format_count
from jobs.landing.remarks import format_absent_notes
from jobs.landing.values.rejected import describe_repeats, explain_reasons, find_epoch_doubt
from jobs.landing.written_pieces import RowCounts
from jobs.specs.model_spec import ModelSpec
from jobs.storage.tables import measurements
from jobs.storage.warehouse import Tables


def describe_rejected(
    spec: ModelSpec, counts: RowCounts, reasons: Mapping[str, int], unit: str = "row"
) -> list[str]:
    """Return lines on the quarantined rows: their number, the reasons and the remedies.

    Args:
        spec: the model.
        counts: counts of the rows.
        reasons: number of rows that this run quarantined, by reason.
        unit: the word for a row.
    """
    if not reasons:
        return []
    each = "; ".join(f"{count:,} {reason}" for reason, count in sorted(reasons.items()))
    total = f"quarantined {format_count(sum(reasons.values()), unit)}: {each}"
    return [total, *(f"  {line}" for line in explain_reasons(spec, reasons, counts.examples, counts.span[1]))]


def describe_accepted(
    spec: ModelSpec,
    counts: RowCounts,
    spans: Iterable[tuple[int, int] | tuple[None, None]],
    in_parts: bool,
    lacking: Sequence[str] = (),
) -> list[str]:
    """Return notes on accepted rows that repeat other rows, have doubtful times, or lack a measurement.

    Args:
        spec: the model.
        counts: counts of the rows.
        spans: the first and last time of each file or source, in microseconds since 1970.
        in_parts: repeats were counted only within each part of a file or source.
        lacking: files with rows that lack a measurement.
    """
    doubts = {find_epoch_doubt(spec, *one) for one in spans} - {None}
    notes = format_absent_notes(spec, counts.absent, counts.rows, lacking)
    shown = counts.repeats and spec.duplicates is None
    repeat = [describe_repeats(spec, counts.repeats, counts.span, in_parts)] if shown else []
    return [*repeat, *(f"note: {note}" for note in (*doubts, *notes))]


def build_row_data(counts: RowCounts, reasons: Mapping[str, int]) -> dict[str, Any]:
    """Return the numbers of a report as data."""
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
        warehouse: the warehouse with the measurements.
        spec: the model.
        counts: counts of this run's rows.
        began: start of the run on the monotonic clock.
        place: sentence on skipped data, or None; the position that has landed, as words and as data.
        unit: the word for a row.
    """
    assert spec.source is not None
    note, upto, data = place
    version = warehouse.latest_version(measurements(spec.name))
    lines = [] if note is None else [note]
    lines.append(f"landed {format_count(counts.rows, unit)} of {spec.source.title} for {spec.name}{upto}")
    lines += describe_rejected(spec, counts, counts.reasons, unit)
    lines += describe_accepted(spec, counts, [counts.span], in_parts=True)
    lines.append(f"the measurements table is at version {version}")
    about = {
        "model": spec.name,
        "source": spec.source.title,
        **data,
        **build_row_data(counts, counts.reasons),
    }
    return Report(lines, {**about, "version": version, "seconds": time.monotonic() - began})
