"""Land the files of a model: find out which files and rows may land, and commit the files in groups."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from jobs.core.errors import INPUT_ERROR, UserError
from jobs.core.input_files import get_known_inputs, list_part_files, open_input
from jobs.landing.csv_parquet import is_record_start
from jobs.landing.file_parts import is_csv
from jobs.landing.json_rows import is_json, spans_lines
from jobs.landing.landed_files import (
    FileState,
    Known,
    LandedFiles,
    TransactionNumbers,
    build_file_transaction,
    read_file_state,
    stamp_of,
)
from jobs.landing.raw_rows import build_salt
from jobs.landing.reading import cut_file_pieces, read_spec_schema
from jobs.landing.target_table import LandingTables, prepare
from jobs.landing.text_lines import is_text
from jobs.landing.values.keys import derive_key_types
from jobs.landing.values.times import read_now_us
from jobs.landing.workers import Workers
from jobs.landing.written_pieces import (
    REJECTED,
    FilePieces,
    RowCounts,
    WritingTask,
    WrittenPiece,
    build_rejected_rows,
)
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding import arrow
from jobs.storage.measurements_table import KeyTypes
from jobs.storage.part_files import PartFile, name_attempt
from jobs.storage.quarantine import TABLE, TooMany, build_refusal, is_over_limit
from jobs.storage.table_log import Conflict, FileTable, append_rows, commit_or_remove
from jobs.storage.tables import QUARANTINE
from jobs.storage.warehouse import Tables

REFUSE, _, NEW = CHANGED = ("refuse", "append", "new")
"""Actions for a file that has already landed with another content.

