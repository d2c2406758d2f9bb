"""Probe a store before its first use: of writers that create one object at the same moment exactly one must win, and a
listing must show the object at once.

Some stores that speak S3 ignore the condition of a put, or check it only before the write. Two drivers there would
overwrite each other's commits, and rows would be lost silently. After a passed probe a note is written beside the
tables, and later commands only read it. The note contains the store's address, as another address may lead to the same
objects.
"""

from __future__ import annotations

import json
import threading
import uuid
from functools import lru_cache
from typing import NamedTuple, Protocol

from jobs.core import clock
from jobs.core.errors import RUN_FAILED, UserError
from jobs.storage.object_files import ObjectFiles
from jobs.storage.settings import is_in_s3, store

FOLDER = "_store"
NOTE = f"{FOLDER}/probed.json"
WRITERS, ROUNDS = 8, 12
_CONDITION = (
    "does not honour a condition (If-None-Match) as S3 does, "
    "and two commands would overwrite each other's commits"
)
_LISTING = "lists its objects later than S3 does, and a command would go on from an older state than there is"


class Creator(Protocol):
    """A folder in which files can be created once."""

    def create(self, name: str, content: bytes) -> bool: ...
    def read(self, name: str) -> bytes | None: ...
    def remove(self, name: str) -> None: ...
    def names(self, folder: str) -> list[str]: ...


class ProbeOutcome(NamedTuple):
    """Result of a probe: the number of rounds with one winner each, and the number of writers."""

    rounds: int
    writers: int


def ensure_probed(root: str) -> ProbeOutcome | None:
    """Probe the store of a warehouse unless its note shows an earlier probe; None if there was nothing to probe.

    Raises:
        UserError: the store is not safe, or cannot be reached.
    """
    return _ensure_probed(root, store().address) if is_in_s3(root) else None


@lru_cache(maxsize=8)
def _ensure_probed(root: str, address: str | None) -> ProbeOutcome | None:
    files = ObjectFiles(root)
    kept = files.read(NOTE)
    try:
        if kept is not None and json.loads(kept)["address"] == address:
            return None
    except (ValueError, KeyError, TypeError):
        pass  # another tool left an incomplete note: probe again
    return probe_store(root)


def probe_store(root: str) -> ProbeOutcome:
    """Probe the store of a warehouse, and leave the note.

    Raises:
        UserError: the store is not safe, or cannot be reached.
    """
    files = ObjectFiles(root)
    found = run_creation_race(files, root)
    note = {"address": store().address, "at": clock.now().isoformat(), **found._asdict()}
    files.write(NOTE, json.dumps(note).encode())
    return found


def run_creation_race(files: Creator, root: str) -> ProbeOutcome:
    """Let several writers create one file at the same moment, in several rounds.

    Raises:
        UserError: a round had no winner or several, or the file is not the winner's, or is not listed.
    """
    run = uuid.uuid4().hex
    for number in range(ROUNDS):
        name = f"{FOLDER}/probe-{run}-{number}"
        try:
            winners = _round(files, name)
            content, listed = files.read(name), files.names(FOLDER)
        finally:
            files.remove(name)
        if len(winners) != 1:
            raise _build_refusal(
                root, f"{len(winners)} of {WRITERS} writers created the same object at the same moment"
            )
        if content != winners[0]:
            raise _build_refusal(root, "an object had another content than its creator wrote")
        if name.removeprefix(f"{FOLDER}/") not in listed:
            raise _build_refusal(root, "an object that had been created was not listed", _LISTING)
    return ProbeOutcome(ROUNDS, WRITERS)


def _round(files: Creator, name: str) -> list[bytes]:
    """Return the contents of the writers whose create call succeeded."""
    start = threading.Barrier(WRITERS)
    won: list[bytes] = []
    failed: list[Exception] = []

    def write(number: int) -> None:
        content = f"writer {number}".encode()
        try:
            start.wait()
            if files.create(name, content):
                won.append(content)
        except Exception as error:  # the caller's thread raises it
            failed.append(error)

    threads = [threading.Thread(target=write, args=(number,), daemon=True) for number in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return won


def _build_refusal(root: str, why: str, so: str = _CONDITION) -> UserError:
    where = store().address or "Amazon S3"
    return UserError(
        f"a warehouse cannot be at {root}: {why}, so the store at {where} {so}. No table was written: use another "
        "store, or a newer release of it, and check it with `kalman-pipeline doctor --warehouse URI`",
        RUN_FAILED,
    )
