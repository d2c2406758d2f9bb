"""Land files in the measurements table; rejected rows go to quarantine with the reason.

A file is identified by its content (SHA-256) and its path; where its name is a key (`key_from_name`), the name counts
as content. Its rejected rows and its accepted rows are one commit
each, in the file's own transaction (`jobs.landing.landed_files`): landing is idempotent, and a retry after a crash
completes the missing commit. A content that has landed, under whatever path, does not land again; another content under
a path that has landed is refused, unless the caller says what it is.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql import functions as F

from jobs.core.errors import INPUT_ERROR, UserError
from jobs.core.input_files import open_input, part_files
from jobs.landing.appended import can_be_appended_to, end_of
from jobs.landing.checking import refuse_types
from jobs.landing.csv_parquet import FORMATS, check_columns, read_schema
from jobs.landing.json_rows import FORMATS as JSON_FORMATS
from jobs.landing.json_rows import is_array, is_json, json_schema
from jobs.landing.key_from_name import salt_of, schema_with_key
from jobs.landing.landed_files import Known, LandedFiles, Numbers, transaction
from jobs.landing.line_parts import expands_beyond
from jobs.landing.reading import (
    CheckedRows,
    CheckedTables,
    Remarks,
    RowCounts,
    Rows,
    checked_in_driver,
    checked_in_workers,
    checked_tables,
    parts_of,
)
from jobs.landing.text_lines import FORMATS as TEXT_FORMATS
from jobs.landing.text_lines import is_text, text_schema
from jobs.spark.quarantine import keep, rejected_rows
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.storage.measurements_table import HISTORY_PREFIX, KeyTypes
from jobs.storage.quarantine import refusal, too_many
from jobs.storage.tables import measurements

IN_DRIVER_BYTES = 16 << 20
"""A file up to this size is read in the driver, which is faster than the Spark jobs that would read it in workers."""

SMALL_BYTES = 64 << 20
"""Below this total size, landing ends before compiled code would pay for its compilation."""

REFUSE, _, NEW = CHANGED = ("refuse", "append", "new")
"""What to do with a file that has landed with another content: refuse it, land the rows that were added at its end, or
land all its rows, as those of another file of the same name."""


ALWAYS_READ = (*FORMATS, *JSON_FORMATS)
"""Endings of the files that can be landed for any model."""


def endings_of(spec: ModelSpec) -> tuple[str, ...]:
    """Return the endings of the files that can be landed; those of text where the spec says how to read lines."""
    return (*ALWAYS_READ, *(() if spec.line_pattern is None else TEXT_FORMATS))


@dataclass(frozen=True, slots=True)
class Landed:
    """The outcome of one file.

    rows: accepted; reasons: rows quarantined by this run, by reason; version: the measurements table's commit of the
    rows, None if the file had already landed; note: what to tell about a file that had landed with another content;
    remarks: examples of rejected rows, and repeats.
    """

    path: str
    rows: int
    reasons: dict[str, int]
    version: int | None
    note: str | None = None
    remarks: Remarks = Remarks()


class ChangedFile(UserError):
    """A file has another content than when it landed."""


class FileState(NamedTuple):
    """A file as it was when its content was hashed; small: it is read in the driver."""

    path: str
    digest: str
    size: int
    changed: int
    small: bool = False


class ReadFile(NamedTuple):
    """A small file whose rows are checked and not committed yet; known: what was committed of it before."""

    file: FileState
    known: Known
    rows: CheckedTables


@dataclass
class FileLanding:
    """Lands files of one model, each once.

    changed: what a file is that has landed with another content (one of `CHANGED`).
    history: the files are history of new keys.
    """

    warehouse: Warehouse
    spec: ModelSpec
    changed: str = REFUSE
    history: bool = False

    def __post_init__(self) -> None:
        self.landed = LandedFiles(self.warehouse, self.spec.name)

    def check(self, path: str, numbers: Numbers | None = None) -> FileState:
        """Return the state of a file, after checking that it may land.

        numbers: what has landed, if the caller checks many files.

        Raises:
            ChangedFile: it has landed with another content.
        """
        file = file_state(path, salt_of(self.spec, path))
        self._starts(file, self.landed.known(path, file.digest, numbers))
        return file

    def land(self, file: FileState, key_types: KeyTypes) -> Landed:
        """Land a file: rejected rows first, then accepted ones. Idempotent.

        Raises:
            UserError: the file cannot be read, has changed since it was checked, has landed with another content, or
                has more rejected rows than the spec allows.
        """
        known = self.landed.known(file.path, file.digest)
        read = (self.warehouse, self.spec, self._chosen(file, known), key_types, file.path)
        if file.small:
            return self._commit(file, known, checked_in_driver(*read))
        with checked_in_workers(*read) as rows:
            return self._commit(file, known, rows)

    def read(self, file: FileState, key_types: KeyTypes, numbers: Numbers) -> ReadFile:
        """Read and check the rows of a small file, for `commit_all`.

        Raises:
            UserError: as of `land`.
        """
        known = self.landed.known(file.path, file.digest, numbers)
        rows = checked_tables(self.spec, self._chosen(file, known), key_types, file.path)
        self._refuse_many(file, known, rows.counts)
        return ReadFile(file, known, rows)

    def _chosen(self, file: FileState, known: Known) -> list[Rows]:
        """Return the parts of a file that land."""
        start, middle = self._starts(file, known)
        path = Path(file.path)
        return [
            *(
                Rows(part, False)
                for part in (parts_of(self.spec, path, start, middle) if start < middle else [])
            ),
            *(Rows(part, True) for part in parts_of(self.spec, path, middle)),
        ]

    def _refuse_many(self, file: FileState, known: Known, counts: RowCounts) -> None:
        rows, _, reasons = counts
        if too_many(self.spec.quarantine, reasons, rows) and not (known.landed or known.kept):
            raise refusal(self.spec.quarantine, reasons, rows, file.path, INPUT_ERROR)

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
        if can_be_appended_to(path):
            ends = [end_of(self.spec, path, some) for some in (known.accepted, known.rejected)]
        places = [end for end in ends if end is not None]
        if not places:
            raise ChangedFile(
                f"{file.path}: does not begin with the rows that landed ({former}): --changed append is for a file "
                f"of CSV, JSON lines or text, not compressed, to which whole rows were added at the end; put new rows "
                f"into a new file"
            )
        return ends[0] or 0, max(places)

    def _commit(self, file: FileState, known: Known, checked: CheckedRows) -> Landed:
        """Commit the rejected rows, then the accepted ones; each commit is skipped if an earlier run has made it."""
        warehouse, spec, path, digest = self.warehouse, self.spec, file.path, file.digest
        rows, (first, last), reasons = checked.counts
        self._refuse_many(file, known, checked.counts)
        with warehouse.lock(f"ingest-{spec.name}"):
            now = self.still(file, known)
            name = transaction(spec.name, path, digest)
            new = {} if now.landed or now.kept else dict(sorted(reasons.items()))
            if new:
                places = (F.lit(path), F.lit(position_of(file)))
                keep(warehouse, rejected_rows(checked.rejected(), spec.name, *places), name)
            note = None if now.landed else self.note_of(path, known)
            if now.landed or not (rows or reasons):
                return Landed(path, rows, new, None, note, checked.remarks)
            # Also without a row: else a file of which all rows were rejected would land when the spec has been mended,
            # and once more when the rejected rows are replayed.
            origin = F.lit(self.origin_of(path))
            frame = checked.accepted().withColumn("_origin", origin)
            frame = frame.withColumn("_landed_at", F.current_timestamp())
            detail = detail_of(file, rows) | {"min_time": first, "max_time": last} | self.kind
            table = measurements(spec.name)
            warehouse.append(frame, table, name, json.dumps(detail))
            version = warehouse.latest_version(table) if rows else None
            return Landed(path, rows, new, version, note, checked.remarks)

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


def file_schema(spec: ModelSpec, path: str) -> pa.Schema:
    """Return a file's schema after checking it against the spec.

    Raises:
        UserError: a column is missing or has an unusable type, or the file cannot be read.
    """
    if is_json(path):
        schema = json_schema(Path(path), spec)
    elif is_text(path):
        schema = text_schema(spec, Path(path))
    else:
        schema = read_schema(Path(path), spec.file_columns, spec.files)
        check_columns(
            Path(path), schema.names, schema.names
        )  # rejected rows are kept with all columns, by name
    schema = schema_with_key(spec, schema, path)
    refuse_types(spec, schema, path)
    return schema


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
    return FileState(path, digest.hexdigest(), size, changed, _is_small(Path(path), size))


def _is_small(path: Path, size: int) -> bool:
    """Tell if a file is read in the driver: what it holds is small, or it is one JSON array, which nothing can cut."""
    if not path.is_file():
        return False
    if is_json(path) and is_array(path):
        return True
    return size <= IN_DRIVER_BYTES and not expands_beyond(path, SMALL_BYTES)
