"""The input of a run over history: the rows at a version, and the states and parameters from which the run starts."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from jobs.batch.batch_filter import Interval
from jobs.batch.file_rows import HistoryFiles, RowSource, choose_files
from jobs.batch.snapshot_ids import TableVersion
from jobs.core.errors import UserError, extract_first_line
from jobs.core.input_files import find_files
from jobs.core.settings import find_local_path
from jobs.landing.reading import list_endings, read_spec_schema
from jobs.landing.sources.checked_frames import read_checked_files, read_checked_table, read_table_schema
from jobs.landing.values.keys import derive_key_types
from jobs.lineage import replayed_late_rows
from jobs.lineage.generations import DeployedModel
from jobs.snapshots import manifests
from jobs.snapshots.learned import NONE
from jobs.snapshots.manifests import GOOD, Manifest
from jobs.spark.foreign_files import read_own_files
from jobs.spark.hadoop_files import convert_path
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.storage.positions import DELTA, check_version, is_in_table, read_commits, to_micros
from jobs.storage.tables import need_columns, need_measurements
from jobs.storage.warehouse import find_home

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.lineage.inputs_table import Version
    from jobs.storage.positions import Commit

_CHECKED = "rows that have not landed are checked first"


class HistoryRows(NamedTuple):
    """The rows that a run reads.

    source: the columns of the spec, with the time as a timestamp; rows that have not landed also have a column with the
        reason to reject the row, and a column with the row.
    name: the name of the table.
    version: the version of a Delta table; None for files.
    identity: values that identify this content.
    measurements: whether this is the model's own table of measurements.
    """

    source: RowSource
    name: str
    version: int | None
    identity: list[Any]
    measurements: bool

    @property
    def frame(self) -> DataFrame:
        """Return the rows as Spark's reader returns them."""
        return self.source.frame


def read_history_rows(model: DeployedModel[Warehouse], given: str | None, version: int | None) -> HistoryRows:
    """Return the rows of the model's measurements or, if `given`, of this table or folder of files.

    Raises:
        UserError: the table, the version or a column does not exist, or a column has a type that cannot be used.
    """
    warehouse = model.warehouse
    if given is not None:
        return _read_given_rows(model, given, version)
    table = need_measurements(warehouse, model.name)
    need_columns(warehouse, model.name, model.spec.columns)
    number = check_version(warehouse, table, version)
    identity = [table, number, *TableVersion.of(warehouse, table, number).ids]
    return HistoryRows(read_measurements(model, table, number), table, number, identity, True)


def read_measurements(model: DeployedModel[Warehouse], table: str, version: int) -> RowSource:
    """Return the rows of a version of the model's measurements, without copies of late rows."""
    warehouse, spec = model.warehouse, model.spec

    def read() -> DataFrame:
        rows = replayed_late_rows.drop_late_copies(warehouse, warehouse.read(table, version))
        return rows.select(*spec.columns)

    def choose() -> HistoryFiles | str:
        if spec.inputs is not None:
            return "the inputs of the keys are joined"
        return choose_files(warehouse, spec, table, version)

    return RowSource(warehouse, read, choose)


def _read_given_rows(model: DeployedModel[Warehouse], given: str, version: int | None) -> HistoryRows:
    warehouse, spec = model.warehouse, model.spec
    home, table = find_home(warehouse, given)
    if home.exists(table):
        number = check_version(home, table, version)
        identity: list[Any] = [given, number, *TableVersion.of(home, table, number).ids]
        clones = spec.source is not None and spec.source.clones and spec.source.table == given
        rows = _check_rows(read_own_files(home, table, f"--input {given}", clones, number), spec, given)
        return HistoryRows(RowSource.of_frame(warehouse, rows, _CHECKED), given, number, identity, False)
    if version is not None:
        raise UserError(f"--to-version is for Delta tables, and {given} is none: leave it out")
    path = home.path(table)
    place = find_local_path(path)
    if place is None and not Path(given).exists():
        rows, listed = _read_remote_files(warehouse, path, given)
        rows = RowSource.of_frame(warehouse, _check_rows(rows, spec, given), _CHECKED)
        return HistoryRows(rows, given, None, [given, _compute_digest(listed)], False)
    files = _list_local_files(
        spec, str(place) if place is not None and place.exists() else given, warehouse.root
    )
    schemas = [read_spec_schema(spec, file) for file in files]
    rows = read_checked_files(warehouse.spark, spec, files, derive_key_types(spec.naming_columns, schemas[0]))
    source = RowSource.of_frame(warehouse, rows, _CHECKED)
    return HistoryRows(source, given, None, [given, _compute_digest(_list_stamps(files))], False)


