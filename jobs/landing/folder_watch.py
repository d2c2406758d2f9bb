"""Land each file that arrives in folders once, until stopped (`ingest --input FOLDER --trigger SECONDS`).

A file lands when it has not changed for `SETTLE_SECONDS`. The outcome is recorded in `_folders/<model>`, so that
neither the next scan nor the next run reads the file again. The outcome is recorded after the commits of the file, and
each file has a separate transaction (`jobs.landing.file_landing`). After a crash between the commits and the record,
the next run tries to land the file again, which is idempotent. The transaction identifies path and content, so that a
changed file is also detected. The records are not needed for correctness; they only avoid reading files again.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jobs.core.errors import INPUT_ERROR, UserError, print_note
from jobs.core.input_files import NO_TEXT, has_text_name, list_inputs, warn_once
from jobs.core.processes import stop_signal
from jobs.core.progress import Progress
from jobs.core.report import Report, format_count
from jobs.core.settings import Settings
from jobs.landing.file_landing import ChangedFile, FileLanding, Landed, keep_whole_file, land_all
from jobs.landing.landed_files import read_file_state
from jobs.landing.raw_rows import build_salt
from jobs.landing.reading import ALWAYS_READ, list_endings
from jobs.landing.remarks import build_row_data, describe_rows
from jobs.landing.values.rejected import explain_reasons
from jobs.landing.workers import Workers
from jobs.landing.written_pieces import RowCounts
from jobs.lineage.leases import stream_lock
from jobs.specs.model_spec import ModelSpec
from jobs.storage.files import SmallFiles
from jobs.storage.warehouse import Tables

SETTLE_SECONDS = 2.0
"""Number of seconds without a change after which a file counts as completely written."""
AT_ONCE = 100
"""Maximum number of files that land together; a stop waits until all these files have landed."""
LANDED, REFUSED = "landed", "refused"


class Stamp(NamedTuple):
    """Size (bytes) and modification time (ns) of a file; at least one value changes if the content changes."""

    size: int
    changed: int


class Notes:
    """Outcomes of files, with one small record for each file.

    The name of a record contains the outcome, so that a listing of the folder is sufficient to read all outcomes.
    """

    def __init__(self, files: SmallFiles) -> None:
        self._files = files
        self._done = {tuple(name.split("-")[:2]) for name in files.names("")}

    def has(self, path: str, stamp: Stamp) -> bool:
        """Return whether a file has an outcome for its current content."""
        return (_hash_value(path), _hash_value(stamp)) in self._done

    def note(self, path: str, stamp: Stamp, outcome: str, detail: dict[str, Any]) -> None:
        """Record the outcome of a file."""
        content = json.dumps({"file": path, "outcome": outcome, **detail}).encode()
        self._files.write(f"{_hash_value(path)}-{_hash_value(stamp)}-{outcome}", content)
        self._done.add((_hash_value(path), _hash_value(stamp)))


def _stamp(path: str) -> Stamp | None:
    """Return the stamp of a file, or of the `_SUCCESS` file that Spark writes last into a folder.

    None is returned if the file does not exist, because a file that was just removed must not stop the watch.
    """
    try:
        found = os.stat(os.path.join(path, "_SUCCESS") if os.path.isdir(path) else path)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return None
        raise
    return Stamp(found.st_size, found.st_mtime_ns)


def _hash_value(value: object) -> str:
    return hashlib.sha256(str(value).encode()).hexdigest()[:20]


@dataclass
class Inbox:
    """Folders in which files arrive."""

    folders: list[Path]
    notes: Notes
    endings: tuple[str, ...] = ALWAYS_READ
    _since: dict[tuple[str, Stamp], float] = field(default_factory=dict)

    def ready(self, now: float) -> list[tuple[str, Stamp]]:
        """Return the new files that have not changed for `SETTLE_SECONDS`, sorted by name.

        now: time of this scan, in seconds of the monotonic clock.
        """
        since: dict[tuple[str, Stamp], float] = {}
        for path, stamp in self._found():
            if not self.notes.has(path, stamp):
                since[path, stamp] = self._since.get((path, stamp), now)
        self._since = since
        return sorted(one for one, first in since.items() if now - first >= SETTLE_SECONDS)

    def _found(self) -> Iterator[tuple[str, Stamp]]:
        for path in (path for folder in self.folders for path in list_inputs(folder, self.endings)):
            stamp = _stamp(path)
            if not has_text_name(path):
                warn_once(f"{path}: is not read: {NO_TEXT}")
            elif stamp is not None:
                yield path, stamp


@dataclass
class WatchTotals:
    """Counts of one run of the watch."""

    files: int = 0
    refused: int = 0
    version: int | None = None
    counts: RowCounts = field(default_factory=RowCounts)
    reasons: Counter[str] = field(default_factory=Counter)


@dataclass
class FolderLanding:
    """Lands the files that arrive in the folders of one model."""

    files: FileLanding
    inbox: Inbox
    totals: WatchTotals = field(default_factory=WatchTotals)

    def take_all(self, arrived: Sequence[tuple[str, Stamp]]) -> None:
        """Land files; quarantine a file as a whole if its columns do not match the spec or if it changed after landing.

        Raises:
            UserError: the spec limits `quarantine`, and a file exceeds the limit or does not match the spec.
        """
        stamps = dict(arrived)

        def refuse(path: str, error: UserError) -> None:
            if _stamp(path) == stamps[path]:  # if not, the file is still being written; a later scan lands it
                self._refuse(path, stamps[path], error)

        for landed in land_all(self.files, list(stamps), refuse):
            for done in landed:
                self._note(done, stamps[done.path])

    def _note(self, done: Landed, stamp: Stamp) -> None:
        if done.note is not None:
            print_note(f"note: {done.note}")
        for line in explain_reasons(self.files.spec, done.reasons, done.counts.examples):
            print_note(f"warning: {done.path}: {line}")
        self.inbox.notes.note(done.path, stamp, LANDED, {"sha256": done.digest, "rows": done.rows})
        self.totals.files += 1
        if done.version is not None:
            self.totals.counts.add(done.counts)
            self.totals.version = done.version
        self.totals.reasons.update(done.reasons)

    def _refuse(self, path: str, stamp: Stamp, error: UserError) -> None:
        """Quarantine a whole file as one row; a second call adds no row.

        Raises:
            UserError: the spec limits `quarantine`, and the file is not a changed file whose former rows have landed.
        """
        reason = error.message.removeprefix(f"{path}: ")
        spec = self.files.spec
        if spec.quarantine is not None and not isinstance(error, ChangedFile):
            raise UserError(f"{path}: {reason}; quarantine.fail_above allows no whole file", INPUT_ERROR)
        file = read_file_state(path, build_salt(spec, path))
        keep_whole_file(self.files.warehouse, spec.name, file, reason)
        self.inbox.notes.note(path, stamp, REFUSED, {"reason": reason})
        self.totals.refused += 1
        print_note(f"warning: {path}: {reason}; the whole file is in quarantine")


def run(settings: Settings, spec: ModelSpec, inputs: list[str], seconds: float, changed: str) -> Report:
    """Scan folders every `seconds` seconds, and land new files until SIGTERM.

    Raises:
        UserError: an input is not a folder, another process lands the model's files, or `FolderLanding.take_all` fails.
    """
    folders = [Path(one).expanduser().absolute() for one in inputs]
    for folder in folders:
        if not folder.is_dir():
            raise UserError(
                f"{folder}: is not a folder; with --trigger give the folders in which files arrive"
            )
    began = time.monotonic()
    title = f"ingest {spec.name}"
    with (
        stream_lock(settings.warehouse, title.replace(" ", "-")),
        stop_signal() as stop,
        closing(Workers(settings.master)) as workers,
    ):
        warehouse = Tables(settings.warehouse)
        notes = Notes(warehouse.files(f"_folders/{spec.name}"))
        files = FileLanding(warehouse, spec, changed, workers=workers)
        landing = FolderLanding(files, Inbox(folders, notes, list_endings(spec)))
        with Progress(title, None, settings.quiet, "file") as progress:
            while not stop.is_set():
                ready = landing.inbox.ready(time.monotonic())
                while ready and not stop.is_set():
                    some, ready = ready[:AT_ONCE], ready[AT_ONCE:]
                    landing.take_all(some)
                    progress.advance(len(some), f"{landing.totals.counts.rows:,} rows")
                stop.wait(seconds)
    return _report(spec, landing.totals, time.monotonic() - began)


def _report(spec: ModelSpec, totals: WatchTotals, seconds: float) -> Report:
    counts, reasons = totals.counts, totals.reasons
    lines = [
        f"landed {format_count(counts.rows, 'row')} of {format_count(totals.files, 'file')} for {spec.name}"
    ]
    lines += describe_rows(spec, counts, reasons, [counts.span], in_parts=counts.parts > totals.files)
    if totals.refused:
        lines.append(f"quarantined {format_count(totals.refused, 'whole file')}")
    return Report(
        lines,
        {
            "model": spec.name,
            "files_landed": totals.files,
            "files_refused": totals.refused,
            **build_row_data(counts, reasons),
            "version": totals.version,
            "seconds": seconds,
        },
    )
