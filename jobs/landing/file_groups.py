"""Land groups of files: each commit ends the transaction of every file in it. A large file is a group of its own.

The transactions tell path and content of each file, as if it had a commit of its own (`jobs.landing.landed_files`).
So a landing that is killed between two commits is completed by the next one, whichever files that one lands together.
The pieces of a group are read, checked and written by several processes (`jobs.landing.written_pieces`). What they have
written is part of a table once the commit names it; where a file cannot land, the others of its group are written
anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from jobs.core import clock
from jobs.core.errors import INPUT_ERROR, UserError
from jobs.core.input_files import known_inputs
from jobs.encoding import arrow
from jobs.landing.file_landing import (
    FileLanding,
    FilePlan,
    FileState,
    Landed,
    detail_of,
    position_of,
)
from jobs.landing.landed_files import transaction
from jobs.landing.reading import FilePiece
from jobs.landing.target_table import LandingTables
from jobs.landing.written_pieces import (
    REJECTED,
    FilePieces,
    RowCounts,
    WritingTask,
    Written,
    rejected_rows,
)
from jobs.storage.measurements_table import KeyTypes
from jobs.storage.part_files import (
    PartFile,
    attempt_name,
)
from jobs.storage.quarantine import TABLE, TooMany, refusal, too_many
from jobs.storage.table_log import FileTable, append_rows, commit_or_remove
from jobs.storage.table_rows import EPOCH
from jobs.storage.tables import QUARANTINE
from jobs.storage.warehouse import Tables

MOST_FILES = 1_000
"""Files of one commit at most: its metadata list them."""
GROUP_BYTES = 64 << 20
"""Bytes of the files of one commit at most, unless it is one file."""
INLINE_BYTES = 16 << 20
"""Up to so many bytes are written by one process, into one file."""
TASK_BYTES = 96 << 20
"""About so many bytes are one task: as text, the rows of one file of a table."""
MICROSECOND = timedelta(microseconds=1)
_FILE_BYTES = 32 << 10
"""A file costs as much as so many bytes, besides its own."""

Refuse = Callable[[FileState, UserError], None]
OnRead = Callable[[int], None]


def land_all(
    landing: FileLanding,
    files: Sequence[FileState],
    key_types: KeyTypes,
    refuse: Refuse | None = None,
    on_read: OnRead = lambda size: None,
) -> Iterator[list[Landed]]:
    """Land files, in order, and return the outcomes of each commit. Idempotent.

    Args:
        landing: of the model.
        files: that may land (`FileLanding.check`).
        key_types: of the measurements table.
        refuse: what to do with a file that cannot land. Without it the files before it land, and the error is raised.
        on_read: is called with bytes of the files that are read, by any thread.

    Raises:
        UserError: a file has more rejected rows than the spec allows; without `refuse` also what hinders a file.
    """
    for group in groups_of(files):
        done, failed = _land_group(landing, group, key_types, refuse, on_read)
        if failed is not None:
            raise failed
        if done:
            yield done


def groups_of(files: Sequence[FileState]) -> Iterator[list[FileState]]:
    """Cut files into those that land in one commit: of different contents, and not too large."""
    group: list[FileState] = []
    digests: set[str] = set()
    size = 0
    for file in files:
        if group and (size + file.size > GROUP_BYTES or len(group) == MOST_FILES or file.digest in digests):
            yield group
            group, digests, size = [], set(), 0
        group.append(file)
        digests.add(file.digest)
        size += file.size
    if group:
        yield group


def needs_workers(size: int, files: int) -> bool:
    """Tell if files of this size together are written by several processes."""
    return size + files * _FILE_BYTES > INLINE_BYTES


@dataclass
class _GroupAttempt:
    """The outcomes of files that landed or had landed; the errors of others by path, because of which none landed.

    stale: others have committed rows of the files meanwhile.
    """

    landed: list[Landed] = field(default_factory=list)
    errors: dict[str, UserError] = field(default_factory=dict)
    stale: bool = False


def _land_group(
    landing: FileLanding,
    files: Sequence[FileState],
    key_types: KeyTypes,
    refuse: Refuse | None,
    on_read: OnRead,
) -> tuple[list[Landed], UserError | None]:
    """Land the files of a group that can land; return the outcomes, and the error that ends the landing."""
    left, failed = list(files), None
    while left:
        tried = _attempt(landing, left, key_types, on_read)
        if not tried.errors and not tried.stale:
            return tried.landed, failed
        fitting: list[FileState] = []
        for file in left:
            error = tried.errors.get(file.path)
            if error is None:
                fitting.append(file)
            elif refuse is None or isinstance(error, TooMany):
                failed = error
                break
            else:
                refuse(file, error)
        left = fitting
    return [], failed


def _attempt(
    landing: FileLanding, files: Sequence[FileState], key_types: KeyTypes, on_read: OnRead
) -> _GroupAttempt:
    """Write and commit the files of a group, or none of them."""
    numbers, tried = landing.landed.numbers(), _GroupAttempt()
    plans: list[FilePlan] = []
    for file in files:
        known = landing.landed.known(file.path, file.digest, numbers)
        if known.landed:
            tried.landed.append(Landed(file.path, 0, {}, None, before=True))
            continue
        try:
            plans.append(landing.plan(file, known))
        except UserError as error:
            tried.errors[file.path] = error
    if plans and not tried.errors:
        _write_and_commit(landing, plans, key_types, on_read, tried)
    return tried


def _write_and_commit(
    landing: FileLanding, plans: list[FilePlan], key_types: KeyTypes, on_read: OnRead, tried: _GroupAttempt
) -> None:
    """Write the rows of files and commit them; else say in `tried` why not, and remove what is written."""
    tables = LandingTables.of(landing.warehouse, landing.spec)
    done = False
    try:
        written = _write(landing, plans, key_types, tables, on_read, tried)
        if not tried.errors:
            with landing.warehouse.lock(f"ingest-{landing.spec.name}"):
                _check_again(landing, plans, tried)
                if not tried.errors and not tried.stale:
                    tried.landed += _commit(landing, plans, written, tables)
                    done = True
    finally:
        if not done:
            tables.remove_written()


def _write(
    landing: FileLanding,
    plans: list[FilePlan],
    key_types: KeyTypes,
    tables: LandingTables,
    on_read: OnRead,
    tried: _GroupAttempt,
) -> list[Written]:
    """Write the rows of files and count them; say in `tried` which cannot land."""
    given = [
        FilePieces(
            one.file.path,
            landing.origin_of(one.file.path),
            None if one.known.kept else position_of(one.file),
            one.pieces,
        )
        for one in plans
    ]
    cut = _cut(given, landing.workers.count)
    targets = tables.targets()
    tasks = [
        WritingTask(
            landing.spec,
            key_types,
            [given[place]._replace(pieces=pieces) for place, pieces in some],
            *targets,
            attempt_name(number, tables.attempt, 0, 0),
            tables.landed_at,
            known_inputs(),
        )
        for number, some in enumerate(cut)
    ]
    written = landing.workers.run(tasks, on_read)
    for some, done in zip(cut, written, strict=True):
        for (place, _), counts in zip(some, done.counts, strict=True):
            if isinstance(counts, UserError):
                tried.errors.setdefault(plans[place].file.path, counts)
            else:
                plans[place].counts.add(counts)
    limit = landing.spec.quarantine
    for one in plans:
        if not one.known.kept and too_many(limit, one.counts.reasons, one.counts.rows):
            error = refusal(limit, one.counts.reasons, one.counts.rows, one.file.path, INPUT_ERROR)
            tried.errors.setdefault(one.file.path, error)
    return written


def _cut(files: Sequence[FilePieces], processes: int) -> list[list[tuple[int, list[FilePiece]]]]:
    """Cut the pieces of files, in order, into tasks of about the same size: of each task the files, by place."""
    sizes = [[_FILE_BYTES, *(piece.size for piece in one.pieces)] for one in files]
    total = sum(map(sum, sizes))
    rounds = -(-total // (processes * TASK_BYTES))
    share = total / (1 if total <= INLINE_BYTES else processes * rounds)
    tasks: list[list[tuple[int, list[FilePiece]]]] = [[]]
    done = 0.0
    for place, one in enumerate(files):
        done += _FILE_BYTES
        tasks[-1].append((place, []))
        for piece in one.pieces:
            # A piece belongs to the task in which its middle is.
            if done + piece.size / 2 > share * len(tasks) and tasks[-1] != [(place, [])]:
                tasks.append([(place, [])])
            tasks[-1][-1][1].append(piece)
            done += piece.size
    return tasks


def _check_again(landing: FileLanding, plans: list[FilePlan], tried: _GroupAttempt) -> None:
    """Check that the rows of files that are written are still the right ones; else say so in `tried`."""
    numbers = landing.landed.numbers()
    for one in plans:
        try:
            now = landing.still(one.file, one.known, numbers)
        except UserError as error:
            tried.errors[one.file.path] = error
        else:
            tried.stale |= now.landed or now.kept != one.known.kept


def _commit(
    landing: FileLanding, plans: list[FilePlan], written: list[Written], tables: LandingTables
) -> list[Landed]:
    """Commit the rejected rows of files, then the accepted ones."""
    bad = [one for one in plans if one.counts.reasons and not one.known.kept]
    if bad:
        parts = [part for one in written for part in one.rejected]
        _commit_files(tables.ready_for_rejected(), parts, _transactions(landing, bad), {})
    # Also without a row: else a file of which all rows were rejected would land when the spec has been mended,
    # and once more when the rejected rows are replayed.
    new = [one for one in plans if one.counts.rows or one.counts.reasons]
    version = None
    if new:
        metadata = {"userMetadata": json.dumps(_detail(landing, new))}
        parts = [part for one in written for part in one.accepted]
        version = _commit_files(tables.accepted, parts, _transactions(landing, new), metadata)
    return [
        Landed(
            one.file.path,
            one.counts.rows,
            {} if one.known.kept else dict(sorted(one.counts.reasons.items())),
            version if one.counts.rows else None,
            note=landing.note_of(one.file.path, one.known),
            counts=one.counts,
        )
        for one in plans
    ]


def _commit_files(
    table: FileTable,
    parts: list[PartFile],
    transactions: list[tuple[str, int]],
    metadata: Mapping[str, str],
) -> int | None:
    """Commit files that end transactions; None if another command has ended the only one."""
    if len(transactions) == 1:
        return commit_or_remove(table, parts, lambda parts: table.commit(parts, transactions[0], metadata))
    return commit_or_remove(table, parts, lambda parts: table.commit_for_all(parts, transactions, metadata))


def _detail(landing: FileLanding, new: list[FilePlan]) -> dict[str, Any]:
    """Return what the metadata of the commit of accepted rows say."""
    files = [detail_of(one.file, one.counts.rows) for one in new]
    total = RowCounts()
    for one in new:
        total.add(one.counts)
    times = {"min_time": total.span[0], "max_time": total.span[1], **landing.kind}
    return files[0] | times if len(files) == 1 else {"files": files, "rows": total.rows, **times}


def _transactions(landing: FileLanding, files: list[FilePlan]) -> list[tuple[str, int]]:
    return [transaction(landing.spec.name, one.file.path, one.file.digest) for one in files]


def keep_whole_file(warehouse: Tables, model: str, path: str, digest: str, reason: str) -> None:
    """Keep a file that cannot land as one row of the quarantine. Idempotent.

    Args:
        warehouse: of the quarantine.
        model: name of the model.
        path: of the file.
        digest: of its content.
        reason: why it cannot land.
    """
    name = f"ingest-{model}-{digest}-file", 1
    warehouse.create(TABLE, QUARANTINE)
    table = FileTable(warehouse, TABLE)
    row = rejected_rows(
        REJECTED,
        model,
        arrow.texts([f"file: {reason}"]),
        arrow.texts([json.dumps({"file": path})]),
        [arrow.texts([path]), arrow.texts([json.dumps({"file": path, "sha256": digest})])],
        (clock.now() - EPOCH) // MICROSECOND,
    )
    append_rows(table, row, name)
