"""The measurements as a stream whose rows tasks read, from the Parquet files that the driver has planned.

Spark asks the driver's planner for the offsets and tasks of each micro-batch (`PlannedRows.java`). Each task gets a row
that names its row groups, reads them and packs their rows. The offsets are those of Delta's own source, so a checkpoint
continues with either source. The planner plans only commits that append usual files. At any other commit the query
ends, and the driver starts it again with Delta's source, which reads or refuses the commit and the rest of the run.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.java_gateway import ensure_callback_server_started

from jobs.lineage.generations import find_live
from jobs.snapshots.measurement_files import (
    FileGroup,
    MeasurementTable,
    divide_groups,
    open_measurements,
    pack_groups,
)
from jobs.specs.sections import PRETRAINED
from jobs.state.encoding.packets import ROW_PACKETS, TYPED_ROW_PACKETS
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.table_log import parse_bytes
from jobs.storage.table_rows import list_live_files
from jobs.storage.tables import LATE_COPIES_TABLE, measurements
from jobs.storage.warehouse import Tables, name_commit, parse_actions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from jobs.lineage.generations import DeployedModel, Generation
    from jobs.spark.warehouse import Warehouse
    from jobs.specs.model_spec import ModelSpec
    from jobs.state.encoding.rows import Packer, RowFormat

MOST_FILES = 1_000
"""The number of files of a micro-batch if the spec limits neither files nor bytes, as in Delta's source."""
MOST_LOOKED_AT = 5_000
"""The number of files of a commit up to which the driver looks at each."""
FEW_BYTES = 256 << 20
"""The bytes of files up to which packets and states take Java only seconds (about fifteen million rows)."""
_BASE = -1
"""The index of the place before the first file of a version."""
_UNPLANNED = {
    "metaData": "changes its columns or properties",
    "protocol": "changes its features",
    "cdc": "changes rows",
}
"""Actions of a commit that Delta's source must judge, each with what the commit does."""


_UNPARSED = (ValueError, LookupError, TypeError, AttributeError)
"""Errors of reading JSON that has another form."""


class UnplannedCommit(Exception):
    """Error: a commit must be read, or refused, by Delta's source."""


class AddedFile(NamedTuple):
    """A file that a commit added: its size in bytes, and its row groups."""

    size: int
    groups: list[FileGroup]


class FilePlace(NamedTuple):
    """A place in the table's log: the files of `version` up to `index` are read, and all files of earlier versions."""

    version: int
    index: int