def _check_rows(rows: DataFrame, spec: ModelSpec, given: str) -> DataFrame:
    what = f"--input {given}"
    types = derive_key_types(spec.naming_columns, read_table_schema(spec, rows, what))
    return read_checked_table(rows, spec, types, what)


def _list_local_files(spec: ModelSpec, input: str, root: str) -> list[str]:
    """Return the files that an input names; for a folder, all files below it, in the layout in which Spark writes them.

    Raises:
        UserError: there is no such file.
    """
    endings, folder = list_endings(spec), Path(input)
    try:
        if not folder.is_dir() or folder.name.lower().endswith(endings):
            return find_files([input], endings)
        patterns = [f"{glob.escape(input)}/**/*{ending}" for ending in endings]
        some = [one for one in patterns if next(glob.iglob(one, recursive=True), None) is not None]
        found = find_files(some or [input], endings)
    except UserError as error:
        raise UserError(f"--input: there is no Delta table of this name in {root}, and {error}") from error
    within = ((one, Path(one).relative_to(folder.absolute()).parts) for one in found)
    return sorted(
        one
        for one, names in within
        if not any(name[0] == "_" or name.lower().endswith(endings) for name in names[:-1])
    )


def _list_stamps(files: Sequence[str]) -> list[str]:
    """Return path, size and time of the last change of each file."""
    paths = [one for file in files for one in (Path(file), *Path(file).rglob("*")) if one.is_file()]
    stats = [(path, path.stat()) for path in paths]
    return [f"{path}|{stat.st_size}|{stat.st_mtime_ns}" for path, stat in stats]


def _compute_digest(texts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(sorted(texts)).encode()).hexdigest()


def _read_remote_files(warehouse: Warehouse, path: str, given: str) -> tuple[DataFrame, list[str]]:
    """Return the rows of Parquet files in a remote store, which only Spark can read, and a text that identifies each
    file.
    """
    spark = warehouse.spark
    try:
        rows = spark.read.parquet(convert_path(spark, path))
    except (PySparkException, Py4JJavaError) as error:
        raise UserError(
            f"--input {given}: there is no Delta table and no Parquet file at {path}: {extract_first_line(error)}"
        ) from error
    # The format binaryFile lists the files; their content is not read.
    files = (
        spark.read.format("binaryFile").option("recursiveFileLookup", "true").load(convert_path(spark, path))
    )
    listed = files.select(*(F.col(name).cast("string") for name in ("path", "length", "modificationTime")))
    return rows, ["|".join(map(str, one)) for one in listed.collect()]


class HistoryStart(NamedTuple):
    """The snapshot whose parameters a run takes (None means the spec's values), and the time from which it reads rows.

    before: the event time up to which the snapshot's states reflect all rows, and from which rows are read. None means
    that the states are not used and all rows are read.
    """

    manifest: Manifest | None
    before: int | None

    @property
    def parameters(self) -> dict[str, Any]:
        """Return the learned parameters of the snapshot; empty without a snapshot."""
        return {} if self.manifest is None else self.manifest.parameters

    @property
    def identity(self) -> list[Any]:
        """Return values that identify this start."""
        one = self.manifest
        return [None if one is None else [one.snapshot_id, one.checksum], self.before]


