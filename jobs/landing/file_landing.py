"""Plan the landing of one model's files: check which files may land, and which of their rows.

A file is identified by its content (SHA-256) and its path. If its name is a key (`key_from_name`), the name counts as
content. Its rejected rows and its accepted rows are one commit each; the transaction is the file's
(`jobs.landing.landed_files`). So landing is idempotent, and a retry after a crash completes the missing commit. A
content that has landed under any path does not land again. A path that has landed with another content is refused,
unless the caller declares what the file is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from jobs.core.errors import UserError
from jobs.core.input_files import list_part_files, open_input
from jobs.landing.csv_parquet import is_record_start
from jobs.landing.file_parts import is_csv
from jobs.landing.json_rows import is_json, spans_lines
from jobs.landing.landed_files import (
    FileState,
    Known,
    LandedFiles,
    TransactionNumbers,
    read_file_state,
    stamp_of,
)
from jobs.landing.reading import cut_file_pieces, read_spec_schema
from jobs.landing.target_table import prepare
from jobs.landing.text_lines import is_text
from jobs.landing.values.key_from_name import build_salt
from jobs.landing.values.keys import derive_key_types
from jobs.landing.workers import Workers
from jobs.landing.written_pieces import FilePieces, RowCounts
from jobs.specs.model_spec import ModelSpec
from jobs.storage.measurements_table import KeyTypes
from jobs.storage.warehouse import Tables

REFUSE, _, NEW = CHANGED = ("refuse", "append", "new")
"""Actions for a file that has landed with another content: refuse it, land only the rows that were added at its end, or
land all rows, as of another file with the same name."""

Refuse = Callable[[str, UserError], None]
"""Called with the path and the error of a file that cannot land."""


@dataclass(frozen=True, slots=True)
class Landed:
    """Outcome of one file.

    rows: accepted rows; reasons: rows quarantined by this run, by reason; version: version of the measurements table
    that committed the rows, or None; before: the file had already landed, and was not read again; note: note on a file
    that had landed with another content; counts: counts of all its rows.
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
    """A file has another content than when it landed."""


@dataclass
class FileLanding:
    """Lands files of one model, each once.

    changed: action for a file that has landed with another content (one of `CHANGED`).
    history: the files are history of new keys.
    workers: processes that read and write.
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
        """Return the states of the files that may land; several are hashed at once.

        If the measurements table does not exist, it is created with the types of the first file.

        Args:
            paths: paths of the files.
            refuse: called for a file that may not land. Without it the error is raised.

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
        """Return the pieces of a file that land.

        Raises:
            UserError: the file cannot be read, or has landed with another content.
        """
        start, middle = self._find_starts(file, known)
        return FilePieces(file, known, cut_file_pieces(self.spec, file.path, file.size, start, middle))

    def _find_starts(self, file: FileState, known: Known) -> tuple[int, int]:
        """Return the byte positions from which a file's accepted rows land, and its rejected rows are kept.

        They differ if a landing of a former content was killed between the commits of its rejected and accepted rows.

        Raises:
            ChangedFile: the file has landed with another content, and may not land with this one.
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
        """Return the note on a file that had landed with another content, or None."""
        if not known.others:
            return None
        which = (
            "all its rows landed beside those" if self.changed == NEW else "only the rows after those landed"
        )
        return f"{path}: had landed with {self.landed.describe(known.others)}; {which}"

    def still(self, file: FileState, known: Known, numbers: TransactionNumbers) -> Known:
        """Return which rows of a file are committed now, after checking that the rows that were read are still valid.

        numbers: transaction numbers as of now.

        Raises:
            UserError: the file has changed, or another process has landed another content of it.
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
    """Return the size in bytes of a file, or of a folder's part files."""
    return sum(file.stat().st_size for file in list_part_files(Path(path)))


def _can_be_appended_to(path: Path) -> bool:
    """Tell if a file's format allows appended rows: uncompressed CSV, JSON lines or text lines."""
    name = path.name.lower()
    return (
        path.is_file()
        and (is_csv(path) or is_text(path) or is_json(path) and not spans_lines(path))
        and name[-3:] != ".gz"
    )


def _end_of(spec: ModelSpec, path: Path, digests: Iterable[str]) -> int | None:
    """Return the end, in bytes, of the longest of these contents that is a prefix of whole rows of a file; else None.

    A last row that was read without its line break counts as whole if the next read begins with it.
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
