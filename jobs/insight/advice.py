"""Give advice on how a model's stream could run better, from measurements of the stream. Needs no Spark.

Advice is about the layout, never about the model: the number of partitions, the sizes of files, and the generations and
snapshots that are due for removal. Each sentence of advice contains the number that it rests on and the command to run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from jobs.core import times
from jobs.core.report import format_count, format_span
from jobs.core.settings import find_local_path
from jobs.insight.retention_plan import plan_retention
from jobs.specs.retention import parse_span
from jobs.storage.quarantine import TABLE as QUARANTINE
from jobs.storage.tables import alerts, estimates, estimates_history, windows
from jobs.supervision.progress_log import read_all_records

if TYPE_CHECKING:
    from jobs.lineage.catalog import Catalog
    from jobs.specs.model_spec import ModelSpec

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
