"""Say what mends rejected rows, and what is doubtful about accepted ones. No Spark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jobs.core.report import plural
from jobs.encoding import arrow
from jobs.landing.parsing import ParsedRows
from jobs.landing.raw_rows import Source
from jobs.landing.values.absent_values import absent_in
from jobs.landing.values.payloads import payloads
from jobs.landing.values.rejected import advice, clock_notes, doubtful_epoch, repeated
from jobs.specs.model_spec import ModelSpec


def remarks_on(spec: ModelSpec, source: Source, rows: ParsedRows, files: Sequence[Path] = ()) -> list[str]:
    """Return what mends rejected rows, and notes about repeats and times.

    Args:
        spec: of the model.
        source: N rows as written.
        rows: the same N rows, parsed.
        files: that they are of.
    """
    bad = rows.reason != None  # noqa: E711 - elementwise
    reasons, first = np.unique(rows.reason[bad].astype(str), return_index=True)
    places = np.flatnonzero(bad)[first]
    shown = payloads(source, np.isin(np.arange(len(bad)), places)).take(arrow.integers(places)).to_pylist()
    counts = Counter(rows.reason[bad].tolist())
    good = np.flatnonzero(~bad)
    times = rows.time[good]
    span = (int(times.min()), int(times.max())) if len(good) else (None, None)
    examples = dict(zip(reasons.tolist(), shown, strict=True))
    lines = [f"  {line}" for line in advice(spec, counts, examples, span[1])]
    if source.left_out:
        lines.append(
            f"left out {plural(source.left_out, 'line')} between the rows: comments, and headers again"
        )
    lines += clock_notes(spec, rows.clocks)
    repeats = len(good) - len(np.unique(np.stack([rows.key[good], times]), axis=1).T)
    if repeats and spec.duplicates is None:
        lines.append(repeated(spec, repeats, span))
    lines += [f"note: {note}" for note in absent_in(spec, rows, list(files))]
    doubt = doubtful_epoch(spec, *span)
    return lines if doubt is None else [*lines, f"note: {doubt}"]