They are, in order: refuse the file, land only the rows that were added at the end of the file, or land all rows as if
the file were a different file with the same name.
"""

Refuse = Callable[[str, UserError], None]
"""Function that is called with the path and the error of a file that cannot land."""


@dataclass(frozen=True, slots=True)
class Landed:
    """Outcome of one file.

    rows: number of accepted rows.
    reasons: number of rows that this run has quarantined, by reason.
    version: version of the measurements table that contains the rows; None if no row was accepted.
    before: whether the file had already landed, and was therefore not read again.
    note: note on a file that had landed with another content; None for other files.
    counts: counts of all rows of the file.
    """

    path: str
    digest: str
    rows: int
    reasons: Mapping[str, int]
    version: int | None
    before: bool = False
    note: str | None = None
    counts: RowCounts = field(default_factory=RowCounts)


class ChangedFile(UserError):
    """Error for a file whose content has changed since the file landed."""


@dataclass
class FileLanding:
    """Lands the files of one model, each file once.

    changed: action for a file that has landed with another content (one of `CHANGED`).
    history: whether the files contain the history of new keys.
    workers: processes that read and write the files.
    """

    warehouse: Tables
    spec: ModelSpec
    changed: str = REFUSE
    history: bool = False
    workers: Workers = field(default_factory=Workers)

    def __post_init__(self) -> None:
        self.landed = LandedFiles(self.warehouse, self.spec.name)
        self.key_types: KeyTypes = {}

    def check_all(self, paths: Sequence[str], refuse: Refuse | None = None) -> list[FileState]:
        """Return the states of the files that may land; several files are hashed in parallel.

        If the measurements table does not exist, it is created with the key types of the first file.

        Args:
            paths: paths of the files.
            refuse: called for each file that may not land. None means that the first error is raised.

        Raises:
            UserError: a file lacks a column, cannot be read, or has landed with another content (`ChangedFile`).
        """
        numbers = self.landed.numbers()
        schemas: list[pa.Schema] = []
        states: list[FileState] = []
        threads = ThreadPoolExecutor(self.workers.count)
        try:
            looks = [threads.submit(self._look_at, path) for path in paths]
            for path, look in zip(paths, looks, strict=True):
                try:
                    schema, file = look.result()
                    self._find_starts(file, self.landed.known(path, file.digest, numbers))
                except UserError as error:
                    if refuse is None:
                        raise
                    refuse(path, error)
                else:
                    schemas.append(schema)
                    states.append(file)
        finally:
            threads.shutdown(cancel_futures=True)
        if states and not self.key_types:
            types = derive_key_types(self.spec.naming_columns, schemas[0])
            self.key_types = prepare(self.warehouse, self.spec, types)
        return states

    def _look_at(self, path: str) -> tuple[pa.Schema, FileState]:
        return read_spec_schema(self.spec, path), read_file_state(path, build_salt(self.spec, path))

    def plan(self, file: FileState, known: Known) -> FilePieces:
        """Return the pieces of a file that must be landed.

        Raises:
            UserError: the file cannot be read, or has landed with another content.
        """
        start, middle = self._find_starts(file, known)
        return FilePieces(file, known, cut_file_pieces(self.spec, file.path, file.size, start, middle))

    def _find_starts(self, file: FileState, known: Known) -> tuple[int, int]:
        """Return the byte positions from which a file's accepted rows and its rejected rows are committed.

        The two positions differ if an earlier landing of the file was killed after the commit of the rejected rows and
        before the commit of the accepted rows.

        Raises:
            ChangedFile: the file has landed with another content, and may not land with its present content.
        """
        if known.landed or not known.others or self.changed == NEW:
            return 0, 0
        former = self.landed.describe(known.others)
        if self.changed == REFUSE:
            raise ChangedFile(
                f"{file.path}: has changed since it landed: it has {file.size:,} bytes, SHA-256 {file.digest[:16]}, "
                f"and landed with {former}; new rows come in new files. If rows were added at its end, land these "
                f"with --changed append; if it is another file of the same name, with none of the former rows, land "
                f"it with --changed new"
            )
        path = Path(file.path)
        ends = [None, None]
        if _can_be_appended_to(path):
            ends = [_end_of(self.spec, path, some) for some in (known.accepted, known.rejected)]
        places = [end for end in ends if end is not None]
        if not places:
            raise ChangedFile(
                f"{file.path}: does not begin with the rows that landed ({former}): --changed append is for a file "
                f"of CSV, JSON lines or text, not compressed, to which whole rows were added at the end; put new rows "
                f"into a new file"
            )
        return ends[0] or 0, max(places)

    def note_of(self, path: str, known: Known) -> str | None:
        """Return the note on a file that had landed with another content; None for other files."""
        if not known.others:
            return None
        which = (
            "all its rows landed beside those" if self.changed == NEW else "only the rows after those landed"
        )
        return f"{path}: had landed with {self.landed.describe(known.others)}; {which}"

    def still(self, file: FileState, known: Known, numbers: TransactionNumbers) -> Known:
        """Check that a file is unchanged since it was read, and return which of its rows are committed now.

        Args:
            file: state of the file when it was read.
            known: rows that were committed when the file was read.
            numbers: present transaction numbers.

        Raises:
            UserError: the file has changed, or another process has landed the file with another content.
        """
        if stamp_of(file.path) != (file.size, file.changed):
            raise UserError(
                f"{file.path}: changed while it was read, and nothing of it has landed; write a file under another "
                f"name, and rename it when it is complete"
            )
        now = self.landed.known(file.path, file.digest, numbers)
        if now.others != known.others and not now.landed:
            raise ChangedFile(
                f"{file.path}: another process has just landed it with another content; run this again"
            )
        return now


def read_file_size(path: str) -> int:
    """Return the size in bytes of a file, or the total size of the part files in a folder."""
    return sum(file.stat().st_size for file in list_part_files(Path(path)))


def _can_be_appended_to(path: Path) -> bool:
    """Return whether rows can be appended to a file: it must be uncompressed CSV, JSON lines or text lines."""
    name = path.name.lower()
    return (
        path.is_file()
        and (is_csv(path) or is_text(path) or is_json(path) and not spans_lines(path))
        and name[-3:] != ".gz"
    )


def _end_of(spec: ModelSpec, path: Path, digests: Iterable[str]) -> int | None:
    """Return the byte position up to which a file still has the content that landed; None if no content matches.

    A content matches if the file begins with it and it ends after a whole row. The longest match is returned. A former
    last row without a line break counts as whole if the line break now follows it.

    Args:
        spec: spec of the model.
        path: path of the file.
        digests: SHA-256 digests, in hexadecimal, of the contents that landed.
    """
    wanted = {bytes.fromhex(one) for one in digests if one}
    found: list[int] = []
    digest, place = hashlib.sha256(build_salt(spec, path)), 0
    with open_input(path) as file:
        for line in file:
            row = line.rstrip(b"\r\n")
            bare = digest.copy()
            bare.update(row)
            digest.update(line)
            place += len(line)
            if digest.digest() in wanted or bare.digest() in wanted:
                found.append(place)
    whole = reversed(found)
    if is_json(path) or is_text(path):
        return next(whole, None)
    return next((end for end in whole if is_record_start(path, end, spec.file_columns, spec.files)), None)


MOST_FILES = 1_000
"""Maximum number of files of one commit. The limit exists because the metadata of a commit list all its files."""
GROUP_BYTES = 64 << 20
"""Maximum total bytes of the files of one commit. A larger file is committed alone."""
INLINE_BYTES = 16 << 20
"""Total bytes up to which a single process writes all rows, into one file of each table."""
TASK_BYTES = 96 << 20
"""Approximate input bytes of a task, which is about the size of the rows in one file of a table as text."""
_FILE_BYTES = 32 << 10
"""Fixed cost of reading a file, in bytes; it is added to the size of the file."""

OnRead = Callable[[int], None]


class _UnfitGroup(Exception):
    """Error for a group with files that cannot land.

    `errors` has an error for each path; it is empty if another process has committed rows of the group.
    """

    def __init__(self, errors: Mapping[str, UserError]) -> None:
        super().__init__()
        self.errors = errors


def land_all(
    landing: FileLanding,
    paths: Sequence[str],
    refuse: Refuse | None = None,
    on_read: OnRead = lambda size: None,
) -> Iterator[list[Landed]]:
    """Check files and land them in order; yield the outcomes of each commit. A second run lands no row again.

    Args:
        landing: landing of the model.
        paths: paths of the files.
        refuse: called for each file that cannot land. If it is None, an error is raised instead: before any file lands
            if a check fails, or after the earlier files have landed if a file cannot be read.
        on_read: called with the number of bytes read; the call may come from any thread.

    Raises:
        UserError: a file has more rejected rows than the spec allows, or a file cannot land and `refuse` is None.
    """
    for group in group_files(landing.check_all(paths, refuse)):
        if done := _land_group(landing, group, refuse, on_read):
            yield done


def group_files(files: Sequence[FileState]) -> Iterator[list[FileState]]:
    """Yield groups of files, one group for each commit.

    The files of a group have different contents, and their number and total size are limited.
    """
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
    """Return whether several processes must land files.

    Args:
        size: total size of the files in bytes.
        files: number of the files.
    """
    return size + files * _FILE_BYTES > INLINE_BYTES


def _land_group(
    landing: FileLanding, files: list[FileState], refuse: Refuse | None, on_read: OnRead
) -> list[Landed]:
    """Land those files of a group that can land, and return their outcomes."""
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
        _UnfitGroup: a file cannot land. In this case no file of the group has landed.
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
                # If another process has landed a file of the group, the other files start again.
                _check_again(landing, plans)
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
    """Write the rows of files, and add the numbers of rows of each path to `counts`.

    Raises:
        _UnfitGroup: a file cannot be read, or has too many rejected rows.
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
    """Distribute the pieces of files, in order, among tasks of about the same size."""
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
            # A piece belongs to the task whose share contains the middle of the piece.
            if done + piece.size / 2 > share * len(tasks) and tasks[-1] != [one._replace(pieces=[])]:
                tasks.append([one._replace(pieces=[])])
            tasks[-1][-1].pieces.append(piece)
            done += piece.size
    return tasks


