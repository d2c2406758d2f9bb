"""Rules of a user's own: functions over the rows of many keys, with a state."""

from __future__ import annotations

from typing import Any

import numpy as np


def climbing(rows: Any, state: Any, limit: float, least: float) -> Any:
    """Tell when `least` readings in a row are at or above a limit, each above the last, and when that ends."""
    value = rows["measured.temperature"]
    events: list[tuple[Any, ...]] = []
    for key, row in rows.iterate_turns():  # the first rows of all keys at once, the second, ...
        now = value[row]
        seen = ~np.isnan(now)
        hot = seen & (now >= limit)
        onward = hot & (state["run"][key] > 0) & (now > state["last"][key])
        run = np.where(seen, np.where(onward, state["run"][key] + 1, hot), state["run"][key])
        since = np.where(hot & ~onward, rows.time[row], state["since"][key])
        was = state["active"][key]
        raised, cleared = seen & ~was & (run >= least), seen & was & (now < limit)
        state["run"][key], state["since"][key] = run, since
        state["last"][key] = np.where(seen, now, state["last"][key])
        state["active"][key] = (was | raised) & ~cleared
        for which, up in ((raised, True), (cleared, False)):
            at = row[which]
            start = since[which] if up else rows.time[at]
            count = run[which] if up else np.ones(len(at), np.int64)
            events.append((at, np.full(len(at), up), now[which], start, count))
    names = ("row", "raised", "value", "since", "readings")
    return state, dict(zip(names, map(np.concatenate, zip(*events, strict=True)), strict=True))


def newest(rows: Any, state: Any) -> Any:
    """Keep the three newest readings of each key; tell when their sum is above 306. It fails at a reading of 13."""
    value = rows["measured.temperature"]
    if np.any(value == 13.0):
        raise ValueError("an unlucky reading")
    kept, told = state["newest"], []
    for key, row in rows.iterate_turns():
        kept[:, key] = np.vstack([kept[1:, key], value[row]])
        told.append(row[kept[:, key].sum(axis=0) > 306])
    return {"newest": kept}, {"row": np.concatenate(told)}


def unfit(rows: Any, state: Any, how: float) -> Any:
    """Break the contract in one of several ways."""
    given = [
        lambda: state,
        lambda: ({}, None),
        lambda: ({"count": np.zeros(rows.keys + 1)}, None),
        lambda: ({"count": np.full(rows.keys, 0.5)}, None),
        lambda: (state, {"row": [len(rows.key)]}),
        lambda: (state, {"line": [0]}),
        lambda: 1 / 0,
    ]
    return given[int(how)]()
