"""Read what a stream's checkpoint says of its progress. Nothing here writes to one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from py4j.protocol import Py4JJavaError

from jobs.core.errors import RUN_FAILED, UserError
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.positions import delta_position, offsets_of, topic_position

_SCHEMAS = "state/0/_stateSchema/default"
"""Where Spark keeps the types of the state's variables."""
_STATES_AS_BYTES = '{"name":"states","type":"binary"'

_BASE_INDEX = -1  # Delta's index of "nothing of this version yet"; versions before it are done


@dataclass(frozen=True, slots=True)
class Progressed:
    """How far a checkpoint has come.

    batch: the last committed micro-batch; version: all of the measurements table's versions up to it are done;
    partial: some files of the next one, too. Of a topic, version is the sum of its offsets (`positions.rank`).
    """

    batch: int
    version: int
    partial: bool


class Checkpoint:
    """A checkpoint folder, local or remote, through the file system that Spark uses for it."""

    def __init__(self, warehouse: Warehouse, name: str) -> None:
        """Look at the checkpoint that a generation's row names, below the warehouse's root."""
        self.path = warehouse.path(name)
        self._jvm: Any = warehouse.spark._jvm
        root = self._jvm.org.apache.hadoop.fs.Path(self.path)
        session: Any = warehouse.spark._jsparkSession
        self._files: Any = root.getFileSystem(session.sessionState().newHadoopConf())

    def last_commit(self) -> int | None:
        """Return the last committed micro-batch, or None if none has been."""
        return self._last("commits")

    def last_planned(self) -> int | None:
        """Return the last micro-batch whose offsets are fixed; it may not be committed."""
        return self._last("offsets")

    def progressed(self) -> Progressed | None:
        """Return how far the last committed micro-batch has come, or None if none has been."""
        batch = self.last_commit()
        if batch is None:
            return None
        offset = self.offset(batch)
        if not _of_delta(offset):
            return Progressed(batch, sum(offsets_of(_of_topic(offset)).values()), False)
        version, index = int(offset["reservoirVersion"]), int(offset["index"])
        return Progressed(batch, version - 1, index > _BASE_INDEX)

    def position(self, batch: int, start: Mapping[str, Any]) -> dict[str, Any]:
        """Return the position that a micro-batch ends with, of a stream that began at `start`.

        Of one that ends within a version it is the version before.
        """
        offset = self.offset(batch)
        if _of_delta(offset):
            return delta_position(start["table"], int(offset["reservoirVersion"]) - 1, offset["reservoirId"])
        return _of_topic(offset)

    def query_id(self) -> str | None:
        """Return the id that Spark gave the query, or None before its first start."""
        if not self._files.exists(self._jvm.org.apache.hadoop.fs.Path(self.path, "metadata")):
            return None
        return json.loads(self._read("metadata"))["id"]

    def settings(self) -> dict[str, str]:
        """Return the settings that Spark goes on with, whatever the session says; none before the first micro-batch."""
        batch = self.last_planned()
        return {} if batch is None else json.loads(self._lines(batch)[1]).get("conf") or {}

    def keeps_text(self) -> bool:
        """Tell if the state's values are text, as they are in every checkpoint that begins now (`jobs.state.text_codec`)."""
        folder = self._jvm.org.apache.hadoop.fs.Path(self.path, _SCHEMAS)
        if not self._files.exists(folder):
            return True
        names = [status.getPath().getName() for status in self._files.listStatus(folder)]
        return not any(_STATES_AS_BYTES in self._read(f"{_SCHEMAS}/{name}") for name in names)

    def damage(self) -> str | None:
        """Return what is wrong with what Spark goes on from, None if nothing is.

        Of a micro-batch first the offsets are written, then, when all is done, the commit; one may be under way.
        """
        planned, committed = self.last_planned(), self.last_commit()
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

    def commits(self) -> list[int]:
        """Return the micro-batches whose commits are still there, oldest first."""
        return self._numbers("commits")

    def has(self, batch: int) -> bool:
        """Tell if a micro-batch is committed and its offsets are still there."""
        return all(
            self._files.exists(self._jvm.org.apache.hadoop.fs.Path(self.path, f"{folder}/{batch}"))
            for folder in ("commits", "offsets")
        )

    def committed_at(self, batch: int) -> datetime:
        """Return when a micro-batch was committed."""
        path = self._jvm.org.apache.hadoop.fs.Path(self.path, f"commits/{batch}")
        return datetime.fromtimestamp(self._files.getFileStatus(path).getModificationTime() / 1000, UTC)

    def ends_with(self, batch: int) -> int | None:
        """Return how far a micro-batch has come, as `progressed` says it; None if it ends within a version."""
        offset = self.offset(batch)
        if not _of_delta(offset):
            return sum(offsets_of(_of_topic(offset)).values())
        return int(offset["reservoirVersion"]) - 1 if int(offset["index"]) <= _BASE_INDEX else None

    def offset(self, batch: int) -> dict[str, Any]:
        """Return the source's offset at the end of a micro-batch."""
        try:
            return json.loads(self._lines(batch)[2])
        except ValueError:
            raise UserError(f"offsets/{batch} is damaged", RUN_FAILED) from None

    def sources(self) -> int | None:
        """Return how many sources the query reads; None before its first micro-batch."""
        batch = self.last_planned()
        return None if batch is None else len(self._lines(batch)) - 2

    def _lines(self, batch: int) -> list[str]:
        """Return what is planned for a micro-batch: the version of the log, its metadata, then a line a source.

        Raises:
            UserError: it cannot be read.
        """
        lines = self._read(f"offsets/{batch}").splitlines()
        if len(lines) < 3:
            raise UserError(f"offsets/{batch} is cut short", RUN_FAILED)
        return lines

    def _last(self, folder: str) -> int | None:
        return max(self._numbers(folder), default=None)

    def _numbers(self, folder: str) -> list[int]:
        path = self._jvm.org.apache.hadoop.fs.Path(self.path, folder)
        if not self._files.exists(path):
            return []
        names = [status.getPath().getName() for status in self._files.listStatus(path)]
        return sorted(int(name) for name in names if name.isdigit())

    def _read(self, name: str) -> str:
        try:
            stream = self._files.open(self._jvm.org.apache.hadoop.fs.Path(self.path, name))
            try:
                return self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8")
            finally:
                stream.close()
        except Py4JJavaError as error:
            why = str(error.java_exception.getClass().getSimpleName())
            raise UserError(f"{name} cannot be read ({why})", RUN_FAILED) from error


def _of_delta(offset: Mapping[str, Any]) -> bool:
    return "reservoirVersion" in offset


def _of_topic(offset: Mapping[str, Any]) -> dict[str, Any]:
    ((topic, offsets),) = offset.items()
    return topic_position(topic, {int(number): int(place) for number, place in offsets.items()})