class StartRequest(NamedTuple):
    """The rows and interval of a run, and a snapshot (`none`: the spec's values; None: the best snapshot)."""

    rows: HistoryRows
    interval: Interval
    snapshot: str | None
    inputs: Version | None


def find_start(model: DeployedModel[Warehouse], asked: StartRequest) -> HistoryStart:
    """Return the start of a run.

    Raises:
        UserError: the named snapshot does not exist, or belongs to another spec.
    """
    if asked.snapshot == NONE:
        return HistoryStart(None, None)
    fitting = [
        one
        for one in manifests.read_manifests(model.warehouse, model.name)
        if one.status == GOOD and one.fingerprint == model.spec.fingerprint()
    ]
    if asked.snapshot is not None:
        fitting = [one for one in fitting if one.snapshot_id == asked.snapshot]
        if not fitting:
            raise UserError(
                f"--snapshot {asked.snapshot}: model {model.name} has no such snapshot of its spec as it is now: name "
                f"another one, or `none` for the spec's values"
            )
    if not fitting:
        return HistoryStart(None, None)
    clean = _clean(model, asked, fitting)
    if clean:
        before, newest = max(clean, key=lambda pair: (pair[0], pair[1].snapshots_version))
        return HistoryStart(newest, before)
    # As in `filter`, a snapshot from which a stream could start precedes one that only reflects history.
    best = max(fitting, key=attrgetter("preference"))
    return HistoryStart(best, None)


def _clean(
    model: DeployedModel[Warehouse], asked: StartRequest, fitting: list[Manifest]
) -> list[tuple[int, Manifest]]:
    """Return the snapshots whose states reflect exactly the rows before an event time in or before the interval.

    Each snapshot comes with this event time.
    """
    first = asked.interval.first
    if first is None or not asked.rows.measurements or asked.rows.version is None or model.spec.id_columns:
        return []  # an id may repeat one from before the snapshot's end, which the snapshot does not have
    landed = read_commits(model.warehouse, asked.rows.name)
    found = []
    for one in fitting:
        version = _find_batch_version(model, one, asked)
        before = None if version is None else _find_reflected_end(one, landed, version)
        if version is None or before is None or before > first:
            continue
        later = [each for each in landed if version < each.version <= asked.rows.version]
        if all(each.known and (each.first is None or each.first >= before) for each in later):
            found.append((before, one))
    return found


def _find_batch_version(model: DeployedModel[Warehouse], one: Manifest, asked: StartRequest) -> int | None:
    """Return the version of the measurements from which a batch pass made a snapshot; None if no batch pass made it."""
    position = one.position
    if (
        one.generation is not None
        or one.parent is not None
        or one.without_state
        or position["source"] != DELTA
    ):
        return None
    if (
        position["table"] != asked.rows.name
        or position.get("id", asked.rows.identity[2]) != asked.rows.identity[2]
    ):
        return None
    if not is_in_table(model.warehouse, position) or int(position["version"]) > (asked.rows.version or 0):
        return None
    if model.spec.inputs is not None:
        newest, made = asked.inputs, one.inputs
        if newest is None or made is None or any(made.get(k) != v for k, v in newest._asdict().items()):
            return None
    return int(position["version"])


def _find_reflected_end(one: Manifest, landed: list[Commit], version: int) -> int | None:
    """Return the event time such that a snapshot reflects exactly the rows before it; None if it is unknown."""
    if one.cut is not None:
        return to_micros(one.cut)
    if one.waiting is not None and one.waiting.get("rows"):
        return one.waiting["watermark"]
    upto = [each for each in landed if each.version <= version]
    if not upto or upto[0].version != 0 or not all(each.known for each in upto):
        return None
    return max((each.last + 1 for each in upto if each.last is not None), default=None)


class HistoryCounts(NamedTuple):
    """Numbers of rows: in the interval, read before the interval, rejected, and without inputs for their key."""

    rows: int
    before: int
    unfit: int
    without_inputs: int