def _check_again(landing: FileLanding, plans: Sequence[FilePieces]) -> None:
    """Check that no file and no commit has changed since the rows were written.

    Raises:
        _UnfitGroup: a file has changed, or another process has committed rows of a file.
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
    """Commit the rejected rows of files, and after them the accepted rows."""
    bad = [one.file for one in plans if counts[one.file.path].reasons]
    if bad:
        parts = [part for one in written for part in one.rejected]
        _commit_files(landing, tables.prepare_rejected(), parts, bad, {})
    # A file is committed even if it has no accepted row. Otherwise the rows of a file that was rejected as a whole
    # would land twice after the spec is corrected: from the file, and by the replay of the rejected rows.
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
    """Commit written part files with a transaction for each input file; return the version of the table."""
    transactions = [build_file_transaction(landing.spec.name, one.path, one.digest) for one in files]
    return commit_or_remove(table, parts, lambda parts: table.commit_for_all(parts, transactions, metadata))


def _build_detail(
    landing: FileLanding, new: Sequence[FileState], counts: Mapping[str, RowCounts]
) -> dict[str, Any]:
    """Return the metadata of the commit that contains the accepted rows."""
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
    """Quarantine a file that cannot land: add one row for the whole file. A second call adds no row.

    Args:
        warehouse: warehouse that contains the quarantine.
        model: name of the model.
        file: file that cannot land.
        reason: reason why the file cannot land.
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
