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
from typing import Any

from jobs.core.errors import INPUT_ERROR, UserError
from jobs.core.input_files import known_inputs
from jobs.encoding import arrow
from jobs.landing.file_landing import FileLanding, Landed, Refuse
from jobs.landing.landed_files import FileState, transaction
from jobs.landing.target_table import LandingTables
from jobs.landing.values.times import now_us
from jobs.landing.written_pieces import (
    REJECTED,
    FilePieces,
    RowCounts,
    WritingTask,
    Written,
    rejected_rows,
)
from jobs.storage.part_files import PartFile, attempt_name
from jobs.storage.quarantine import TABLE, TooMany, refusal, too_many
from jobs.storage.table_log import Conflict, FileTable, append_rows, commit_or_remove
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
_FILE_BYTES = 32 << 10
"""A file costs as much as so many bytes, besides its own."""

OnRead = Callable[[int], None]


class _UnfitGroup(Exception):
    """Some files of a group cannot land: their errors by path; none if others have committed rows of it meanwhile."""

    def __init__(self, errors: Mapping[str, UserError]) -> None:
        super().__init__()
        self.errors = errors


def land_all(
    landing: FileLanding,
    paths: Sequence[str],
    refuse: Refuse | None = None,
    on_read: OnRead = lambda size: None,
) -> Iterator[list[Landed]]:
    """Check files and land them, in order, and return the outcomes of each commit. Idempotent.

    Args:
        landing: of the model.
        paths: of the files.
        refuse: what to do with a file that cannot land. Without it nothing lands if a file may not; if one cannot be
            read, the files before it land, and the error is raised.
        on_read: is called with bytes of the files that are read, by any thread.

    Raises:
        UserError: a file has more rejected rows than the spec allows; without `refuse` also what hinders a file.
    """
    for group in groups_of(landing.check_all(paths, refuse)):
        if done := _land_group(landing, group, refuse, on_read):
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


def _land_group(
    landing: FileLanding, files: list[FileState], refuse: Refuse | None, on_read: OnRead
) -> list[Landed]:
    """Land the files of a group that can land, and return the outcomes."""
    landed: list[Landed] = []
    failed: UserError | None = None
    while files:
        try:
            landed = _land(landing, files, on_read)
            break
        except _UnfitGroup as unfit:
            fitting: list[FileState] = []
            for file in files:
                error = unfit.errors.get(file.path)
                if error is None:
                    fitting.append(file)
                elif refuse is None or isinstance(error, TooMany):
                    failed = error
                    break
                else:
                    refuse(file.path, error)
            files = fitting
    if failed is not None:
        raise failed
    return landed


def _land(landing: FileLanding, files: Sequence[FileState], on_read: OnRead) -> list[Landed]:
    """Write and commit the files of a group.

    Raises:
        _UnfitGroup: some cannot land; then none of them has.
    """
    numbers = landing.landed.numbers()
    landed: list[Landed] = []
    plans: list[FilePieces] = []
    errors: dict[str, UserError] = {}
    for file in files:
        known = landing.landed.known(file.path, file.digest, numbers)
        if known.landed:
            landed.append(Landed(file.path, file.digest, 0, {}, None, before=True))
            continue
        try:
            plans.append(landing.plan(file, known))
        except UserError as error:
            errors[file.path] = error
    if errors:
        raise _UnfitGroup(errors)
    if not plans:
        return landed
    tables = LandingTables.of(landing.warehouse, landing.spec)
    try:
        counts = {one.file.path: RowCounts() for one in plans}
        written = _write(landing, plans, tables, counts, on_read)
        with landing.warehouse.lock(f"ingest-{landing.spec.name}"):
            _check_again(landing, plans)
            try:
                return landed + _commit(landing, plans, written, tables, counts)
            except Conflict:
                _check_again(landing, plans)  # others have landed a file meanwhile: what is left lands anew
                raise
    except BaseException:
        tables.remove_written()
        raise


def _write(
    landing: FileLanding,
    plans: Sequence[FilePieces],
    tables: LandingTables,
    counts: Mapping[str, RowCounts],
    on_read: OnRead,
) -> list[Written]:
    """Write the rows of files, and add them to the counts of each path.

    Raises:
        _UnfitGroup: some files cannot be read, or have too many rejected rows.
    """
    targets = tables.targets()
    tasks = [
        WritingTask(
            landing.spec,
            landing.key_types,
            files,
            landing.history,
            *targets,
            attempt_name(number, tables.attempt, 0, 0),
            tables.landed_at,
            known_inputs(),
        )
        for number, files in enumerate(_cut(plans, landing.workers.count))
    ]
    written = landing.workers.run(tasks, on_read)
    errors: dict[str, UserError] = {}
    for task, done in zip(tasks, written, strict=True):
        for one, found in zip(task.files, done.counts, strict=True):
            if isinstance(found, UserError):
                errors.setdefault(one.file.path, found)
            else:
                counts[one.file.path].add(found)
    limit = landing.spec.quarantine
    for path, found in counts.items():
        if too_many(limit, found.reasons, found.rows):
            errors.setdefault(path, refusal(limit, found.reasons, found.rows, path, INPUT_ERROR))
    if errors:
        raise _UnfitGroup(errors)
    return written


