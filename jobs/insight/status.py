"""The status of a model (snapshots, generations, positions, lag), and the alarms and advice that follow from it.

An alarm reports a stream or query without progress, a failed driver, or a difference that a verification has found.
Advice is about the layout, never about the model: the number of partitions, the sizes of files, and the generations and
snapshots that are due for removal. Each sentence of advice contains the number that it rests on and the command to run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from jobs.core import times
from jobs.core.report import format_count, format_span
from jobs.core.settings import find_local_path
from jobs.downstream.queries import list_given_up, open_monitor_files, read_downstream_status
from jobs.insight.retention_plan import plan_retention
from jobs.lineage.catalog import Catalog
from jobs.lineage.generations import (
    LIVE,
    REMOVED,
    RETIRED,
    SHADOW,
    find_shadow,
    read_position,
    suggest_rollback,
)
from jobs.specs.retention import parse_span
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.quarantine import TABLE as QUARANTINE
from jobs.storage.queries import build_in_condition, open_queries
from jobs.storage.tables import alerts, estimates, estimates_history, measurements, windows
from jobs.storage.warehouse import Tables
from jobs.supervision.driver_log import DriverIdentity
from jobs.supervision.progress import Lag, measure_table_lag, read_all_records, read_newest_record
from jobs.verification.runs import DIFFERENT, format_difference, read_last_outcomes

if TYPE_CHECKING:
    from jobs.lineage.generations import Generation
    from jobs.specs.model_spec import ModelSpec
    from jobs.specs.monitor import Monitor


ENDED = (RETIRED, REMOVED)
"""The statuses of generations that no driver runs."""
RUNNING = (LIVE, SHADOW)
"""The statuses of generations that a driver may run."""


def read_status(catalog: Catalog, verified: Mapping[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """Return a model's status; verified: the last verification of each model (`read_last_outcomes`)."""
    warehouse, table = catalog.warehouse, measurements(name)
    landed = warehouse.exists(table)
    version = warehouse.latest_version(table) if landed else None
    return {
        "model": name,
        "measurements": {
            "version": version,
            "rows": warehouse.row_count(table) if landed else 0,
            "quarantined": catalog.count_quarantined_rows(name),
        },
        "snapshots": [
            {
                "snapshot": one.snapshot_id,
                "model_version": one.model_version,
                "version": one.version,
                "cut": one.cut,
                "keys": one.key_count,
                "rows": one.rows,
                "status": one.status,
                "committed_at": one.committed_at,
            }
            for one in catalog.manifests(name)
        ],
        "generations": [_read_generation(warehouse, one, version) for one in catalog.generations(name)],
        "followers": read_downstream_status(warehouse, name),
        "given_up": list_given_up(warehouse, name),
        "verification": verified.get(name),
    }


def _read_generation(warehouse: Tables, one: Generation, newest: int | None) -> dict[str, Any]:
    checkpoint = Checkpoint(warehouse, one.checkpoint)
    damage = checkpoint.find_damage()
    done = None if damage else checkpoint.find_progress()
    version = one.start_version if done is None else done.version
    holder = DriverIdentity.parse(one.owner)
    progress = None if one.status in ENDED else read_newest_record(warehouse, one.model, one.generation)
    last_batch_at = None if done is None else checkpoint.committed_at(done.batch)
    if one.status in ENDED or newest is None and one.topic is None:
        lag = Lag()
    elif one.topic is not None:
        lag = _read_topic_lag(progress, last_batch_at)
    else:
        lag = measure_table_lag(warehouse, measurements(one.model), version)
    running = holder is not None and holder.alive(one.heartbeat)
    return {
        "generation": one.generation,
        "model_version": one.model_version,
        "status": one.status,
        "snapshot": one.snapshot_id,
        "batches": 0 if done is None else done.batch + 1,
        "version": version,
        "position": one.start_position if damage else read_position(warehouse, one),
        "versions_behind": None
        if one.topic is not None or newest is None or one.status in ENDED
        else max(0, newest - version),
        "rows_behind": lag.rows,
        "seconds_behind": lag.seconds,
        "last_batch_at": last_batch_at,
        "progress": progress,
        "driver": None if holder is None or not running else {"host": holder.host, "pid": holder.pid},
        # The lease has no running driver: the driver was killed, and the next one resumes from the checkpoint.
        "driver_lost": holder is not None and not running,
        "heartbeat": one.heartbeat,
        "last_error": f"the checkpoint is damaged: {damage}" if damage else one.last_error,
    }


