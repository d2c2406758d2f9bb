"""Land many small files in few commits: each commit ends the transaction of every file in it.

The transactions tell path and content of each file, as if it had a commit of its own (`jobs.landing.landed_files`).
So a landing that is killed between two commits is completed by the next one, whichever files that one lands together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa
from pyspark.sql import functions as F

from jobs.core.errors import UserError
from jobs.encoding import arrow
from jobs.landing.file_landing import (
    SMALL_BYTES,
    FileLanding,
    FileState,
    Landed,
    ReadFile,
    detail_of,
    position_of,
)
from jobs.landing.landed_files import Known, transaction
from jobs.landing.reading import frame_of
from jobs.spark.quarantine import keep_for_all, rejected_rows
from jobs.storage.measurements_table import KeyTypes
from jobs.storage.quarantine import TooMany
from jobs.storage.tables import measurements

MOST_FILES = 1_000
"""Files of one commit at most: its metadata list them."""

ORIGIN = "_origin"

Refuse = Callable[[FileState, UserError], None]


def land_all(
    landing: FileLanding, files: Sequence[FileState], key_types: KeyTypes, refuse: Refuse | None = None
) -> Iterator[list[Landed]]:
    """Land files, in order, and return the outcomes of each commit. Idempotent.

    Args:
        landing: of the model.
        files: that may land (`FileLanding.check`).
        key_types: of the measurements table.
        refuse: what to do with a file that cannot land. Without it the files before it land, and the error is raised.

    Raises:
        UserError: a file has more rejected rows than the spec allows; without `refuse` also what `FileLanding.land`
            raises.
    """
    for some in _groups(files):
        if len(some) > 1:
            yield _together(landing, some, key_types, refuse)
            continue
        try:
            done = [landing.land(some[0], key_types)]
        except TooMany:
            raise
        except UserError as error:
            if refuse is None:
                raise
            refuse(some[0], error)
            continue
        yield done


def _groups(files: Sequence[FileState]) -> Iterator[list[FileState]]:
    """Cut files into those that land in one commit: small ones, of different contents."""
    group: list[FileState] = []
    for file in files:
        fits = (
            file.small
            and sum(one.size for one in group) + file.size <= SMALL_BYTES
            and len(group) < MOST_FILES
            and file.digest not in {one.digest for one in group}
        )
        if group and not (fits and group[-1].small):
            yield group
            group = []
        group.append(file)
    if group:
        yield group


def _together(
    landing: FileLanding, files: list[FileState], key_types: KeyTypes, refuse: Refuse | None
) -> list[Landed]:
    """Land small files in one commit of rejected rows and one of accepted ones."""
    numbers = landing.landed.numbers()
    read: list[ReadFile] = []
    failed: UserError | None = None
    for file in files:
        try:
            read.append(landing.read(file, key_types, numbers))
        except UserError as error:
            if refuse is None or isinstance(error, TooMany):
                failed = error
                break
            refuse(file, error)
    done = _commit(landing, read, refuse)
    if failed is not None:
        raise failed
    return done


def _commit(landing: FileLanding, read: list[ReadFile], refuse: Refuse | None) -> list[Landed]:
    """Commit the rejected rows of some files, then the accepted ones, except what an earlier run has committed.

    Raises:
        UserError: a file has changed since it was read; the others have landed.
    """
    warehouse, model = landing.warehouse, landing.spec.name
    failed: UserError | None = None
    with warehouse.lock(f"ingest-{model}"):
        numbers = landing.landed.numbers()
        present: list[tuple[ReadFile, Known]] = []
        for one in read:
            try:
                present.append((one, landing.still(one.file, one.known, numbers)))
            except UserError as error:
                if refuse is None:
                    failed = failed or error
                else:
                    refuse(one.file, error)
        rejected = [one for one, now in present if one.rows.counts.reasons and not (now.landed or now.kept)]
        if rejected:
            tables = [
                _with(one.rows.rejected, source=one.file.path, position=position_of(one.file))
                for one in rejected
            ]
            frame = frame_of(warehouse, pa.concat_tables(tables))
            rows = rejected_rows(frame, model, F.col("source"), F.col("position"))
            keep_for_all(warehouse, rows, _transactions(model, rejected))
        notes = {
            one.file: None if now.landed else landing.note_of(one.file.path, one.known)
            for one, now in present
        }
        new = [
            one
            for one, now in present
            if not now.landed and (one.rows.counts.rows or one.rows.counts.reasons)
        ]
        version = _append(landing, new) if new else None
    if failed is not None:
        raise failed
    landed = {one.file for one in new if one.rows.counts.rows}
    kept = {one.file for one in rejected}
    return [
        Landed(
            one.file.path,
            one.rows.counts.rows,
            dict(sorted(one.rows.counts.reasons.items())) if one.file in kept else {},
            version if one.file in landed else None,
            notes[one.file],
            one.rows.remarks,
        )
        for one, _ in present
    ]


def _append(landing: FileLanding, new: list[ReadFile]) -> int:
    """Append the accepted rows of some files in one commit; return the table's version."""
    warehouse, spec = landing.warehouse, landing.spec
    tables = [_with(one.rows.accepted, **{ORIGIN: landing.origin_of(one.file.path)}) for one in new]
    frame = frame_of(warehouse, pa.concat_tables(tables).combine_chunks())
    frame = frame.withColumn("_landed_at", F.current_timestamp())
    spans = [one.rows.counts.span for one in new]
    detail = {
        "files": [detail_of(one.file, one.rows.counts.rows) for one in new],
        "rows": sum(one.rows.counts.rows for one in new),
        "min_time": min((first for first, _ in spans if first is not None), default=None),
        "max_time": max((last for _, last in spans if last is not None), default=None),
        **landing.kind,
    }
    names = _transactions(spec.name, new)
    return warehouse.append_for_all(frame, measurements(spec.name), names, json.dumps(detail))


def _transactions(model: str, files: list[ReadFile]) -> list[tuple[str, int]]:
    return [transaction(model, one.file.path, one.file.digest) for one in files]


def _with(rows: pa.Table, **columns: str) -> pa.Table:
    """Return rows with columns of one text each."""
    for name, text in columns.items():
        rows = rows.append_column(name, arrow.texts([text] * len(rows)))
    return rows