def _cut(files: Sequence[FilePieces], processes: int) -> list[list[FilePieces]]:
    """Cut the pieces of files, in order, into tasks of about the same size."""
    sizes = [[_FILE_BYTES, *(piece.size for piece in one.pieces)] for one in files]
    total = sum(map(sum, sizes))
    rounds = -(-total // (processes * TASK_BYTES))
    share = total / (1 if total <= INLINE_BYTES else processes * rounds)
    tasks: list[list[FilePieces]] = [[]]
    done = 0.0
    for one in files:
        done += _FILE_BYTES
        tasks[-1].append(one._replace(pieces=[]))
        for piece in one.pieces:
            # A piece belongs to the task in which its middle is.
            if done + piece.size / 2 > share * len(tasks) and tasks[-1] != [one._replace(pieces=[])]:
                tasks.append([one._replace(pieces=[])])
            tasks[-1][-1].pieces.append(piece)
            done += piece.size
    return tasks


def _check_again(landing: FileLanding, plans: Sequence[FilePieces]) -> None:
    """Check that the rows of files that are written are still the right ones.

    Raises:
        _UnfitGroup: they are not.
    """
    numbers = landing.landed.numbers()
    errors: dict[str, UserError] = {}
    stale = False
    for one in plans:
        try:
            now = landing.still(one.file, one.known, numbers)
        except UserError as error:
            errors[one.file.path] = error
        else:
            stale |= now.landed or now.kept != one.known.kept
    if errors or stale:
        raise _UnfitGroup(errors)


def _commit(
    landing: FileLanding,
    plans: Sequence[FilePieces],
    written: Sequence[Written],
    tables: LandingTables,
    counts: Mapping[str, RowCounts],
) -> list[Landed]:
    """Commit the rejected rows of files, then the accepted ones."""
    bad = [one.file for one in plans if counts[one.file.path].reasons]
    if bad:
        parts = [part for one in written for part in one.rejected]
        _commit_files(landing, tables.ready_for_rejected(), parts, bad, {})
    # Also without a row: else a file of which all rows were rejected would land when the spec has been mended,
    # and once more when the rejected rows are replayed.
    new = [one.file for one in plans if counts[one.file.path].rows or one.file in bad or one.known.kept]
    version = None
    if new:
        metadata = {"userMetadata": json.dumps(_detail(landing, new, counts))}
        parts = [part for one in written for part in one.accepted]
        version = _commit_files(landing, tables.accepted, parts, new, metadata)
    return [
        Landed(
            file.path,
            file.digest,
            found.rows,
            dict(sorted(found.reasons.items())),
            version if found.rows else None,
            note=landing.note_of(file.path, known),
            counts=found,
        )
        for file, known, _ in plans
        for found in [counts[file.path]]
    ]


def _commit_files(
    landing: FileLanding,
    table: FileTable,
    parts: list[PartFile],
    files: Sequence[FileState],
    metadata: Mapping[str, str],
) -> int | None:
    """Commit written parts, which ends the transaction of each file; return the version."""
    transactions = [transaction(landing.spec.name, one.path, one.digest) for one in files]
    return commit_or_remove(table, parts, lambda parts: table.commit_for_all(parts, transactions, metadata))


def _detail(
    landing: FileLanding, new: Sequence[FileState], counts: Mapping[str, RowCounts]
) -> dict[str, Any]:
    """Return what the metadata of the commit of accepted rows say."""
    files: list[dict[str, Any]] = []
    total = RowCounts()
    for file in new:
        found = counts[file.path]
        files.append({"file": file.path, "sha256": file.digest, "bytes": file.size, "rows": found.rows})
        total.add(found)
    which = files[0] if len(files) == 1 else {"files": files, "rows": total.rows}
    kind = {"history": True} if landing.history else {}
    return {**which, "min_time": total.span[0], "max_time": total.span[1], **kind}


def keep_whole_file(warehouse: Tables, model: str, file: FileState, reason: str) -> None:
    """Keep a file that cannot land as one row of the quarantine. Idempotent.

    Args:
        warehouse: of the quarantine.
        model: name of the model.
        file: that cannot land.
        reason: why.
    """
    name = f"ingest-{model}-{file.digest}-file", 1
    warehouse.create(TABLE, QUARANTINE)
    table = FileTable(warehouse, TABLE)
    row = rejected_rows(
        REJECTED,
        model,
        arrow.texts([f"file: {reason}"]),
        arrow.texts([json.dumps({"file": file.path})]),
        [arrow.texts([file.path]), arrow.texts([file.position])],
        now_us(),
    )
    append_rows(table, row, name)