def _read_topic_lag(progress: dict[str, Any] | None, last_batch_at: datetime | None) -> Lag:
    """Return the lag as of the last micro-batch, because only the broker knows the present lag."""
    rows = None if progress is None else progress["lag_rows"]
    if not rows or last_batch_at is None:
        return Lag(rows, None if rows is None else 0.0)
    return Lag(rows, (datetime.now(UTC) - last_batch_at).total_seconds())


def find_alarms(models: Sequence[dict[str, Any]], after: float, now: datetime) -> list[str]:
    """Return sentences on streams and queries whose rows wait too long, failed drivers, and found differences.

    Args:
        models: the models in the report of `status`.
        after: how long rows may wait, in seconds.
        now: the current time.
    """
    found: list[str] = []
    for model in models:
        streams = [one for one in model["generations"] if one["status"] in RUNNING]
        sentences = [_describe_alarm(one, after, now) for one in [*streams, *model["followers"]]]
        sentences += model["given_up"]
        sentences.append(describe_difference(model.get("verification")))
        found += [f"{model['model']}: {one}" for one in sentences if one is not None]
    return found


def _describe_alarm(one: dict[str, Any], after: float, now: datetime) -> str | None:
    """Return the alarm of a generation's stream, or of a model's monitor or forecast skill; None if there is none."""
    if "follower" in one:
        name, stops, what = f"its {one['follower']}", f"its {one['follower']}", "estimates"
    else:
        name, stops, what = one["generation"], f"the driver of {one['generation']}", "rows"
    driver, last, seconds = one["driver"], one["last_batch_at"], one["seconds_behind"]
    if driver is None and one["last_error"]:
        return f"{stops} ended with an error: {one['last_error']}"
    if not one["rows_behind"] or seconds is None:
        return None
    quiet = seconds if last is None else min(seconds, (now - last).total_seconds())
    if quiet <= after:
        return None
    runs = "no driver runs it" if driver is None else f"process {driver['pid']} on {driver['host']} runs it"
    if one["driver_lost"]:
        runs = "its driver is lost"
    batches = (
        "it has committed no micro-batch yet"
        if last is None
        else f"its last micro-batch ended {_format_time(last)}"
    )
    waiting = f"{one['rows_behind']:,} {what} have waited for {format_span(quiet)}"
    return f"{name} makes no progress: {waiting}; {batches}; {runs}"