@dataclass
class RowPlanner:
    """Planner of the micro-batches of one query; Spark calls it from the query's thread.

    start: the first version to read. limits: the most files, and the most bytes, of a micro-batch.
    """

    warehouse: Tables
    table: MeasurementTable
    start: int
    limits: tuple[float, float]
    cores: int
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    refusal: str | None = None
    """Why Delta's source must continue, or None."""
    _newest: int | None = None
    """The last version of this run; None if the run also reads versions that are yet to come."""
    _commits: dict[int, list[AddedFile]] = field(default_factory=dict)

    class Java:
        """The interface that py4j gives to Spark's process."""

        implements = ("kalman.stores.PlannedRows$Planner",)

    @property
    def measurements(self) -> str:
        """Return the name of the table."""
        return measurements(self.table.spec.name)

    def begin(self) -> str:
        """Return the offset before the first row of a new query."""
        return self._format(FilePlace(self.start, _BASE))

    def bound(self) -> None:
        """Let the micro-batches of this run end at the newest version."""
        self._newest = self.warehouse.latest_version(self.measurements)

    def advance(self, start: str) -> str:
        """Return the end of the micro-batch that begins at an offset; the same offset if there is nothing to read."""
        try:
            end = self._find_end(self._parse(start))
        except UnplannedCommit as problem:
            self.refusal = str(problem)
            return start
        return self._format(end)

    def plan(self, start: str, end: str) -> str:
        """Return the tasks between two offsets, one a line.

        Raises:
            UnplannedCommit: Delta's source must read these rows. `refusal` says why.
        """
        try:
            groups = list(self._list_groups(self._parse(start), self._parse(end)))
        except UnplannedCommit as problem:
            self.refusal = str(problem)
            raise
        tasks = divide_groups(groups, self.cores)
        return "\n".join(json.dumps([(one.file, one.group) for one in task]) for task in tasks)

    def _find_end(self, start: FilePlace) -> FilePlace:
        """Return the place up to which the next micro-batch reads.

        Raises:
            UnplannedCommit: Delta's source must read the first commit after the start.
        """
        for version in [one for one in self._commits if one < start.version]:
            del self._commits[version]
        files, size = self.limits
        version, index = start
        while self._newest is None or version <= self._newest:
            try:
                added = self._read_commit(version)
                if added is None:
                    self._check_end(version)
                    break
            except UnplannedCommit:
                if version == start.version:
                    raise
                break
            for number in range(index + 1, len(added)):
                if files <= 0 or size <= 0:
                    return FilePlace(version, number - 1)
                files, size = files - 1, size - added[number].size
            version, index = version + 1, _BASE
        return FilePlace(version, index)

    def _check_end(self, version: int) -> None:
        """Check that a version that is not in the log is yet to come.

        Raises:
            UnplannedCommit: the run ends at a later version, the version before is gone, or the next one is there.
        """
        log = self.warehouse.files(f"{self.measurements}/_delta_log")
        gone = version > 0 and not log.exists(name_commit(version - 1))
        missed = log.exists(name_commit(version + 1)) and not log.exists(name_commit(version))
        if self._newest is not None or gone or missed:
            raise UnplannedCommit(f"version {version} of {self.measurements} is no longer in its log")

    def _list_groups(self, start: FilePlace, end: FilePlace) -> Iterator[FileGroup]:
        """Yield the row groups between two places; raises UnplannedCommit."""
        for version in range(start.version, end.version + 1):
            if (version, _BASE) == end:
                return
            added = self._read_commit(version)
            if added is None:
                raise UnplannedCommit(f"version {version} of {self.measurements} is no longer in its log")
            first = start.index + 1 if version == start.version else 0
            last = end.index + 1 if version == end.version else len(added)
            for one in added[first:last]:
                yield from one.groups

    def _read_commit(self, version: int) -> list[AddedFile] | None:
        """Return the files that a commit added, in the order of its log file; None if the version is not in the log.

        Raises:
            UnplannedCommit: the commit does more than add usual files, or copies of late rows may be among its rows.
        """
        if version not in self._commits:
            log = self.warehouse.read_commit(self.measurements, version)
            if log is None:
                return None
            # A replay of late rows makes the table before it appends the copies.
            if self.warehouse.exists(LATE_COPIES_TABLE):
                raise UnplannedCommit("copies of late rows are left out")
            try:
                adds = self._parse_adds(version, log)
                sizes, names = [int(one["size"]) for one in adds], [unquote(one["path"]) for one in adds]
            except _UNPARSED as error:
                raise UnplannedCommit(f"version {version} of {self.measurements} cannot be parsed") from error
            found = self.table.list_groups(names)
            if isinstance(found, str):
                raise UnplannedCommit(f"version {version} of {self.measurements}: {found}")
            self._commits[version] = [AddedFile(*one) for one in zip(sizes, found, strict=True)]
        return self._commits[version]

    def _parse_adds(self, version: int, log: bytes) -> list[dict[str, Any]]:
        """Return the actions of a commit that add files with new rows; raises UnplannedCommit."""
        adds = []
        for one in parse_actions(log):
            for kind, action in one.items():
                what = _UNPLANNED.get(kind)
                if kind == "remove" and action.get("dataChange"):
                    what = "changes rows"
                if kind == "add" and action.get("deletionVector"):
                    what = "has deletion vectors"
                if kind == "add" and _is_elsewhere(action["path"]):
                    what = "names files of another place"
                if what is not None:
                    raise UnplannedCommit(f"version {version} of {self.measurements} {what}")
                if kind == "add" and action.get("dataChange"):
                    adds.append(action)
        if len(adds) > MOST_LOOKED_AT:
            raise UnplannedCommit(f"version {version} of {self.measurements} has {len(adds):,} files")
        return adds

    def _parse(self, offset: str) -> FilePlace:
        """Return the place of an offset; raises UnplannedCommit."""
        try:
            found = json.loads(offset)
            if found["reservoirId"] == self.table.identity and not found["isStartingVersion"]:
                return FilePlace(int(found["reservoirVersion"]), int(found["index"]))
        except _UNPARSED as error:
            raise UnplannedCommit("the checkpoint's offsets cannot be parsed") from error
        raise UnplannedCommit(f"{self.measurements} is not the table that the checkpoint names")

    def _format(self, place: FilePlace) -> str:
        """Return a place as Delta's source writes it."""
        offset = {
            "sourceVersion": 1,
            "reservoirId": self.table.identity,
            "reservoirVersion": place.version,
            "index": place.index,
            "isStartingVersion": False,
        }
        return json.dumps(offset, separators=(",", ":"))


