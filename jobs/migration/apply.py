"""Carry the rows of a snapshot over to another version on Spark, and say what that does to the states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.sql import functions as F

from jobs.encoding.arrow import lists, matrix
from jobs.migration.state_map import Migration
from jobs.snapshots.state_rows import STATE_ROWS, map_of, typed_states

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SHOWN_KEYS = 5
"""How many keys that go wrong a message names."""

_CHANGE = (
    "keys bigint, wrong bigint, wrong_keys array<string>, "
    "old array<double>, new array<double>, kept array<double>"
)


def apply_migration(rows: DataFrame, way: Migration) -> DataFrame:
    """Carry the rows of a snapshot over: the same columns, with the new version's states."""

    states = _prepared(rows, way).mapInArrow(_carrier(way), f"key string, {STATE_ROWS}")
    return typed_states(states)


def change_of(rows: DataFrame, way: Migration) -> dict[str, Any]:
    """Return what the migration does to the states of a snapshot, without writing.

    keys, wrong and wrong_keys (some); states: for each new state its average mean and variance; the same for the old
    ones; and, for a state kept under its name, how far its mean moves at most and in how many keys it moves.
    """
    old, new = way.source.states, way.target.states
    parts = _prepared(rows, way).mapInArrow(_measurer(way), _CHANGE).collect()
    keys = sum(part["keys"] for part in parts)
    total = {
        name: np.sum([part[name] for part in parts], axis=0) if parts else np.zeros(2 * len(states))
        for name, states in (("old", old), ("new", new))
    }
    kept = [np.array(part["kept"]).reshape(-1, 2) for part in parts]
    shared = [name for name in new if name in old]
    both = np.array(kept).reshape(-1, len(shared), 2)

    def averages(names: tuple[str, ...], sums: Any) -> dict[str, dict[str, float]]:
        n = len(names)
        return {
            name: {"mean": float(sums[i] / max(keys, 1)), "variance": float(sums[n + i] / max(keys, 1))}
            for i, name in enumerate(names)
        }

    after = averages(new, total["new"])
    for i, name in enumerate(shared):
        after[name]["largest_change"] = float(both[:, i, 0].max(initial=0.0))
        after[name]["keys_changed"] = int(both[:, i, 1].sum())
    return {
        "keys": keys,
        "wrong": sum(part["wrong"] for part in parts),
        "wrong_keys": [key for part in parts for key in part["wrong_keys"]][:SHOWN_KEYS],
        "before": averages(old, total["old"]),
        "after": after,
        "dropped": [name for name in old if name not in new],
        "added": [name for name in new if name not in old],
    }


def _prepared(rows: DataFrame, way: Migration) -> DataFrame:
    extras = [F.col("extras")[name].alias(f"x{i}") for i, name in enumerate(_widths(way))]
    columns = ("state_index", "log_likelihood", "mean", "covariance")
    return rows.select("key", F.unix_micros("event_time").alias("event_time"), *columns, *extras)


def _widths(way: Migration) -> dict[str, int]:
    _, _, extras = way.source.snapshot(way.source.initial(1))
    return {name: array.shape[0] for name, array in extras.items()}


def _parts(batch: pa.RecordBatch, way: Migration) -> tuple[Any, Any, dict[str, Any]]:
    n = len(way.source.states)
    extras = {
        name: matrix(batch.column(f"x{i}"), width, name)
        for i, (name, width) in enumerate(_widths(way).items())
    }
    return (
        matrix(batch.column("mean"), n, "mean"),
        matrix(batch.column("covariance"), n * n, "covariance"),
        extras,
    )


def _carrier(way: Migration) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def carry(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows == 0:
                continue
            after = way.carry(*_parts(batch, way))
            yield pa.RecordBatch.from_arrays(
                [
                    batch.column("key"),
                    batch.column("state_index"),
                    batch.column("event_time"),
                    lists(after.mean),
                    lists(after.covariance),
                    batch.column("log_likelihood"),
                    map_of(after.extras, batch.num_rows),
                ],
                ["key", "state_index", "event_time", "mean", "covariance", "log_likelihood", "extras"],
            )

    return carry


def _measurer(way: Migration) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    old, new = way.source.states, way.target.states
    shared = [(old.index(name), new.index(name)) for name in new if name in old]

    def measure(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows == 0:
                continue
            mean, covariance, extras = _parts(batch, way)
            after = way.carry(mean, covariance, extras)
            moves = [np.abs(after.mean[j] - mean[i]) for i, j in shared]
            kept = [number for move in moves for number in (float(move.max()), float(np.count_nonzero(move)))]
            wrong = np.flatnonzero(after.wrong)
            yield pa.RecordBatch.from_pydict(
                {
                    "keys": [batch.num_rows],
                    "wrong": [len(wrong)],
                    "wrong_keys": [batch.column("key").take(pa.array(wrong[:SHOWN_KEYS])).to_pylist()],
                    "old": [_sums(mean, covariance)],
                    "new": [_sums(after.mean, after.covariance)],
                    "kept": [kept],
                }
            )

    return measure


def _sums(mean: Any, covariance: Any) -> list[float]:
    n = len(mean)
    return [*mean.sum(axis=1).tolist(), *(float(covariance[i * n + i].sum()) for i in range(n))]


def table_of(change: dict[str, Any]) -> list[str]:
    """Return what a migration does as the lines of a table: a state a line."""
    lines = [
        f"{'state':<20} {'mean before':>14} {'after':>14} {'variance before':>16} {'after':>14}  keys changed"
    ]
    before, after = change["before"], change["after"]
    for name in [*after, *(name for name in before if name not in after)]:
        old, new = before.get(name), after.get(name)
        cells = [f"{one['mean']:>14.6g}" if one else f"{'-':>14}" for one in (old, new)]
        cells += [f"{one['variance']:>{w}.6g}" if one else f"{'-':>{w}}" for one, w in ((old, 16), (new, 14))]
        if new is None:
            said = "dropped"
        elif old is None:
            said = "new"
        else:
            said = f"{new['keys_changed']:,}" + (
                f", by {new['largest_change']:.6g} at most" if new["keys_changed"] else ""
            )
        lines.append(f"{name:<20} {' '.join(cells)}  {said}")
    return lines


def rekeyed_lines(change: dict[str, Any]) -> list[str]:
    """Return what a migration does to the keys, as lines; none where they stay."""
    found = change.get("rekeyed")
    if not found:
        return []
    lines = [f"  {change['keys']:,} keys become {found['keys']:,}"]
    if found["merged"]:
        lines.append(f"  {found['merged']:,} of them were merged into {found['into']:,}")
    return lines
