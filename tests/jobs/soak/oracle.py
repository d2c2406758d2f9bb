"""What a stream must have estimated, computed by the filter alone, without Spark: one batch pass, row after row.

Rows are known in the *parts* in which they were committed to the measurements. A stream continues one pass over all of
them, whatever happens to it, except where a command makes it start without state (`upgrade --mode stateless`) or from
a snapshot of another pass (`stream --adopt`): from such a part on, its rows belong to a pass that began at that part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from jobs import filter as offline
from jobs.core.settings import Settings
from tests.jobs.support.pipeline import ordered

COMPARED = ("mean", "covariance", "log_likelihood", "nis")


@dataclass
class Oracle:
    """The parts that have landed, and for the live stream from which part on it continues a pass begun at which.

    passes: pairs (first part, part at which the pass began without state), each replacing the earlier ones from its
    first part on. The live estimates begin with part `first`; parts before it are in the first snapshot.
    """

    settings: Settings
    model: str
    folder: Path
    first: int = 1
    parts: list[pd.DataFrame] = field(default_factory=list)
    passes: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    _filtered: dict[tuple[int, int], pd.DataFrame] = field(default_factory=dict)

    @property
    def began(self) -> int:
        """The part at which the pass began that the live stream continues."""
        return self.passes[-1][1]

    def continues(self, part: int, began: int) -> None:
        """Let the live stream continue, from a part on, a pass that began without state at another part."""
        self.passes = [one for one in self.passes if one[0] < part] + [(part, began)]

    def one_pass(self, began: int) -> pd.DataFrame:
        """Return the estimates of all parts from one on, filtered without earlier state; with the column `part`."""
        known = began, len(self.parts)
        if known not in self._filtered:
            rows = pd.concat([one.assign(part=n) for n, one in enumerate(self.parts) if n >= began])
            rows = rows.sort_values(["id", "at"], ignore_index=True)
            given, out = self.folder / "oracle-rows.parquet", self.folder / "oracle-estimates.parquet"
            rows.drop(columns="part").to_parquet(given, index=False)
            offline.run(self.settings, self.model, str(given), str(out))
            made: Any = pd.read_parquet(out).rename(columns={"id": "key", "at": "event_time"})
            made = made.merge(
                rows.rename(columns={"id": "key", "at": "event_time"})[["key", "event_time", "part"]]
            )
            self._filtered[known] = as_compared(made)
        return self._filtered[known]

    def live(self, parts: int) -> pd.DataFrame:
        """Return what the live estimates of the first so many parts must be."""
        ends = [one[0] for one in self.passes[1:]] + [parts]
        found = []
        for (start, began), end in zip(self.passes, ends, strict=True):
            start, end = max(start, self.first), min(end, parts)
            if start < end:
                made = self.one_pass(began)
                found.append(made[(made["part"] >= start) & (made["part"] < end)])
        return pd.concat(found, ignore_index=True)

    def last(self, began: int | None = None, parts: int | None = None) -> pd.DataFrame:
        """Return each key's last estimate of a pass, by default of the live stream's, before a part."""
        made: Any = self.one_pass(self.began if began is None else began)
        before = len(self.parts) if parts is None else parts
        return made[made["part"] < before].sort_values("event_time").groupby("key").tail(1)


def as_compared(frame: pd.DataFrame) -> pd.DataFrame:
    """Return estimates with keys as text, and times without a zone, in microseconds."""
    frame = frame.assign(key=frame["key"].astype(str))
    if getattr(frame["event_time"].dtype, "tz", None) is not None:
        frame["event_time"] = frame["event_time"].dt.tz_convert("UTC").dt.tz_localize(None)
    frame["event_time"] = frame["event_time"].astype("datetime64[us]")
    return ordered(frame) if "nis" in frame else frame


def differences(
    found: pd.DataFrame, expected: pd.DataFrame, columns: tuple[str, ...] = COMPARED
) -> list[str]:
    """Return in a sentence each what differs between two sets of estimates; nothing if they are the same bits."""
    said = []
    by = ["key", "event_time"]
    doubled = found[found.duplicated(by)]
    if len(doubled):
        said.append(f"{len(doubled)} estimates are doubled, first {_where(doubled)}")
    both = expected[by].merge(found[by].drop_duplicates(), how="outer", indicator="side")
    for side, what in (("left_only", "are missing"), ("right_only", "are of rows that nobody sent")):
        some = both[both["side"] == side]
        if len(some):
            said.append(f"{len(some)} of {len(expected)} estimates {what}, first {_where(some)}")
    joined = expected.merge(found.drop_duplicates(by), on=by, suffixes=("", "_found"))
    for name in columns:
        left, right = joined[name], joined[f"{name}_found"]
        other = joined[[not same(a, b) for a, b in zip(left, right, strict=True)]]
        if len(other):
            said.append(f"{len(other)} of {len(joined)} estimates have another {name}, first {_where(other)}")
    return said


def same(one: Any, other: Any) -> bool:
    """Tell if two values are the same bits, or both missing."""
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other) or bool(pd.isna(one) and pd.isna(other))


def _where(frame: Any) -> str:
    first = frame.sort_values(["event_time", "key"]).iloc[0]
    return f"key {first['key']} at {first['event_time']}"
