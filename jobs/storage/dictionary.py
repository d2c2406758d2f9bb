"""Descriptions of all tables and columns. They are the comments in the tables and the contents of docs/tables.md.

The first part of a table's name is its kind: the table `estimates/nile` has the kind `estimates`. Columns that only a
spec names (keys, measurements, controls) have no description here. `estimate_comments` describes the columns whose
contents depend on a model's states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple


class TableDescription(NamedTuple):
    """Description of a table's row, and descriptions of its columns by name."""

    row: str
    columns: Mapping[str, str]


_KEY = "The key as text: of several key columns a JSON array of their values"
_MODEL = "Name of the model"
_VERSION = "Version of the model's spec"
_GENERATION = "The generation of the stream that wrote the row (table generations)"
_BATCH = "Number of the micro-batch within its generation"
_SNAPSHOT = "Id of the snapshot (table manifests)"
_MEAN = (
    "Estimate of the states, one number each in the order of the spec's states (table live, column states)"
)
_COVARIANCE = (
    "Covariance of mean, row by row (n * n numbers), or the n variances with outputs.covariance: diagonal"
)
_LIKELIHOOD = (
    "Log-density of the row's measurements, as predicted before they were seen; NaN: the row has a flag"
)
_NIS = "Normalised innovation squared; on average the number of measured columns if the model is right; null: none"
_FLAGS = "Why the row did not change its key's state, such as gated or non_finite; null: it did"

_ESTIMATE = {
    "key": _KEY,
    "event_time": "When it was measured (UTC)",
    "mean": _MEAN,
    "covariance": _COVARIANCE,
    "log_likelihood": _LIKELIHOOD,
    "nis": _NIS,
    "flags": _FLAGS,
    "model_version": _VERSION,
    "generation": _GENERATION,
    "batch_id": _BATCH,
    "source_range": "Positions between which the micro-batch read its source, as JSON",
    "correction": "True: replaces earlier estimates of its key and event_time (order.kind: replay)",
    "innovation": "Normalised innovation of each measured column; NaN: not measured (outputs.innovation)",
    "residual": "Measured value less the updated estimate's measurement (outputs.residual)",
    "residual_covariance": "Covariance of residual, row by row (outputs.residual_covariance)",
    "measured": "The row's measurements in the order of the spec; NaN: not measured (outputs.measured)",
    "control": "The row's controls, then the inputs of its key, as they were used (outputs.control)",
    "state_index": "How many rows of the key the state reflects (outputs.state_index)",
    "filter_state": "The whole state of a filter that mean and covariance do not hold",
    "mode_probabilities": "Probability of each mode after the row",
    "weights": "Weight of each component of the mixture",
    "responsibilities": "Probability that each component gave the row",
    "lagged_mean": "The smoothed mean some rows ago (smoothing.lag)",
    "lagged_covariance": "Covariance of lagged_mean",
    "lagged_age": "How many rows ago lagged_mean is of",
}
_STATE = {
    "key": _KEY,
    "state_index": "How many rows of the key the state reflects",
    "event_time": "Event time of the last of these rows (UTC)",
    "mean": _MEAN,
    "covariance": _COVARIANCE,
    "log_likelihood": "Sum of the log-likelihood of all rows",
    "extras": "What the filter keeps besides mean and covariance, by name",
}
_PROGRESS = {
    "model": _MODEL,
    "generation": _GENERATION,
    "run": "Spark's id of the run of the driver",
    "batch_id": _BATCH,
    "started_at": "When the micro-batch began (UTC)",
    "seconds": "How long it took",
    "rows": "Rows that it took in",
    "estimated": "Rows of them with an estimate",
    "quarantined": "Rows of them that were refused, with the reason in quarantine",
    "late": "Quarantined rows that were late",
    "bad_state": "Quarantined rows of keys whose state is not a number",
    "expired": "Keys that ended in it",
    "rows_per_second": "Rows over seconds",
    "durations": "Milliseconds by Spark's phase",
    "state_rows": "Blocks of keys in the state store",
    "state_bytes": "Memory of the state store",
    "watermark": "The watermark at its end; null: none",
    "position": "Where in the source it ended, as JSON",
    "lag_rows": "Rows that waited in the source then",
    "lag_seconds": "Since when the first of them had waited",
}
_WINDOWS = {
    "definition": "Digest of the spec's windows: rows of another definition are not added up",
    "size": "Length of the window, as in the spec",
    "slide": "From one window's start to the next's",
    "window_start": "Start of the window (UTC, inclusive)",
    "window_end": "End of the window (UTC, exclusive)",
    "rows": "Estimates in the window",
    "late": "Estimates that came after the window was closed, and are in no other column",
    "nis_rows": "Of them those with a NIS",
    "gated": "Of them those that the gate refused",
    "flagged": "Of them those with any flag",
    "nis_sum": "Sum of NIS",
    "mean_sum": "Sum of mean, by state",
    "innovation_sum": "Sum of the normalised innovations, by measured column",
    "mean_nis": "nis_sum over nis_rows; the number of measured components is expected",
    "share_gated": "gated over rows",
    "share_flagged": "flagged over rows",
    "mean": "Mean of each state over the window",
    "bias": "Mean normalised innovation of each measured column; 0 is expected",
    "accumulators": "What later micro-batches add to, by reading",
    "aggregates": "The spec's aggregates, by name",
}
_ALERTS = {
    "key": _KEY,
    "rule": "Name of the rule in the spec",
    "status": "raised, cleared, or what a rule's function could not decide",
    "event_time": "Event time of the row that decided it (UTC)",
    "value": "The reading that decided it",
    "since": "Event time from which on the condition had held (UTC)",
    "readings": "How many readings in a row had met the condition",
    "definition": "Digest of the rules in the spec: rows of other definitions are of other rules",
    "batch_id": "Number of the monitor's micro-batch",
}
_SKILL = {
    "key": _KEY,
    "measurement": "Name of the measured column",
    "horizon": "The horizon as in the spec, such as 6h",
    "horizon_seconds": "The same in seconds",
    "made_at": "Event time of the estimate from which it was forecast (UTC)",
    "event_time": "Time that the forecast is for (UTC)",
    "mean": "What was forecast",
    "variance": "Variance of the forecast of the measurement",
    "lower": "Lower end of the interval of the spec's probability",
    "upper": "Upper end of the interval",
    "actual": "What was measured; null: nothing within the tolerance",
    "error": "actual less mean",
    "inside": "Whether actual is in the interval",
    "crps": "Continuous ranked probability score; smaller is better",
    "log_score": "Negative log-density of what was measured; smaller is better",
    "model_version": _VERSION,
    "generation": _GENERATION,
    "definition": "Digest of the section forecast in the spec",
    "batch_id": "Number of the micro-batch of skill",
}
_OF_MODEL = {"snapshot_id": _SNAPSHOT, "model": _MODEL}

