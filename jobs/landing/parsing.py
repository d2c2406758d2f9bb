"""Parse raw rows into numbers, or reject them with a reason. Rules: docs/models.md, "What a row may hold"."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.landing.raw_rows import RawRows, join_parts, reject
from jobs.landing.values.clock_changes import ClockChanges
from jobs.landing.values.keys import assign_id_codes, assign_key_codes
from jobs.landing.values.numbers import build_rules, parse_numbers
from jobs.landing.values.times import (
    AFTER_LANDING,
    BEFORE_RANGE,
    Times,
    find_times,
    is_after_landing,
    is_before_range,
)
from jobs.specs.model_spec import ModelSpec

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class ParsedRows(NamedTuple):
    """Rows as numbers, in input order.

    key    (N,) codes from 0 below `keys`
    time   (N,) microseconds since 1970-01-01 UTC
    y, u   (m, N) measurements, NaN = missing; (c, N) controls
    reason (N,) why a row is rejected, None where it is accepted; the numbers of a rejected row are undefined
    ids    (N,) codes of the ids that identify duplicates, -1 where missing or where the spec has no id
    clocks counts of local times at clock changes
    """

    key: Ints
    keys: int
    time: Ints
    y: Floats
    u: Floats
    reason: NDArray[np.object_]
    ids: Ints
    clocks: ClockChanges = ClockChanges()

    @property
    def accepted(self) -> NDArray[np.bool_]:
        """Return which rows (N,) are accepted."""
        return self.reason == None  # noqa: E711 - elementwise


def parse(spec: ModelSpec, source: RawRows, file: str) -> ParsedRows:
    """Parse the columns; a rejected row keeps its first reason.

    Raises:
        UserError: a column's type cannot hold the values that the spec expects.
    """
    reason = source.reasons()
    key, keys = assign_key_codes(spec, source, file, reason)
    times = _parse_times(spec, source, key, file)
    time = times.micros
    reject(reason, times.missing, f"time {spec.time}: missing")
    reject(reason, ~times.known, f"time {spec.time}: not a time")
    reject(reason, is_after_landing(spec, time, source.landed), f"time {spec.time}: {AFTER_LANDING}")
    reject(reason, is_before_range(spec, time), f"time {spec.time}: {BEFORE_RANGE}")
    rules = build_rules(spec.missing_values, spec.files)
    y = parse_numbers(spec.measurement, "measurement", source, rules, file, reason)
    u = parse_numbers(spec.control, "control", source, rules, file, reason)
    for name, values in zip(spec.control, u, strict=True):
        reject(reason, np.isnan(values), f"control {name}: missing")
    ids = np.full(source.rows, -1)
    for name in spec.id_columns:
        ids = assign_id_codes(source.columns[name], rules, f"{file}: id column '{name}'")
    return ParsedRows(key, keys, time, y, u, reason, ids, times.clocks)


def _parse_times(spec: ModelSpec, source: RawRows, key: Ints, file: str) -> Times:
    """Return the times of a part of a file; read earlier parts as far as a repeated hour needs them."""
    found = find_times(spec, source.columns[spec.time], key, file)
    earlier = iter(()) if source.before is None or not found.clocks.is_cut else source.before()
    both, rows, met = source, source.rows, found.clocks.repeated
    for part in earlier:
        both = join_parts([part, both._replace(before=None)], list(spec.columns))
        codes, _ = assign_key_codes(spec, both, file, np.full(both.rows, None, object))
        whole = find_times(spec, both.columns[spec.time], codes, file)
        found = Times(whole.micros[-rows:], whole.known[-rows:], whole.missing[-rows:], whole.clocks)
        if not whole.clocks.is_cut or whole.clocks.repeated == met:
            break
        met = whole.clocks.repeated
    return found
