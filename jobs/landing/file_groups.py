"""Land groups of files: each commit contains a transaction for every file of its group. A large file forms a group.

The transactions record path and content of each file, as a separate commit would (`jobs.landing.landed_files`). If a
landing is killed between two commits, the next landing completes it, however that groups the files. Several processes
read, check and write the pieces of a group (`jobs.landing.written_pieces`). The written files join a table when a
commit names them. If a file cannot land, the other files of its group are written again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jobs.core.errors import INPUT_ERROR, UserError
from jobs.core.input_files import get_known_inputs
from jobs.landing.file_landing import FileLanding, Landed, Refuse
from jobs.landing.landed_files import FileState, build_file_transaction
from jobs.landing.target_table import LandingTables
from jobs.landing.values.times import read_now_us
from jobs.landing.written_pieces import (
    REJECTED,
    FilePieces,
    RowCounts,
    WritingTask,
    WrittenPiece,
    build_rejected_rows,
)
from jobs.state.encoding import arrow
from jobs.storage.part_files import PartFile, name_attempt
from jobs.storage.quarantine import TABLE, TooMany, build_refusal, is_over_limit
from jobs.storage.table_log import Conflict, FileTable, append_rows, commit_or_remove
from jobs.storage.tables import QUARANTINE
from jobs.storage.warehouse import Tables

MOST_FILES = 1_000
"""Maximum files of one commit: its metadata list them."""
GROUP_BYTES = 64 << 20
"""Maximum bytes of the files of one commit, unless it has only one file."""
INLINE_BYTES = 16 << 20
"""Bytes up to which one process writes the rows, into one file."""
TASK_BYTES = 96 << 20
"""Approximate bytes of a task: as text, the rows of one file of a table."""
_FILE_BYTES = 32 << 10
"""Fixed cost of a file, in bytes, added to its size."""

OnRead = Callable[[int], None]


class _UnfitGroup(Exception):
    """Some files of a group cannot land: errors by path; empty if another process has committed some of its rows."""

    def __init__(self, errors: Mapping[str, UserError]) -> None:
        super().__init__()
        self.errors = errors


def land_all(
    landing: FileLanding,
    paths: Sequence[str],
    refuse: Refuse | None = None,
    on_read: OnRead = lambda size: None,
) -> Iterator[list[Landed]]:
    """Check files and land them in order; yield the outcomes of each commit. Idempotent.

    Args:
        landing: landing of the model.
        paths: paths of the files.
        refuse: called for a file that cannot land. Without it, a file that may not land stops all files; if a file
            cannot be read, the files before it land, and the error is raised.
        on_read: called with the number of bytes read, from any thread.

    Raises:
        UserError: a file has more rejected rows than the spec allows; without `refuse`, also if a file cannot land.
    """
    for group in group_files(landing.check_all(paths, refuse)):
        if done := _land_group(landing, group, refuse, on_read):
            yield done


def group_files(files: Sequence[FileState]) -> Iterator[list[FileState]]:
    """Group files by commit: the files of a group have different contents and a limited total size."""
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
    """Tell if several processes write files of this total size."""
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
        _UnfitGroup: some files cannot land; then no file of the group has landed.
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
                _check_again(landing, plans)  # another process has landed a file: the others start again
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
) -> list[WrittenPiece]:
    """Write the rows of files, and add up the counts of each path.

    Raises:
        _UnfitGroup: some files cannot be read, or have too many rejected rows.
    """
    targets = tables.list_targets()
    tasks = [
        WritingTask(
            landing.spec,
            landing.key_types,
            files,
            landing.history,
            *targets,
            name_attempt(number, tables.attempt, 0, 0),
            tables.landed_at,
            get_known_inputs(),
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
        if is_over_limit(limit, found.reasons, found.rows):
            errors.setdefault(path, build_refusal(limit, found.reasons, found.rows, path, INPUT_ERROR))
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
            # A piece belongs to the task that contains its middle.
            if done + piece.size / 2 > share * len(tasks) and tasks[-1] != [one._replace(pieces=[])]:
                tasks.append([one._replace(pieces=[])])
            tasks[-1][-1].pieces.append(piece)
            done += piece.size
    return tasks


def _check_again(landing: FileLanding, plans: Sequence[FilePieces]) -> None:
    """Check that the written rows still match the files and the commits.

    Raises:
        _UnfitGroup: they do not match.
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
    written: Sequence[WrittenPiece],
    tables: LandingTables,
    counts: Mapping[str, RowCounts],
) -> list[Landed]:
    """Commit the rejected rows of files, then the accepted rows."""
    bad = [one.file for one in plans if counts[one.file.path].reasons]
    if bad:
        parts = [part for one in written for part in one.rejected]
        _commit_files(landing, tables.prepare_rejected(), parts, bad, {})
    # Commit also without a row. Else a file whose rows were all rejected would land after the spec is mended,
    # and again when its rejected rows are replayed.
    new = [one.file for one in plans if counts[one.file.path].rows or one.file in bad or one.known.kept]
    version = None
    if new:
        metadata = {"userMetadata": json.dumps(_build_detail(landing, new, counts))}
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
    """Commit written parts with the transaction of each file; return the version."""
    transactions = [build_file_transaction(landing.spec.name, one.path, one.digest) for one in files]
    return commit_or_remove(table, parts, lambda parts: table.commit_for_all(parts, transactions, metadata))


def _build_detail(
    landing: FileLanding, new: Sequence[FileState], counts: Mapping[str, RowCounts]
) -> dict[str, Any]:
    """Return the metadata for the commit of accepted rows."""
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
    """Quarantine a file that cannot land as one row. Idempotent.

    Args:
        warehouse: warehouse of the quarantine.
        model: name of the model.
        file: file that cannot land.
        reason: why it cannot land.
    """
    name = f"ingest-{model}-{file.digest}-file", 1
    warehouse.create(TABLE, QUARANTINE)
    table = FileTable(warehouse, TABLE)
    row = build_rejected_rows(
        REJECTED,
        model,
        arrow.build_texts([f"file: {reason}"]),
        arrow.build_texts([json.dumps({"file": file.path})]),
        [arrow.build_texts([file.path]), arrow.build_texts([file.position])],
        read_now_us(),
    )
    append_rows(table, row, name)
