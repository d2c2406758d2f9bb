"""The names and columns of this product's Delta tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jobs.core.errors import UserError
from jobs.storage.warehouse import Tables

QUARANTINE = """
    model string, payload string, reason string, source string, position string, batch_id bigint, generation string,
    quarantined_at timestamp,
    id string, status string, replay string, landing string, resolved_at timestamp
"""
LATE_COPIES = """
    replay string, model string, rows bigint, replayed_at timestamp
"""
LATE_COPIES_TABLE = "late_copies"
"""Table with one row for each replay of late rows. Measurements committed before the table existed have no copies."""
LATE_COPY = "late:"
"""Prefix of the origin of a measurement that a replay of late rows has copied."""
SNAPSHOTS = """
    snapshot_id string, model string, model_version int, key string, state_index bigint, event_time timestamp,
    mean array<double>, covariance array<double>, log_likelihood double, extras map<string, array<double>>
"""
MANIFESTS = """
    snapshot_id string, model string, model_version int, fingerprint string, parameters string, position string,
    cut timestamp, learn_from timestamp, learn_to timestamp, generation string, batch_id bigint, key_count bigint,
    checksum string, rows bigint, snapshots_version bigint, status string, spec string, parent string,
    committed_at timestamp, waiting string, inputs string, learned string
"""
WAITING_ROWS = """
    snapshot_id string, model string, key string, event_time timestamp, measurement array<double>,
    control array<double>, row_id string
"""
REMEMBERED_IDS = """
    snapshot_id string, model string, key_identity bigint, key_check bigint, id bigint, id_check bigint,
    event_time timestamp
"""
LEARNED = """
    snapshot_id string, model string, scope string, key string, key_group string, outcome string, reason string,
    rows bigint, log_likelihood double, log_likelihood_a_row double, parameters map<string, double>,
    standard_errors map<string, double>, own double, nis double, ljung_box double, keys bigint,
    free_numbers array<double>, covariance array<double>, zero array<double>
"""
GENERATIONS = """
    generation string, model string, model_version int, fingerprint string, snapshot_id string, checkpoint string,
    start_position string, parent string, parent_batch bigint, partitions int, blocks int, status string, owner string,
    epoch bigint, heartbeat timestamp,
    last_error string, created_at timestamp, retired_at timestamp
"""
LIVE_ESTIMATES = """
    model string, place int, generation string, last_batch bigint, model_version int, states array<string>,
    key_columns array<string>
"""
_RUN = "-history-"
"""Separator between the model version and the digest in the id of a run over history."""
SOURCE_RANGE = "source_range"
"""Column of the estimates: the part of the source that their micro-batch read (`jobs.lineage.source_ranges`)."""
VERIFICATIONS = """
    run_id string, model string, step string, part string, outcome string, rows bigint, compared bigint,
    differences bigint, first_difference string, not_verified string, counts string, firsts string, plan string,
    recorded_at timestamp
"""
VERIFIED_ENDS = """
    run_id string, model string, kind int, key string, time bigint, batch bigint, place bigint, numbers array<double>,
    flag string, count bigint, log_likelihood double, copied_at timestamp
"""


def _name_table(folder: str) -> Callable[[str], str]:
    """Return the function from a model's name to the name of its table in a folder."""
    return lambda model: f"{folder}/{model}"


measurements = _name_table("measurements")
"""The table of a model's measurements."""
estimates = _name_table("estimates")
"""The table of a model's estimates."""
estimates_history = _name_table("estimates_history")
"""The table of estimates over a model's history (`jobs.batch.estimating`)."""
latest = _name_table("latest")
"""The table of a model's latest states."""
forecast_skill = _name_table("forecast_skill")
"""The table of a model's forecasts together with the values measured later."""
forecasts = _name_table("forecasts")
"""The table of a model's forecasts from its live state."""
windows = _name_table("windows")
"""The table of a model's monitoring windows."""
windows_open = _name_table("windows_open")
"""The table of a model's windows that are not final yet."""
alerts = _name_table("alerts")
"""The table of a model's alerts."""
windows_history = _name_table("windows_history")
"""The table of windows over a model's history."""
rule_states = _name_table("rule_states")
"""The table of the exported states of a model's rules."""
alerts_history = _name_table("alerts_history")
"""The table of alerts over a model's history."""
forecast_skill_history = _name_table("forecast_skill_history")
"""The table of forecasts over a model's history together with the values measured later."""
archive = _name_table("archive")
"""The table of a model's expired keys."""


def list_history_tables(model: str) -> tuple[str, ...]:
    """Return the names of all tables of a model's history, whether or not they exist."""
    names = (estimates_history, windows_history, alerts_history, forecast_skill_history)
    return tuple(name(model) for name in names)


def run_name(model: str, version: int, digest: str) -> str:
    """Return the id of a run over the history with a version of a model."""
    return f"{model}-v{version}{_RUN}{digest}"


def is_run(generation: str) -> bool:
    """Return whether a generation's name is the id of a run over history, and not the name of a stream's generation."""
    return _RUN in generation


def need_measurements(warehouse: Tables, model: str) -> str:
    """Return the name of a model's measurements table after a check that it exists.

    Raises:
        UserError: no rows have been landed yet, so the table does not exist.
    """
    table = measurements(model)
    if not warehouse.exists(table):
        raise UserError(
            f"model {model} has no measurements in {warehouse.root}: land some with "
            f"`kalman-pipeline ingest --model {model} --input FILE`"
        )
    return table


def need_columns(warehouse: Tables, model: str, columns: Sequence[str]) -> None:
    """Refuse a measurements table that lacks columns of the spec, which may have changed since the rows landed.

    Raises:
        UserError: a column is missing.
    """
    refuse_absent(warehouse.column_names(measurements(model)), model, columns)


def refuse_absent(have: Sequence[str], model: str, columns: Sequence[str]) -> None:
    """Refuse a table whose columns `have` do not include all columns of the spec.

    Raises:
        UserError: a column is missing.
    """
    known = {name.casefold() for name in have}
    absent = [name for name in columns if name.casefold() not in known]
    if absent:
        own = [name for name in have if not name.startswith("_")]
        raise UserError(
            f"the measurements of {model} have no column {', '.join(absent)}, which the spec names now (they have "
            f"{', '.join(own)}): put the former names back, or give the model that has the new ones a name of its own "
            f"and land its rows. Only where the states are to move to other keys (migrate.keys), add the columns with "
            f"ALTER TABLE (docs/upgrades.md)"
        )
