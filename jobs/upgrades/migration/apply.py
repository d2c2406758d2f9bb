"""Migrate the rows of a snapshot on Spark, and measure and describe how states, keys and parameters change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.sql import functions as F

from jobs.snapshots.state_rows import StateRows, build_state_columns, parse_states
from jobs.state.encoding.rows import map_batches
from jobs.upgrades.migration.parameters import format_parameters, format_value
from jobs.upgrades.migration.state_map import Migration
from kalman.filters.own_parameters import FIELD, find_key_parameters
from kalman.models.definition import convert_to_definition
from kalman.types import Filter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


SHOWN_KEYS = 5
"""Maximum number of keys with an invalid state that a message names."""
NO_NUMBER = "state: the key's state is not a number"
"""Reason, in the quarantine table, for leaving a key out."""


def apply_migration(rows: StateRows, migration: Migration) -> StateRows:
    """Return the rows of a snapshot with the states of the new version, without the keys that are left out."""
    return rows.then(map_batches(partial(_select_finite, migration))).then(
        map_batches(partial(_migrate_batch, migration))
    )


def compute_change_summary(batches: Iterable[pa.RecordBatch], migration: Migration) -> dict[str, Any]:
    """Return a summary of the changes that a migration makes to the states in batches of a snapshot's rows.

    left_out, left_out_keys: number and examples of keys whose state is not a number. keys: number of other keys. wrong,
    wrong_keys: number and examples of keys whose new state is invalid. before, after: average mean and variance of each
    state over `keys`, infinite if a key has it diffuse; a state that keeps its name also has the largest change of its
    mean, and the number of keys whose mean changes. key_parameters: averages of the per-key parameters before and
    after.
    """
    measured = [_measure_batch(batch, migration) for batch in batches if batch.num_rows]
    parts = [part for part in measured if "keys" in part]  # batches with a finite state
    old, new = migration.source.states, migration.target.states
    keys = sum(part["keys"] for part in parts)
    total = {
        name: np.sum([part[name] for part in parts], axis=0) if parts else np.zeros(2 * len(states))
        for name, states in (("old", old), ("new", new))
    }
    shared = [name for name in new if name in old]
    kept = [np.array(part["kept"]).reshape(-1, 2) for part in parts]
    changes = np.array(kept).reshape(len(parts), len(shared), 2)

    def averages(names: tuple[str, ...], sums: Any) -> dict[str, dict[str, float]]:
        n = len(names)
        return {
            name: {"mean": float(sums[i] / max(keys, 1)), "variance": float(sums[n + i] / max(keys, 1))}
            for i, name in enumerate(names)
        }

    after = averages(new, total["new"])
    for i, name in enumerate(shared):
        after[name]["largest_change"] = float(changes[:, i, 0].max(initial=0.0))
        after[name]["keys_changed"] = int(changes[:, i, 1].sum())
    return {
        "keys": keys,
        "wrong": sum(part["wrong"] for part in parts),
        "wrong_keys": [key for part in parts for key in part["wrong_keys"]][:SHOWN_KEYS],
        "left_out": sum(part["left_out"] for part in measured),
        "left_out_keys": sorted(key for part in measured for key in part["left_out_keys"])[:SHOWN_KEYS],
        "before": averages(old, total["old"]),
        "after": after,
        "key_parameters": {
            when: _average_key_parameters(model, parts, field, keys)
            for when, model, field in (
                ("before", migration.source, "old_own"),
                ("after", migration.target, "new_own"),
            )
        },
        "dropped": [name for name in old if name not in new],
        "added": [name for name in new if name not in old],
    }


def select_without_number(rows: DataFrame, migration: Migration) -> DataFrame:
    """Return the key and the state (as JSON) of the rows that are left out of the snapshot."""
    state = F.to_json(
        F.struct(*(name for name in rows.columns if name not in ("snapshot_id", "model", "key")))
    )
    bad = StateRows.of(rows).through(map_batches(partial(_select_bad_keys, migration)), "key string")
    return rows.withColumn("state", state).select("key", "state").join(bad, "key", "left_semi")


def _select_bad_keys(migration: Migration, batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.select(["key"]).take(pa.array(_split_by_finite(batch, migration)[1]))


def _split_by_finite(batch: pa.RecordBatch, migration: Migration) -> tuple[Any, Any]:
    """Return the indices of the rows whose state has only finite numbers, and the indices of the other rows."""
    # The state is checked instead of its mean and covariance, which may be infinite in some filters.
    finite = np.isfinite(migration.source.restore(*parse_states(batch, migration.source))).all(axis=0)
    return np.flatnonzero(finite), np.flatnonzero(~finite)


def _select_finite(migration: Migration, batch: pa.RecordBatch) -> pa.RecordBatch:
    good, bad = _split_by_finite(batch, migration)
    return batch.take(pa.array(good)) if len(bad) else batch


def _migrate_batch(migration: Migration, batch: pa.RecordBatch) -> pa.RecordBatch:
    given = (batch.column(name) for name in ("key", "state_index", "event_time", "log_likelihood"))
    after = migration.apply(*parse_states(batch, migration.source))
    return pa.RecordBatch.from_pydict(build_state_columns(*given, moments=after[:3]))


def _measure_batch(batch: pa.RecordBatch, migration: Migration) -> dict[str, Any]:
    """Return the sums that `compute_change_summary` needs from a batch of rows."""
    old, new = migration.source.states, migration.target.states
    good, bad = _split_by_finite(batch, migration)
    left_out = {
        "left_out": len(bad),
        "left_out_keys": batch.column("key").take(pa.array(bad[:SHOWN_KEYS])).to_pylist(),
    }
    if not len(good):
        return left_out
    batch = batch.take(pa.array(good))
    mean, covariance, extras = parse_states(batch, migration.source)
    after = migration.apply(mean, covariance, extras)
    moves = [np.abs(after.mean[new.index(name)] - mean[old.index(name)]) for name in new if name in old]
    wrong = np.flatnonzero(after.wrong)
    return {
        **left_out,
        "keys": batch.num_rows,
        "wrong": len(wrong),
        "wrong_keys": batch.column("key").take(pa.array(wrong[:SHOWN_KEYS])).to_pylist(),
        "old": _sum_moments(mean, covariance, extras),
        "new": _sum_moments(after.mean, after.covariance, after.extras),
        "kept": [number for move in moves for number in (float(move.max()), float(np.count_nonzero(move)))],
        "old_own": _sum_key_parameters(migration.source, extras),
        "new_own": _sum_key_parameters(migration.target, after.extras),
    }


def _sum_key_parameters(model: Filter, extras: Mapping[str, Any]) -> list[float]:
    """Return the sum over keys of each entry of the per-key parameters; an empty list without such parameters."""
    rows = find_key_parameters(model).rows
    return extras[FIELD].sum(axis=1).tolist() if rows else []


def _average_key_parameters(model: Filter, parts: Sequence[Any], field: str, keys: int) -> dict[str, Any]:
    """Return the averages over keys of the per-key parameters, in the notation of a spec."""
    own = find_key_parameters(model)
    sums = [part[field] for part in parts]
    if not own.rows or not sums:
        return {}
    mean = np.sum(sums, axis=0) / keys
    return {
        name: convert_to_definition(p._replace(value=tuple(mean[own.rows[name]])))
        for name, p in own.parameters.items()
    }


def _sum_moments(mean: Any, covariance: Any, extras: Mapping[str, Any]) -> list[float]:
    """Return the sums over K keys of n means and n variances, infinite of a state that a key has diffuse."""
    n = len(mean)
    variance = covariance[:: n + 1].sum(axis=1)
    if "diffuse" in extras:  # the squares of stored finite columns vanish (`kalman.filters.diffuse`)
        A = extras["diffuse"].reshape(n, -1)
        variance = np.where((A * A).any(axis=1), np.inf, variance)
    return [*mean.sum(axis=1).tolist(), *variance.tolist()]


def _format_moment(state: Mapping[str, float] | None, name: str, width: int) -> str:
    value = None if state is None else state[name]
    text = "-" if value is None else "diffuse" if value == np.inf else f"{value:.6g}"
    return f"{text:>{width}}"


def format_change_table(change: Mapping[str, Any]) -> list[str]:
    """Return the result of `compute_change_summary` as the lines of a table, one line per state."""
    lines = [
        f"{'state':<20} {'mean before':>14} {'after':>14} {'variance before':>16} {'after':>14}  keys changed"
    ]
    before, after = change["before"], change["after"]
    for name in [*after, *(name for name in before if name not in after)]:
        old, new = before.get(name), after.get(name)
        cells = [_format_moment(one, "mean", 14) for one in (old, new)]
        cells += [_format_moment(old, "variance", 16), _format_moment(new, "variance", 14)]
        if new is None:
            changed = "dropped"
        elif old is None:
            changed = "new"
        else:
            changed = f"{new['keys_changed']:,}" + (
                f", by {new['largest_change']:.6g} at most" if new["keys_changed"] else ""
            )
        lines.append(f"{name:<20} {' '.join(cells)}  {changed}")
    return lines


def format_left_out(change: Mapping[str, Any]) -> list[str]:
    """Return lines about the keys that a migration leaves out; no lines if no key is left out."""
    count = change.get("left_out")
    if not count:
        return []
    some = ", ".join(change["left_out_keys"])
    return [
        f"left out {count:,} of {count + change['keys']:,} keys, whose state is not a number (such as {some}): each "
        f"starts anew with its next row"
    ]


def format_rekeying(change: Mapping[str, Any]) -> list[str]:
    """Return lines about the keys that a migration changes; no lines if the keys stay the same."""
    rekeyed = change.get("rekeyed")
    if not rekeyed:
        return []
    lines = [f"  {change['keys']:,} keys become {rekeyed['keys']:,}"]
    if rekeyed["merged"]:
        lines.append(f"  {rekeyed['merged']:,} of them were merged into {rekeyed['into']:,}")
    return lines


def format_change(model: str, change: Mapping[str, Any]) -> list[str]:
    """Return lines on the states, keys and parameters that a migration changes (`migrating.migrate`)."""
    lines: list[str] = []
    if "after" in change:
        lines += [f"  {line}" for line in format_change_table(change)]
        lines += [*format_rekeying(change), *format_left_out(change)]
    return [*lines, *format_changed_parameters(model, change)]


def format_changed_parameters(model: str, change: Mapping[str, Any]) -> list[str]:
    """Return lines about the parameters that a migration changes; per-key parameters appear as averages."""
    lines = format_parameters(model, change.get("parameters") or [])
    own = change.get("key_parameters") or {"before": {}, "after": {}}
    for name in {**own["before"], **own["after"]}:
        was, now = (format_value(own[when].get(name)) for when in ("before", "after"))
        lines.append(f"each key has its own {name}: on average {was} before, {now} after")
    return [f"  {line}" for line in lines]
