"""The landing of the files of one model: which files may land, what of them lands, and what the commits say of them.

A file is identified by its content (SHA-256) and its path; where its name is a key (`key_from_name`), the name counts
as content. Its rejected rows and its accepted rows are one commit
each, in the file's own transaction (`jobs.landing.landed_files`): landing is idempotent, and a retry after a crash
completes the missing commit. A content that has landed, under whatever path, does not land again; another content under
a path that has landed is refused, unless the caller says what it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jobs.core.errors import UserError
from jobs.core.input_files import open_input, part_files
from jobs.landing.csv_parquet import begins_record
from jobs.landing.json_rows import is_json, spans_lines
from jobs.landing.landed_files import Known, LandedFiles, Numbers
from jobs.landing.reading import FilePiece, pieces_of
from jobs.landing.text_lines import is_text
from jobs.landing.values.key_from_name import salt_of
from jobs.landing.values.times import now_us
from jobs.landing.workers import Workers
from jobs.landing.written_pieces import RowCounts
from jobs.specs.model_spec import ModelSpec
from jobs.storage.measurements_table import HISTORY_PREFIX
from jobs.storage.warehouse import Tables

REFUSE, _, NEW = CHANGED = ("refuse", "append", "new")
"""What to do with a file that has landed with another content: refuse it, land the rows that were added at its end, or
land all its rows, as those of another file of the same name."""


@dataclass(frozen=True, slots=True)
class Landed:
    """The outcome of one file.

    rows: accepted; reasons: rows quarantined by this run, by reason; version: the measurements table's commit of the
    rows, None if there is none; before: the file had already landed, and was not read again; note: what to tell about a
    file that had landed with another content; counts: of all its rows.
    """

    path: str
    rows: int
    reasons: Mapping[str, int]
    version: int | None
    before: bool = False
    note: str | None = None
    counts: RowCounts = field(default_factory=RowCounts)


class ChangedFile(UserError):
    """A file has another content than when it landed."""


class FileState(NamedTuple):
    """A file as it was when its content was hashed."""

    path: str
    digest: str
    size: int
    changed: int


@dataclass
class FilePlan:
    """What of a file lands: its pieces; known: what was committed of it before; counts: of the rows that were read."""

    file: FileState
    known: Known
    pieces: list[FilePiece]
    counts: RowCounts = field(default_factory=RowCounts)


@dataclass
class FileLanding:
    """Lands files of one model, each once.

    changed: what a file is that has landed with another content (one of `CHANGED`).
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

    def check_all(self, paths: Sequence[str]) -> list[FileState]:
        """Return the states of files, after checking that each may land; several files are hashed at once.

        Raises:
            ChangedFile: one has landed with another content.
        """
        numbers = self.landed.numbers()
        with ThreadPoolExecutor(self.workers.count) as threads:
            return list(threads.map(lambda path: self.check(path, numbers), paths))

    def check(self, path: str, numbers: Numbers | None = None) -> FileState:
        """Return the state of a file, after checking that it may land.

        numbers: what has landed, if the caller checks many files.

        Raises:
            ChangedFile: it has landed with another content.
        """
        file = file_state(path, salt_of(self.spec, path))
        self._starts(file, self.landed.known(path, file.digest, numbers))
        return file

    def plan(self, file: FileState, known: Known) -> FilePlan:
        """Return what of a file lands.

        Raises:
            UserError: the file cannot be read, or has landed with another content.
        """
        start, middle = self._starts(file, known)
        began = now_us()
        pieces = pieces_of(self.spec, file.path, file.size, start, middle)
        return FilePlan(file, known, [piece._replace(landed=began) for piece in pieces])

    def _starts(self, file: FileState, known: Known) -> tuple[int, int]:
        """Return from which byte on a file's accepted rows land, and from which on its rejected ones are kept.

        They differ if a landing was killed after the rejected rows of a former content, before its accepted ones.

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

    @property
    def kind(self) -> dict[str, bool]:
        """What the commit's metadata say of the files' kind."""
        return {"history": True} if self.history else {}

    def origin_of(self, path: str) -> str:
        """Return the `_origin` of a file's rows."""
        return HISTORY_PREFIX + path if self.history else path

    def note_of(self, path: str, known: Known) -> str | None:
        """Return what to tell about a file that had landed with another content, or None."""
        if not known.others:
            return None
        which = (
            "all its rows landed beside those" if self.changed == NEW else "only the rows after those landed"
        )
        return f"{path}: had landed with {self.landed.describe(known.others)}; {which}"

    def still(self, file: FileState, known: Known, numbers: Numbers | None = None) -> Known:
        """Return what is committed of a file now, after checking that the rows that were read are still the right ones.

        numbers: what has landed now, if the caller asks for many files.

        Raises:
            UserError: the file has changed, or another process has landed another content of it.
        """
        if _stamp(file.path) != (file.size, file.changed):
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


def detail_of(file: FileState, rows: int) -> dict[str, Any]:
    """Return what the commit's metadata tell of a file."""
    return {"file": file.path, "sha256": file.digest, "bytes": file.size, "rows": rows}


def position_of(file: FileState) -> str:
    """Return the `position` of a file's rejected rows in the quarantine."""
    return json.dumps({"file": file.path, "sha256": file.digest})


def file_size(path: str) -> int:
    """Return the bytes of a file, or of a folder's part files."""
    return sum(file.stat().st_size for file in part_files(Path(path)))


def _stamp(path: str) -> tuple[int, int]:
    """Return a file's size and the time of its last change (ns), which change with its content."""
    stats = [file.stat() for file in part_files(Path(path))]
    return sum(one.st_size for one in stats), max((one.st_mtime_ns for one in stats), default=0)


def file_state(path: str, salt: bytes = b"") -> FileState:
    """Return the state of a file with the SHA-256 of its content, after `salt`."""
    size, changed = _stamp(path)
    digest = hashlib.sha256(salt)
    for file in part_files(Path(path)):
        with open_input(file) as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    return FileState(path, digest.hexdigest(), size, changed)


def _can_be_appended_to(path: Path) -> bool:
    """Tell if a file's format allows to add rows at its end: CSV, JSON or text line by line, not compressed."""
    name = path.name.lower()
    return (
        path.is_file()
        and (name.endswith(".csv") or is_text(path) or is_json(path) and not spans_lines(path))
        and name[-3:] != ".gz"
    )


def _end_of(spec: ModelSpec, path: Path, digests: Iterable[str]) -> int | None:
    """Return the end, in bytes, of the longest of these contents that a file begins with, as whole rows; else None.

    A last row without a line break is whole if the line break follows now.
    """
    wanted = {bytes.fromhex(one) for one in digests if one}
    found: list[int] = []
    digest, place = hashlib.sha256(salt_of(spec, path)), 0
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
    return next((end for end in whole if begins_record(path, end, spec.file_columns, spec.files)), None)
