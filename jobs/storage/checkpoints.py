"""Read a streaming query's progress from its checkpoint. Only Spark writes to checkpoints."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from shlex import quote
from typing import Any

from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.faults import find_fault
from jobs.core.settings import find_local_path
from jobs.storage.files import open_files
from jobs.storage.positions import (
    KAFKA,
    VERSION,
    Place,
    build_delta_position,
    convert_offset,
    is_whole,
    rank_of,
    to_position,
)
from jobs.storage.warehouse import Tables

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints of all queries."""
_SCHEMAS = "state/0/_stateSchema/default"
"""Folder in which Spark stores the types of the state variables."""
_STATES_AS_BYTES = '{"name":"states","type":"binary"'


@dataclass(frozen=True, slots=True)
class Progressed:
    """The progress that a checkpoint records.

    batch: the last committed micro-batch. version: the latest version of the measurements table that is completely
    processed. partial: whether some files of the next version are processed, too. For a topic, version is the sum of
    all offsets (`positions.rank`).
    """

    batch: int
    version: int
    partial: bool


def checkpoint_of(query: str) -> str:
    """Return the path of a query's checkpoint below the warehouse's root."""
    return f"{CHECKPOINTS}/{query}"


class Checkpoint:
    """The folder of a checkpoint, local or remote."""

    def __init__(self, warehouse: Tables, name: str) -> None:
        """Open a checkpoint by its path below the warehouse's root."""
        self.path = warehouse.path(name)
        self.root, self.name = warehouse.root, name
        self._files = warehouse.open_spark_files(name)

    def find_last_commit(self) -> int | None:
        """Return the last committed micro-batch, or None before the first commit."""
        return max(self._numbers("commits"), default=None)

    def find_last_planned(self) -> int | None:
        """Return the last micro-batch whose offsets are fixed; the micro-batch may not be committed yet."""
        return max(self._numbers("offsets"), default=None)

    def find_progress(self) -> Progressed | None:
        """Return the progress after the last committed micro-batch, or None before the first commit."""
        batch = self.find_last_commit()
        if batch is None:
            return None
        place = self.place(batch)
        return Progressed(batch, rank_of(place), not is_whole(place))

    def position(self, batch: int, start: Mapping[str, Any]) -> dict[str, Any]:
        """Return the position at the end of a micro-batch of a stream that began at `start`.

        If the micro-batch ends within a version, the position is the previous version. Spark's offsets in a topic do
        not contain the topic's id, so the id in `start` is used.
        """
        offset = self.offset(batch)
        place = convert_offset(offset)
        if VERSION in place:
            return build_delta_position(start["table"], place[VERSION], offset["reservoirId"])
        (topic,) = offset
        return to_position(place, {"source": KAFKA, "topic": topic, "topic_id": start.get("topic_id")})

    def find_touched_version(self, batch: int) -> int:
        """Return the latest version of the measurements table from which the micro-batches up to `batch` read rows."""
        place = self.place(batch)
        return place[VERSION] + (0 if is_whole(place) else 1)

    def place(self, batch: int) -> Place:
        """Return the place in the source at the end of a micro-batch, which may be within a version.

        Raises:
            UserError: the offsets are missing, unreadable or damaged.
        """
        return convert_offset(self.offset(batch))

    def read_query_id(self) -> str | None:
        """Return the id that Spark gave the query, or None if the query never started."""
        return json.loads(self._read("metadata"))["id"] if self._files.exists("metadata") else None

    def settings(self) -> dict[str, str]:
        """Return the settings that Spark restores from the checkpoint in place of the session's settings.

        The mapping is empty before the first micro-batch.
        """
        batch = self.find_last_planned()
        return {} if batch is None else json.loads(self._lines(batch)[1]).get("conf") or {}

    def has_states_of_format_1(self) -> bool:
        """Return whether the states have the format of releases before 0.3.0 (`STATE_FORMAT`).

        In that format the last commit does not name the attempt whose states are valid.
        """
        batch = self.find_last_commit()
        if batch is None:
            return False
        return "stateUniqueIds" not in json.loads(self._read(f"commits/{batch}").split("\n", 1)[1])

    def has_text_values(self) -> bool:
        """Return whether the values of the state are text, as in every new checkpoint (`jobs.state.spark_values`)."""
        if not self._files.exists(_SCHEMAS):
            return True
        return not any(
            _STATES_AS_BYTES in self._read(f"{_SCHEMAS}/{name}") for name in self._files.names(_SCHEMAS)
        )

    def find_damage(self) -> str | None:
        """Return a description of damage in the files from which Spark restarts, or None if there is no damage.

        Spark writes the offsets of a micro-batch first and its commit last, so at most one micro-batch has offsets but
        no commit.
        """
        planned, committed = self.find_last_planned(), self.find_last_commit()
        if planned is None and committed is None:
            return None
        done = -1 if committed is None else committed
        if planned is None or planned < done:
            return f"micro-batch {committed} is committed, and offsets/{committed} is missing"
        if planned > done + 1:
            return f"micro-batch {planned} is planned, and commits/{planned - 1} is missing"
        try:
            for batch in {planned, max(done, 0)}:
                self.offset(batch)
            if committed is not None and not self._read(f"commits/{committed}").startswith("v"):
                return f"commits/{committed} is cut short"
        except UserError as error:
            return error.message
        return None

    def find_fault(self) -> str | None:
        """Return a sentence about the first part of a local checkpoint that this user may not read or change, or None.

        Spark reports such a part as damaged or missing.
        """
        for place, _, files in os.walk(self.path):
            modes = {place: os.R_OK | os.W_OK | os.X_OK, **{f"{place}/{name}": os.R_OK for name in files}}
            for path, mode in modes.items():
                if not os.access(path, mode):
                    number = errno.EROFS if os.statvfs(place).f_flag & os.ST_RDONLY else errno.EACCES
                    return find_fault(OSError(number, os.strerror(number), path))
        return None

    def find_former_root(self) -> str | None:
        """Return the root of the warehouse in which Spark wrote the checkpoint, if the files are no longer there.

        A checkpoint contains absolute paths to the files with the types of its state variables. Spark looks for these
        files only at these paths.
        """
        for path in self._list_schema_files():
            folder, _, name = path.rpartition("/")
            root, found, _ = path.rpartition(f"/{self.name}/state/")
            if found and root != self.root and not open_files(folder).exists(name):
                return root
        return None

    def refuse_moved(self, otherwise: str = "") -> None:
        """Refuse a checkpoint with paths into another warehouse before Spark makes folders there.

        otherwise: end of the error message, which offers the user an alternative.

        Raises:
            UserError: the warehouse was moved.
        """
        old = self.find_former_root()
        if old is None:
            return
        local = find_local_path(self.root)
        way = f"copy the warehouse back to {old}"
        if local is not None and find_local_path(old) is not None:
            way = f"let the old place lead to the new one: `ln -s {quote(str(local))} {quote(old)}`"
        raise UserError(
            f"the warehouse was moved from {old} to {self.root}, and Spark looks for files of {self.name} at the old "
            f"place: {way}{otherwise}",
            RUN_FAILED,
        )

    def _list_schema_files(self) -> list[str]:
        """Return the files with the types of state variables that the newest micro-batch refers to."""
        found: list[str] = []
        for operator in self._files.names("state"):
            folder = f"state/{operator}/_metadata/v2"
            newest = max(self._numbers(folder), default=None)
            if newest is None:
                continue  # an operator without state variables, or a checkpoint of an early release
            try:
                about = json.loads(self._read(f"{folder}/{newest}").split("\n", 1)[1])
                found += [path for one in about["stateStoreInfo"] for path in one["stateSchemaFilePaths"]]
            except (UserError, ValueError, LookupError, TypeError):
                continue  # Spark reports the damage
        return [re.sub("^file:/+", "/", path) for path in found]

    def commits(self) -> list[int]:
        """Return the committed micro-batches that Spark has not yet removed from the checkpoint, oldest first."""
        return self._numbers("commits")

    def has(self, batch: int) -> bool:
        """Return whether a micro-batch is committed and its offsets are still in the checkpoint."""
        return all(self._files.exists(f"{folder}/{batch}") for folder in ("commits", "offsets"))

    def committed_at(self, batch: int) -> datetime:
        """Return the time when a micro-batch was committed."""
        return self._files.read_modified_time(f"commits/{batch}")

    def ends_with(self, batch: int) -> int | None:
        """Return `Progressed.version` at the end of a micro-batch, or None if the micro-batch ends within a version."""
        place = self.place(batch)
        return rank_of(place) if is_whole(place) else None

    def plan(self, batch: int) -> str | None:
        """Return the plan (offsets file) of a micro-batch, or None if Spark has removed the plan.

        The plan contains a time and the offsets. A repeated micro-batch has the same plan as at first, and different
        micro-batches always have different plans.
        """
        name = f"offsets/{batch}"
        return self._read(name) if self._files.exists(name) else None

    def offset(self, batch: int, source: int = 0) -> dict[str, Any]:
        """Return the offset at the end of a micro-batch in the source with the given number, counted from 0.

        Raises:
            UserError: the file is missing, unreadable or damaged.
        """
        try:
            return json.loads(self._lines(batch)[2 + source])
        except ValueError:
            raise UserError(f"offsets/{batch} is damaged", RUN_FAILED) from None

    def sources(self) -> int | None:
        """Return the number of sources that the query reads, or None before the query's first micro-batch."""
        batch = self.find_last_planned()
        return None if batch is None else len(self._lines(batch)) - 2

    def _lines(self, batch: int) -> list[str]:
        """Return the lines of a micro-batch's offsets file: the format version, metadata, and a line for each source.

        Raises:
            UserError: the file is missing, unreadable or cut short.
        """
        lines = self._read(f"offsets/{batch}").splitlines()
        if len(lines) < 3:
            raise UserError(f"offsets/{batch} is cut short", RUN_FAILED)
        return lines

    def _numbers(self, folder: str) -> list[int]:
        return sorted(int(name) for name in self._files.names(folder) if name.isdigit())

    def _read(self, name: str) -> str:
        try:
            content = self._files.read(name)
        except OSError as error:
            raise UserError(f"{name} cannot be read ({type(error).__name__})", RUN_FAILED) from error
        if content is None:
            raise UserError(f"{name} is missing", RUN_FAILED)
        return content.decode(errors="replace")