def _is_elsewhere(path: str) -> bool:
    """Return whether the path of a file leads out of its table."""
    return "://" in path or path.startswith(("/", "file:")) or ".." in path.split("/")


def choose_planner(
    model: DeployedModel[Warehouse], generation: Generation, imports_keys: bool
) -> RowPlanner | None:
    """Return the planner of a generation's rows; None if Spark must read them."""
    warehouse, spec = model.warehouse, model.spec
    if generation.topic is not None or imports_keys or not _is_read_as_landed(spec):
        return None
    table = measurements(spec.name)
    opened = open_measurements(warehouse, spec, table, warehouse.latest_version(table))
    if isinstance(opened, str):
        return None
    files, size = spec.stream.max_files_per_batch, parse_bytes(spec.stream.max_bytes_per_batch)
    most = MOST_FILES if size is None else math.inf
    limits = (most if files is None else files, math.inf if size is None else size)
    cores = warehouse.spark.sparkContext.defaultParallelism
    return RowPlanner(warehouse, opened[0], generation.start_version + 1, limits, cores)


def _is_read_as_landed(spec: ModelSpec) -> bool:
    """Return whether a stream of measurements needs no more than the rows as they landed."""
    migrates = spec.migrate is not None and spec.migrate.keys is not None
    return not migrates and spec.inputs is None and spec.stream.new_keys != PRETRAINED


def has_nothing_ahead(model: DeployedModel[Tables], generation: Generation) -> bool:
    """Return whether a run of a generation to the newest row would certainly find no work."""
    warehouse, checkpoint = model.warehouse, Checkpoint(model.warehouse, generation.checkpoint)
    if generation.topic is not None or not _is_read_as_landed(model.spec):
        return False
    newest, planned = warehouse.latest_version(measurements(model.name)), checkpoint.find_last_planned()
    if planned is None:
        return newest <= generation.start_version
    if checkpoint.find_damage() is not None or planned != checkpoint.find_last_commit():
        return False
    return checkpoint.ends_with(planned) == newest


def has_many_rows_ahead(warehouse: Tables, spec: ModelSpec) -> bool:
    """Return whether a run to the newest row moves so much through Java that its optimising compiler pays off."""
    table = measurements(spec.name)
    if not _is_read_as_landed(spec) or not warehouse.exists(table):
        return True
    opened = open_measurements(warehouse, spec, table, warehouse.latest_version(table))
    if isinstance(opened, str):
        return True
    live = find_live(warehouse, spec.name)
    if live is None:
        return sum(list_live_files(opened[1])["size_bytes"].to_pylist()) > FEW_BYTES
    checkpoint = Checkpoint(warehouse, live.checkpoint)
    if checkpoint.find_damage() is not None:
        return True  # the start of the stream reports the damage
    progress = checkpoint.find_progress()
    version, size = (live.start_version if progress is None else progress.version) + 1, 0
    while size <= FEW_BYTES and (log := warehouse.read_commit(table, version)) is not None:
        try:
            size += sum(int(action["add"]["size"]) for action in parse_actions(log) if "add" in action)
        except _UNPARSED:
            return True
        version += 1
    return size > FEW_BYTES


def read_planned_rows(
    spark: SparkSession, planner: RowPlanner, fmt: RowFormat, packer: Packer, typed: bool
) -> DataFrame:
    """Return the packets of the rows that a planner plans as a stream; `typed` packets have a kind."""
    gateway: Any = spark.sparkContext._gateway
    ensure_callback_server_started(gateway)
    gateway.jvm.kalman.stores.PlannedRows.register(planner.name, planner)
    folder = planner.table.folder

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for task in batch.column(0).to_pylist():
                groups = [FileGroup(file, group, 0, 0, 0, 0) for file, group in json.loads(task)]
                yield from pack_groups(folder, groups, fmt, packer)

    tasks = spark.readStream.format("kalman.stores.PlannedRows").option("planner", planner.name).load()
    return tasks.mapInArrow(work, TYPED_ROW_PACKETS if typed else ROW_PACKETS)


def forget_planner(spark: SparkSession, planner: RowPlanner) -> None:
    """Release a planner whose query has ended."""
    jvm: Any = spark.sparkContext._jvm
    with suppress(Py4JError):  # Java may be what failed
        jvm.kalman.stores.PlannedRows.remove(planner.name)