TABLES: Mapping[str, TableDescription] = MappingProxyType(
    {
        "measurements": TableDescription(
            "One measurement as it arrived.",
            {
                "_origin": "Where the row came from: the file, or history:, late: or the like",
                "_landed_at": "When it was landed (UTC)",
                "_topic": "Topic of the row's message",
                "_topic_id": "Id that the broker gave the topic",
                "_partition": "Partition of the message",
                "_offset": "Offset of the message",
            },
        ),
        "quarantine": TableDescription(
            "One rejected row of any model and source. Held rows are never removed.",
            {
                "model": _MODEL,
                "payload": "The row as it arrived, as JSON or text",
                "reason": "Why it was rejected: the kind before the colon, then the detail",
                "source": "File or topic that it came from, or the stream",
                "position": "Line of the file, or partition and offset",
                "batch_id": "Micro-batch that rejected it; null: it was rejected when it was landed",
                "generation": "Generation that rejected it; null: it was rejected when it was landed",
                "quarantined_at": "When (UTC)",
                "id": "Id of the row, for quarantine replay and discard",
                "status": "null: held; replaying, replayed or discarded",
                "replay": "Id of the replay",
                "landing": "What the replay lands the row as",
                "resolved_at": "When it was replayed or discarded (UTC)",
            },
        ),
        "late_copies": TableDescription(
            "One replay of late rows. Only the lineage that rejected them reads their copies in the measurements.",
            {
                "replay": "Id of the replay",
                "model": _MODEL,
                "rows": "How many rows",
                "replayed_at": "When (UTC)",
            },
        ),
        "live": TableDescription(
            "One generation that has live estimates: those of its micro-batches up to last_batch "
            "([readers.md](readers.md#which-rows-are-live)).",
            {
                "model": _MODEL,
                "place": "0: the live generation; 1: the one that it continues, and so on",
                "generation": "A generation with live estimates",
                "last_batch": "Its last micro-batch that is live; 9223372036854775807: all, as it goes on",
                "model_version": _VERSION,
                "states": "Names of the states, in the order of the numbers in mean",
                "key_columns": "Names of the key columns",
            },
        ),
        "estimates": TableDescription(
            "One estimate of the stream, of any generation.",
            _ESTIMATE,
        ),
        "estimates_history": TableDescription(
            "One estimate of a row of history, by the last run of estimate over that row.",
            {
                **{name: text for name, text in _ESTIMATE.items() if name != "source_range"},
                "generation": "The run of estimate that wrote the row",
                "batch_id": "Slice of the keys, by which a run is continued",
                "smoothed_mean": "Estimate from all rows of the key, earlier and later",
                "smoothed_covariance": "Covariance of smoothed_mean",
                "smoothed_mode_probabilities": "Probability of each mode from all rows",
            },
        ),
        "latest": TableDescription(
            "The latest estimate of one key in a generation (sinks.latest).",
            _ESTIMATE,
        ),
        "snapshots": TableDescription(
            "One key's state in a snapshot.", {**_OF_MODEL, "model_version": _VERSION, **_STATE}
        ),
        "manifests": TableDescription(
            "One snapshot. The commit of this row makes it visible.",
            {
                **_OF_MODEL,
                "model_version": _VERSION,
                "fingerprint": "Digest of the part of the spec that gives the states their meaning",
                "parameters": "Learned parameters, as JSON",
                "position": "Where in the source the stream goes on, and the numerics that its states are of, as JSON",
                "cut": "Event time up to which rows are reflected; null: up to the position",
                "learn_from": "First event time of the rows that were learned from",
                "learn_to": "Last event time of these rows",
                "generation": "Generation that it was exported from; null: pretrained or imported",
                "batch_id": "Micro-batch after which it was exported",
                "key_count": "Number of keys",
                "checksum": "Digest of the state rows",
                "rows": "Measurements that the states reflect",
                "snapshots_version": "Version of the table snapshots with the state rows",
                "status": "good, or removed: its rows are gone",
                "spec": "The model's spec, as JSON",
                "parent": "Snapshot that it was migrated from",
                "committed_at": "When (UTC)",
                "waiting": "Watermark and digest of the rows that wait for it, as JSON",
                "inputs": "Version of the table of inputs, as JSON",
                "learned": "Digest of its rows in the table learned, as JSON",
            },
        ),
        "generations": TableDescription(
            "One generation of a stream, with its own checkpoint. A model has at most one live generation.",
            {
                "generation": "Its name, such as nile-g0001",
                "model": _MODEL,
                "model_version": _VERSION,
                "fingerprint": "Digest of the part of the spec that gives the states their meaning",
                "snapshot_id": "Snapshot that it began from",
                "checkpoint": "Its checkpoint, below the warehouse's root",
                "start_position": "Where in the source it began, and the numerics that it was begun with, as JSON",
                "parent": "Generation that it continues; null: none",
                "parent_batch": "The parent's last micro-batch before it; -1: none",
                "partitions": "State partitions",
                "blocks": "Blocks of keys",
                "status": "live, shadow, retired, failed, or removed: the checkpoint is gone",
                "owner": "Driver that holds the lease; null: none",
                "epoch": "Number of the driver",
                "heartbeat": "When the driver was last seen (UTC)",
                "last_error": "How the last driver failed; null: it did not",
                "created_at": "When it began (UTC)",
                "retired_at": "When it was retired (UTC)",
            },
        ),
        "learned": TableDescription(
            "Parameters learned for a snapshot: of one key, of one group, or of all keys.",
            {
                **_OF_MODEL,
                "scope": "key, group, pooled, or population: what keys without many rows lean on",
                "key": "The key; null: not of one key",
                "key_group": "The group; null: there are none",
                "outcome": "How the search ended: converged, or why not",
                "reason": "More about it",
                "rows": "Rows that it was learned from",
                "log_likelihood": "Log-likelihood of these rows",
                "log_likelihood_a_row": "The same over rows",
                "parameters": "Learned parameters by name",
                "standard_errors": "Their standard errors by name",
                "own": "Share of the key's own rows in its parameters, 0 to 1; the rest is the population's",
                "nis": "Mean NIS a measured component; 1 is expected",
                "ljung_box": "p-value of no autocorrelation of the innovations",
                "keys": "Keys that it was learned from",
                "free_numbers": "The numbers that the search varied, transformed",
                "covariance": "Their covariance",
                "zero": "Which of them are at zero",
            },
        ),
        "waiting": TableDescription(
            "One row of a snapshot that waits for the watermark.",
            {
                **_OF_MODEL,
                "key": _KEY,
                "event_time": "When it was measured (UTC)",
                "measurement": "Measured values in the order of the spec",
                "control": "Controls in the order of the spec",
                "row_id": "Id of the row",
            },
        ),
        "remembered_ids": TableDescription(
            "Hashes of one row's id, by which a snapshot's stream recognises a repeated row.",
            {
                **_OF_MODEL,
                "key_identity": "Hash of the key",
                "key_check": "Second hash of the key",
                "id": "Hash of the id",
                "id_check": "Second hash of the id",
                "event_time": "When the row was measured (UTC)",
            },
        ),
        "new_keys": TableDescription(
            "The state of a new key, for running streams to import (stream.new_keys).",
            {
                **_OF_MODEL,
                "model_version": _VERSION,
                **_STATE,
                "meaning": "Digest of what the state means: a stream imports only states of its own meaning",
            },
        ),
        "archive": TableDescription(
            "The last state of an expired key (expiry).",
            {**_STATE, "model_version": _VERSION, "generation": _GENERATION, "batch_id": _BATCH},
        ),
        "progress": TableDescription("One micro-batch of a stream.", _PROGRESS),
        "windows": TableDescription("One window of event time, of one group (monitor.windows).", _WINDOWS),
        "windows_open": TableDescription(
            "One window that is not final yet (monitor.windows with when: final).", _WINDOWS
        ),
        "windows_history": TableDescription(
            "One window over a model's history (monitor --history).", _WINDOWS
        ),
        "alerts": TableDescription("One alert, raised or cleared (monitor.rules).", _ALERTS),
        "alerts_history": TableDescription("One alert over a model's history (monitor --history).", _ALERTS),
        "forecast_skill": TableDescription("One forecast and the later measurement (skill).", _SKILL),
        "forecast_skill_history": TableDescription(
            "One forecast over a model's history (skill --history).", _SKILL
        ),
        "forecasts": TableDescription(
            "One forecast of a key by a run of forecast.",
            {
                "run": "Id of the run; one commit has all its rows",
                "key": _KEY,
                "made_at": "Event time of the key's newest row (UTC)",
                "event_time": "Time that the forecast is for (UTC)",
                "step": "Number of the forecast, from 1",
                "mean": _MEAN,
                "covariance": _COVARIANCE,
                "lower": "Lower end of the states' interval",
                "upper": "Upper end of the states' interval",
                "measurement_mean": "Forecast of the measured columns",
                "measurement_covariance": "Its covariance, row by row",
                "measurement_lower": "Lower end of the measurements' interval",
                "measurement_upper": "Upper end of the measurements' interval",
                "flag": "Why there is no forecast; null: there is one",
            },
        ),
        "verifications": TableDescription(
            "One step of a run of verify: its plan, a part, or its outcome.",
            {
                "run_id": "The run",
                "model": _MODEL,
                "step": "What the row records",
                "part": "Which part of the work",
                "outcome": "What was found",
                "rows": "Landed rows that were recomputed",
                "compared": "Estimates and states that were compared",
                "differences": "How many differ",
                "first_difference": "The first one",
                "not_verified": "What was left out, and why",
                "counts": "More counts, as JSON",
                "firsts": "The first differences of each kind, as JSON",
                "plan": "The plan, as JSON",
                "recorded_at": "When (UTC)",
            },
        ),
        "verified_ends": TableDescription(
            "One state at the end of a part of a running verify, from which the next part begins.",
            {
                "run_id": "The run",
                "model": _MODEL,
                "kind": "Kind of the row",
                "key": _KEY,
                "time": "Event time in microseconds",
                "batch": "Micro-batch",
                "place": "Place within it",
                "numbers": "The state",
                "flag": "Flag of the row",
                "count": "Rows that the state reflects",
                "log_likelihood": "Their log-likelihood",
                "copied_at": "When (UTC)",
            },
        ),
    }
)


def list_comments(table: str) -> Mapping[str, str]:
    """Return the descriptions of a table's columns by name; empty if the table is not one of this product."""
    found = TABLES.get(table.partition("/")[0])
    return {} if found is None else found.columns


def estimate_comments(states: Sequence[str], keys: Sequence[str], version: int) -> dict[str, str]:
    """Return the comments of the columns that depend on a model's states and keys; `list_comments` has the others."""
    order = ", ".join(f"{place} {name}" for place, name in enumerate(states, 1))
    of = f"(version {version}; of other versions: table live, column states)"
    named = {
        "mean": f"Estimate of the states, one number each: {order} {of}",
        "covariance": f"Covariance of mean, row by row, or its variances alone: {order} {of}",
    }
    return {**{name: "Column of the key, as landed" for name in keys if name != "key"}, **named}
