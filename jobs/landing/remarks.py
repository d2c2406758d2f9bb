"""Say what mends rejected rows, and what is doubtful about accepted ones. No Spark."""

from __future__ import annotations

from collections import Counter

import numpy as np

from jobs.encoding import arrow
from jobs.landing.parsing import ParsedRows
from jobs.landing.payloads import payloads
from jobs.landing.raw_rows import Source
from jobs.landing.rejected import advice, doubtful_epoch, repeated
from jobs.specs.model_spec import ModelSpec


def remarks_on(spec: ModelSpec, source: Source, rows: ParsedRows) -> list[str]:
    """Return what mends rejected rows, and notes about repeats and times.

    Args:
        spec: of the model.
        source: N rows as written.
        rows: the same N rows, parsed.
    """
    bad = rows.reason != None  # noqa: E711 - elementwise
    reasons, first = np.unique(rows.reason[bad].astype(str), return_index=True)
    places = np.flatnonzero(bad)[first]
    shown = payloads(source, np.isin(np.arange(len(bad)), places)).take(arrow.integers(places)).to_pylist()
    counts = Counter(rows.reason[bad].tolist())
    lines = [f"  {line}" for line in advice(spec, counts, dict(zip(reasons.tolist(), shown, strict=True)))]
    good = np.flatnonzero(~bad)
    repeats = len(good) - len(np.unique(np.stack([rows.key[good], rows.time[good]]), axis=1).T)
    if repeats and spec.duplicates is None:
        lines.append(repeated(repeats))
    if len(good):
        doubt = doubtful_epoch(spec, int(rows.time[good].min()), int(rows.time[good].max()))
        lines += [] if doubt is None else [f"note: {doubt}"]
    return lines
