"""The rows that a run estimates: the measurements at a version, or any table with the model's columns."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from jobs.batch.snapshot_ids import TableVersion
from jobs.core.errors import UserError, extract_first_line
from jobs.core.input_files import find_files
from jobs.core.roots import find_local_path
from jobs.landing.reading import list_endings, read_spec_schema
from jobs.landing.sources.checked_frames import read_checked_files, read_checked_table, read_table_schema
from jobs.landing.values.keys import derive_key_types
from jobs.lineage import replayed_late_rows
from jobs.lineage.model import DeployedModel
from jobs.spark.read_files import convert_path
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.storage.positions import check_version
from jobs.storage.tables import need_columns, need_measurements
from jobs.storage.warehouse import find_home

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class HistoryRows(NamedTuple):
    """What a run reads.

    frame: with the columns of the spec, one of them the time as a timestamp; of rows that have not landed also the
    reason why one is rejected, and the row; name: of the table; version: of a Delta table, None for files; identity:
    what tells this content from every other; measurements: it is the model's own table of measurements
    """

    frame: DataFrame
    name: str
    version: int | None
    identity: list[Any]
    measurements: bool


def read_history_rows(model: DeployedModel[Warehouse], given: str | None, version: int | None) -> HistoryRows:
    """Return the rows of the measurements, or of the table or folder of files that was `given`.

    Raises:
        UserError: there is no such table, version or column, or a column has a type that cannot be used.
    """
    warehouse = model.warehouse
    if given is not None:
        return _read_given_rows(model, given, version)
    table = need_measurements(warehouse, model.name)
    need_columns(warehouse, model.name, model.spec.columns)
    number = check_version(warehouse, table, version)
    rows = replayed_late_rows.drop_late_copies(warehouse, warehouse.read(table, number)).select(
        *model.spec.columns
    )
    return HistoryRows(
        rows, table, number, [table, number, *TableVersion.of(warehouse, table, number).ids], True
    )


def _read_given_rows(model: DeployedModel[Warehouse], given: str, version: int | None) -> HistoryRows:
    warehouse, spec = model.warehouse, model.spec
    home, table = find_home(warehouse, given)
    if home.exists(table):
        number = check_version(home, table, version)
        identity: list[Any] = [given, number, *TableVersion.of(home, table, number).ids]
        return HistoryRows(_check_rows(home.read(table, number), spec, given), given, number, identity, False)
    if version is not None:
        raise UserError(f"--to-version is for Delta tables, and {given} is none: leave it out")
    path = home.path(table)
    place = find_local_path(path)
    if place is None and not Path(given).exists():
        rows, listed = _read_remote_files(warehouse, path, given)
        return HistoryRows(
            _check_rows(rows, spec, given), given, None, [given, _compute_digest(listed)], False
        )
    files = _list_local_files(
        spec, str(place) if place is not None and place.exists() else given, warehouse.root
    )
    schemas = [read_spec_schema(spec, file) for file in files]
    rows = read_checked_files(warehouse.spark, spec, files, derive_key_types(spec.naming_columns, schemas[0]))
    return HistoryRows(rows, given, None, [given, _compute_digest(_list_stamps(files))], False)


def _check_rows(rows: DataFrame, spec: ModelSpec, given: str) -> DataFrame:
    what = f"--input {given}"
    types = derive_key_types(spec.naming_columns, read_table_schema(spec, rows, what))
    return read_checked_table(rows, spec, types, what)


def _list_local_files(spec: ModelSpec, input: str, root: str) -> list[str]:
    """Return the files that an input names; those of a folder with all folders in it, as Spark writes them.

    Raises:
        UserError: there is none.
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
    """Return the rows of Parquet files in a store, which Spark alone can read, and what tells their content."""
    spark = warehouse.spark
    try:
        rows = spark.read.parquet(convert_path(spark, path))
    except (PySparkException, Py4JJavaError) as error:
        raise UserError(
            f"--input {given}: there is no Delta table and no Parquet file at {path}: {extract_first_line(error)}"
        ) from error
    # This format lists the files; their content is not read.
    files = (
        spark.read.format("binaryFile").option("recursiveFileLookup", "true").load(convert_path(spark, path))
    )
    listed = files.select(*(F.col(name).cast("string") for name in ("path", "length", "modificationTime")))
    return rows, ["|".join(map(str, one)) for one in listed.collect()]