def _format_time(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def describe_difference(last: dict[str, Any] | None) -> str | None:
    """Return the alarm of a model's last verification; None if it found no difference."""
    if last is None or last["outcome"] != DIFFERENT:
        return None
    at = _format_time(last["recorded_at"])
    first = format_difference(json.loads(last["first_difference"])) if last["first_difference"] else ""
    return f"verification {last['run_id']} found {last['differences']:,} differences at {at}: {first}"


def list_live_versions(root: str, models: Iterable[str]) -> dict[str, str]:
    """Return the live version of each model as text."""
    catalog = Catalog(Tables(root))
    return {model: _format_live(catalog.live(model)) for model in models}


def _format_live(one: Generation | None) -> str:
    return "nothing" if one is None else f"version {one.model_version} (generation {one.generation})"


def describe_model(root: str, spec: ModelSpec) -> dict[str, str]:
    """Return what an operator asks first of a model, as sentences by subject: what is live, lag, monitor, errors."""
    warehouse = Tables(root)
    catalog = Catalog(warehouse)
    found = read_status(catalog, read_last_outcomes(warehouse), spec.name)
    one = next((one for one in found["generations"] if one["status"] == LIVE), None)
    if one is None:
        begin = f"`kalman-pipeline stream --model {spec.name}`"
        return {"live": f"nothing: {begin} starts from a snapshot of `pretrain`"}
    lag = "unknown" if one["rows_behind"] is None else format_count(one["rows_behind"], "row")
    if one["seconds_behind"]:
        lag += f"; the oldest has waited for {format_span(one['seconds_behind'])}"
    at, driver = one["last_batch_at"], one["driver"]
    parts = {
        "live": _format_live(catalog.live(spec.name)),
        "deployed": describe_other_version(catalog, spec.name, spec) or f"version {spec.version}, as live",
        "lag": lag,
        "last micro-batch": "none yet" if at is None else _format_time(at),
        "driver": "none runs now" if driver is None else f"process {driver['pid']} on {driver['host']}",
        "monitor": _describe_alerts(warehouse, spec),
        "error": one["last_error"],
        "verification": describe_difference(found["verification"]),
    }
    return {name: text for name, text in parts.items() if text}


def _describe_alerts(warehouse: Tables, spec: ModelSpec) -> str | None:
    """Return the alerts that the spec's rules have raised and not cleared; None without rules."""
    if spec.monitor is None or not spec.monitor.rules:
        return None
    with open_queries(warehouse.root) as queries:
        if queries.add("alerts", alerts(spec.name)) is None:
            return (
                f"no alert was raised yet; `kalman-pipeline monitor --model {spec.name}` reads new estimates"
            )
        newest = "row_number() OVER (PARTITION BY key, rule ORDER BY event_time DESC, batch_id DESC) AS place"
        mine = _build_alerts_condition(warehouse, spec.name, spec.monitor)
        raised = queries.run(
            f"SELECT rule, count(*) AS keys FROM (SELECT *, {newest} FROM alerts WHERE {mine}) "
            "WHERE place = 1 AND status = 'raised' GROUP BY rule ORDER BY rule"
        ).to_pylist()
    told = [f"{one['rule']} ({format_count(one['keys'], 'key')})" for one in raised]
    return f"raised: {', '.join(told)}" if told else "no alert is raised now"


def _build_alerts_condition(warehouse: Tables, model: str, monitor: Monitor) -> str:
    """Return the SQL condition of the alerts of a monitor's rules, and of former rules whose states they continue.

    A rule that continues does not raise its open alerts again, so the former rule's rows alone have them.
    """
    files, found, after = open_monitor_files(warehouse, model), dict[str, str](), ""
    definition = monitor.definition("rules")
    readings = {one.name: (one.kind, one.state, one.measurement) for one in monitor.rules}
    while definition not in found:
        rules = build_in_condition("rule", list(readings)) if readings else "false"
        found[definition] = f"(definition = '{definition}' AND {rules}{after})"
        adopted = files.read(f"adopted-{definition}.json")
        content = adopted and files.read(f"export-{json.loads(adopted)['export']}.json")
        if content:
            export = json.loads(content)
            former = {one["name"]: (one["kind"], one["state"], one["measurement"]) for one in export["rules"]}
            readings = {name: one for name, one in readings.items() if former.get(name) == one}
            definition = export["query"].rpartition("-")[2]
            after = f" AND batch_id <= {export['batch']}"
    return f"({' OR '.join(found.values())})"


def describe_other_version(catalog: Catalog, model: str, deployed: ModelSpec | None) -> str | None:
    """Return a sentence on a deployed spec that is not live, with the remedy; None if it is live, or if nothing is."""
    live = catalog.live(model)
    if live is None or deployed is None or deployed.fingerprint() == live.fingerprint:
        return None
    new, old, known = deployed.version, live.model_version, catalog.generations(model)
    if new == old:
        return (
            f"the deployed spec of {model} is not that of the live {live.generation}, under the same version {old}: "
            f"restore the spec; or raise its version and run `kalman-pipeline upgrade --model {model}`"
        )
    if new < old:
        return (
            f"version {new} of {model} is deployed, and version {old} is live: deploy version {old} again"
            f"{suggest_rollback(known, model, deployed.fingerprint())}"
        )
    shadow = find_shadow(known, deployed)
    runs, verb = (f"runs as shadow {shadow}", "promote") if shadow else ("is deployed", "upgrade")
    return f"version {new} of {model} {runs}, and version {old} is live until `kalman-pipeline {verb} --model {model}`"


SMALL_FILE = 16 << 20
"""Bytes. A table whose files are smaller on average is slow to read."""
MANY_FILES = 200
LONG_BATCH = 60.0
RECENT = 20
"""The number of the newest micro-batches that advice rests on."""
KEYS_A_PARTITION = 500_000


class TableFiles(NamedTuple):
    """The number of a table's files, and their total size in bytes."""

    table: str
    files: int
    bytes: int


class StreamMeasures(NamedTuple):
    """The measurements of a stream that advice rests on.

    records: the records of the live generation's last micro-batches, oldest first.
    partitions: the number of the generation's state partitions.
    cores: the number of cores of the machine that runs the stream; None means that the number is unknown.
    due_generations, due_snapshots: the names that `maintain` would remove.
    oldest_progress: the start of the oldest recorded micro-batch.
    progress: how long the spec keeps such records.
    """

    model: str
    records: Sequence[Mapping[str, Any]] = ()
    partitions: int | None = None
    keys: int | None = None
    cores: int | None = None
    files: Sequence[TableFiles] = ()
    due_generations: Sequence[str] = ()
    due_snapshots: Sequence[str] = ()
    oldest_progress: datetime | None = None
    progress: timedelta | None = None


def measure_stream(catalog: Catalog, model: str, spec: ModelSpec | None, cores: int | None) -> StreamMeasures:
    """Measure a model's stream without Spark; for a remote warehouse, return only what is due for removal.

    spec: the model's spec; None if the spec cannot be read.
    """
    now, root = times.now(), catalog.warehouse.root
    known, snapshots, live = catalog.generations(model), catalog.manifests(model), catalog.live(model)
    found = StreamMeasures(model, partitions=None if live is None else live.partitions, cores=cores)
    if spec is not None and known:
        planned = plan_retention(known, snapshots, spec.retention, now, spec.fingerprint())
        found = found._replace(due_generations=planned.generations, due_snapshots=planned.snapshots)
    if find_local_path(root) is None:
        return found
    records = read_all_records(catalog.warehouse, model)
    mine = [one for one in records if live is not None and one["generation"] == live.generation]
    tables = (estimates(model), estimates_history(model), windows(model), alerts(model), QUARANTINE)
    return found._replace(
        records=mine[-RECENT:],
        keys=max(
            (one.key_count for one in snapshots if live and one.snapshot_id == live.snapshot_id), default=None
        ),
        files=[
            TableFiles(name, *sizes) for name in tables if (sizes := catalog.file_sizes(name)) is not None
        ],
        oldest_progress=records[0]["started_at"] if records else None,
        progress=None if spec is None else parse_span(spec.retention.progress),
    )


def advise(seen: StreamMeasures, now: datetime) -> list[str]:
    """Return sentences of advice, the most urgent first; the list is empty if there is no advice."""
    return [*_advise_partitions(seen), *_advise_files(seen), *_advise_retention(seen, now)]


def _advise_partitions(seen: StreamMeasures) -> list[str]:
    """Return advice to use more partitions: because the stream is slow, or because partitions have many keys."""
    timed = [one for one in seen.records if one.get("seconds") and one.get("rows")]
    if seen.partitions is None or len(timed) < 3:
        return []
    cores = seen.cores or 0
    seconds = sum(float(one["seconds"]) for one in timed) / len(timed)
    waiting = [one["lag_rows"] for one in timed if one.get("lag_rows") is not None]
    behind = len(waiting) >= 3 and waiting[-1] > waiting[0] > 0
    change = f"`kalman-pipeline upgrade --model {seen.model} --mode repartition --partitions"
    if seen.partitions < cores and (seconds > LONG_BATCH or behind):
        why = "falls further behind" if behind else f"takes {format_span(seconds)} a micro-batch"
        return [
            f"{seen.model} {why} with {format_count(seen.partitions, 'partition')} on {format_count(cores, 'core')}: "
            f"{change} {cores}`"
        ]
    if seen.keys is not None and seen.keys > KEYS_A_PARTITION * seen.partitions:
        wanted = -(-seen.keys // KEYS_A_PARTITION)
        return [
            f"{seen.model} has {seen.keys:,} keys in {format_count(seen.partitions, 'partition')}, and more than "
            f"{KEYS_A_PARTITION:,} a partition make commits of the state long: {change} {wanted}`"
        ]
    return []


def _advise_files(seen: StreamMeasures) -> list[str]:
    """Return advice on tables with many small files, the table with the most files first."""
    small = [one for one in seen.files if one.files > MANY_FILES and one.bytes < SMALL_FILE * one.files]
    return [
        f"{one.table} has {one.files:,} files of {_format_size(one.bytes / one.files)} on average, so readers open "
        f"many: `kalman-pipeline maintain --model {seen.model}`"
        for one in sorted(small, key=lambda one: -one.files)
    ]


def _advise_retention(seen: StreamMeasures, now: datetime) -> list[str]:
    """Return advice to remove generations, snapshots and progress records that the spec's retention no longer keeps."""
    found = []
    for noun, due in (("generation", seen.due_generations), ("snapshot", seen.due_snapshots)):
        if due:
            more = ", ..." if len(due) > 3 else ""
            found.append(
                f"{format_count(len(due), noun)} of {seen.model} may be removed ({', '.join(due[:3])}{more}): "
                f"`kalman-pipeline maintain --model {seen.model}`"
            )
    if seen.oldest_progress is not None and seen.progress is not None:
        age = now - seen.oldest_progress
        if age > seen.progress + timedelta(days=1):
            found.append(
                f"the progress of {seen.model} goes back {format_span(age.total_seconds())}, and "
                f"retention.progress keeps "
                f"{format_span(seen.progress.total_seconds())}: `kalman-pipeline maintain --model {seen.model}`"
            )
    return found


def _format_size(number: float) -> str:
    for unit, size in (("MB", 1 << 20), ("kB", 1 << 10)):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number:,.0f} bytes"
