"""Read the Delta table of a model's inputs, pin its version for each micro-batch, and join inputs with rows."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark import TaskContext
from pyspark.sql import functions as F

from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.redaction import show_names
from jobs.core.settings import find_local_path
from jobs.lineage.generations import DeployedModel, Generation
from jobs.spark.foreign_files import read_own_files
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding.keys import (
    KeyKind,
    build_identity_arrays,
    build_identity_columns,
    build_key_columns,
    build_key_text,
    match,
    select_sub_kind,
)
from jobs.state.encoding.packets import (
    MISSING_INPUTS,
    Layout,
    PacketColumn,
    Records,
    RowPacket,
    build_packet_batch,
)
from jobs.state.encoding.rows import INPUT_IDENTITY, Packer, RowFormat, parse_records
from jobs.storage.files import LocalFiles
from jobs.storage.object_files import ObjectFiles, is_in_s3
from jobs.storage.warehouse import find_home, name_commit

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


PROPERTY = "kalman.inputs"
"""Local property of a job that has the name of the file."""
MOST_OPEN = 2
"""Number of files that a worker keeps open: the files of the last two micro-batches, whose stages may overlap."""

_open: dict[str, Records] = {}


class Join(NamedTuple):
    """A model's join: the format of rows without inputs, and the default inputs (c,) of keys without a row, or None."""

    rows: RowFormat
    defaults: tuple[float, ...] | None

    @property
    def layout(self) -> Layout:
        """Return the layout of the packet with the table of inputs, which is ordered by route."""
        return build_inputs_layout(self.rows.inputs_key or self.rows.kind, self.rows.inputs)


def build_inputs_layout(kind: KeyKind, inputs: int) -> Layout:
    """Return the layout of a packet of inputs."""
    return Layout((*kind.identity_columns, PacketColumn("u", "<f8", inputs)), text=False)


def join_inputs(packer: Packer, join: Join, typed: bool) -> Packer:
    """Return a function that joins batches of `rows.select_columns` with inputs, and packs them by `packer`.

    The rows whose key has no inputs become packets of the bucket `MISSING_INPUTS`.

    Args:
        packer: function that packs rows in which the inputs are the last numbers.
        join: the model's join.
        typed: whether the packets of the packer have a kind.
    """
    first = len(join.rows.numbers)

    def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        table: Records | None = None
        for batch in batches:
            if batch.num_rows == 0:
                continue
            if table is None:
                table = _load_job_inputs(join.layout)
            u, known = look_up(table, _build_identities(batch, join.rows), join.defaults)
            names = [*batch.schema.names, *(f"n{first + i}" for i in range(len(u)))]
            whole = pa.RecordBatch.from_arrays([*batch.columns, *(pa.array(row) for row in u)], names)
            if not known.all():
                yield _pack_without_inputs(whole.filter(pa.array(~known)), join.rows, typed)
                whole = whole.filter(pa.array(known))
            yield from packer(iter([whole]))

    return pack


def look_up(
    table: Records, keys: Records, defaults: tuple[float, ...] | None
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the inputs (c, N) of N keys, and a mask (N,) of the keys with inputs, which is all True with defaults."""
    # A search in the order of the table reads each page once, and takes a quarter of the time.
    order = np.argsort(keys.arrays["route"])
    at = np.empty(len(order), np.int64)
    at[order] = match(table, keys.take(order))
    found = at >= 0
    u = np.full((table.arrays["u"].shape[0], len(at)), np.nan)
    u[:, found] = table.arrays["u"][:, at[found]]
    if defaults is not None:
        u[:, ~found] = np.array(defaults)[:, None]
        found = np.ones(len(at), bool)
    return u, found


def _build_identities(batch: pa.RecordBatch, fmt: RowFormat) -> Records:
    by, names = fmt.inputs_key or fmt.kind, ("identity", "check")
    given = names if by == fmt.kind else INPUT_IDENTITY
    arrays = {
        name: batch.column(one).to_numpy()
        for name, one in list(zip(names, given, strict=True))[: 1 if by.integer else 2]
    }
    return Records(build_identity_arrays(arrays), None)


def _pack_without_inputs(rows: pa.RecordBatch, fmt: RowFormat, typed: bool) -> pa.RecordBatch:
    payload = pa.array([fmt.layout.encode(parse_records(rows, fmt))], pa.binary())
    bucket = pa.array([MISSING_INPUTS], pa.int32())
    return build_packet_batch(bucket, payload, RowPacket.ROWS if typed else None)


def _load_job_inputs(layout: Layout) -> Records:
    """Return the table that the driver has pinned for this task's micro-batch."""
    context = TaskContext.get()
    path = None if context is None else context.getLocalProperty(PROPERTY)
    if path is None:
        raise RuntimeError("no table of inputs has been pinned for this micro-batch")
    if path not in _open:
        while len(_open) >= MOST_OPEN:
            _open.pop(next(iter(_open)))
        _open[path] = read_copied_records(path, layout) if is_in_s3(path) else map_records(Path(path), layout)
    return _open[path]


def read_copied_records(path: str, layout: Layout) -> Records:
    """Return the records of a packet in S3 as views of a temporary copy, which is removed together with the records.

    Raises:
        UserError: the packet cannot be read from the store.
    """
    folder, _, name = path.rpartition("/")
    content = ObjectFiles(folder).read(name)
    if content is None:
        raise RuntimeError(f"{path}: the table of inputs that was pinned for this micro-batch is gone")
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        return layout.decode(np.memmap(file, np.uint8, "r").data)


def map_records(path: Path, layout: Layout) -> Records:
    """Return the records of a packet in a file as memory-mapped views, so the workers of a machine share the memory."""
    return layout.decode(np.memmap(path, np.uint8, "r").data)


INPUTS = "inputs"
"""The column with the inputs of a key, array<double>."""


class Version(NamedTuple):
    """One version of a table of inputs: the location and Delta id of the table, and the number of the version."""

    table: str
    id: str
    version: int


class InputsTable:
    """The table of a model's inputs, in the warehouse or at another location."""

    def __init__(self, model: DeployedModel[Warehouse]) -> None:
        """Open the table that the spec names.

        Raises:
            UserError: the table does not exist.
        """
        spec = model.spec
        assert spec.inputs is not None
        self.spec, self.inputs, self.name = spec, spec.inputs, spec.inputs_table
        self._home, self._table = find_home(model.warehouse, self.name)
        if not self._home.exists(self._table):
            raise UserError(
                f"{self.name}: there is no such Delta table in {self._home.root}, and {spec.name} takes its inputs "
                f"from it: make it with `kalman-pipeline inputs --model {spec.name} --input FILE`"
            )
        self._known: tuple[tuple[int, int], Version] | None = None

    def newest(self) -> Version:
        """Return the latest version."""
        number = self._home.latest_version(self._table)
        found = number, self._written(number)
        if self._known is None or self._known[0] != found:
            self._known = found, Version(self.name, self._home.table_id(self._table), number)
        return self._known[1]

    def _written(self, number: int) -> int:
        """Return the write time of a version in ns, which differs if the table is recreated."""
        folder, name = find_local_path(self._home.path(self._table)), name_commit(number)
        if folder is not None:
            return (folder / "_delta_log" / name).stat().st_mtime_ns
        at = self._home.files(f"{self._table}/_delta_log").read_modified_time(name)
        return round(at.timestamp() * 1e9)

    def load(self, kind: KeyKind, version: int) -> Records:
        """Return the rows of a version as records (`joined_inputs.build_inputs_layout`), ordered by route.

        Args:
            kind: kind of the model's keys.
            version: version of the table.

        Raises:
            UserError: a column is missing, a key has two rows, or a value is missing or not finite.
        """
        by = select_sub_kind(kind, tuple(self.inputs.key or self.spec.key))
        where = f"{self.name} version {version}"
        rows = self._columns(by, version, where).toArrow().combine_chunks()
        return check_inputs(rows, by, list(self.inputs.columns.values()), where)

    def packet(self, kind: KeyKind, version: int) -> bytes:
        """Return the records of a version (`load`) as a packet."""
        by = select_sub_kind(kind, tuple(self.inputs.key or self.spec.key))
        return build_inputs_layout(by, len(self.inputs.columns)).encode(self.load(kind, version))

    def joined(self, frame: DataFrame, kind: KeyKind, version: int) -> DataFrame:
        """Return measurement rows with the inputs of their keys, in columns that have the names in the model.

        A row whose key has no inputs gets the defaults, or nulls without defaults.
        """
        by = select_sub_kind(kind, tuple(self.inputs.key or self.spec.key))
        defaults = self.inputs.defaults or {}
        rows = self._read(version).select(
            *_build_key_columns(by),
            *(F.col(f"`{c}`").try_cast("double").alias(n) for n, c in self.inputs.columns.items()),
        )
        both = frame.join(rows, list(by.columns), how="left")
        for name, number in defaults.items():
            both = both.withColumn(name, F.coalesce(F.col(f"`{name}`"), F.lit(number)))
        return both.select(*frame.columns, *self.inputs.columns)

    def complete_rows(self, frame: DataFrame, kind: KeyKind, version: int) -> DataFrame:
        """Return the measurement rows whose keys have inputs, together with these inputs (`joined`).

        Raises:
            UserError: the version of the table is invalid (`load`).
        """
        self.load(kind, version)
        return self.joined(frame, kind, version).dropna(subset=self.spec.input_names)

    def by_key(self, texts: DataFrame, kind: KeyKind) -> tuple[DataFrame, int]:
        """Return the newest inputs of keys as the columns `key` and `inputs`, and the version of the table.

        The inputs of a key without a row in the table are NaN if there are no defaults.

        Args:
            texts: frame with one column, the text of each key.
            kind: kind of the model's keys.
        """
        version = self.newest().version
        (name,) = texts.columns
        text = F.col(name).alias("_text")
        keys = texts.select(text, *build_key_columns(kind, F.col(name)))
        numbers = (F.coalesce(F.col(f"`{one}`"), F.lit(float("nan"))) for one in self.spec.input_names)
        found = self.joined(keys, kind, version).select(
            F.col("_text").alias("key"), F.array(*numbers).cast("array<double>").alias(INPUTS)
        )
        return found, version

    def _read(self, version: int) -> DataFrame:
        return read_own_files(self._home, self._table, self.name, self.inputs.clones, version)

    def _columns(self, by: KeyKind, version: int, where: str) -> DataFrame:
        frame = self._read(version)
        absent = [n for n in (*by.columns, *self.inputs.columns.values()) if n not in frame.columns]
        if absent:
            raise UserError(
                f"{where}: there is no column {', '.join(absent)} (it has {show_names(frame.columns)}); add it to the "
                f"table, or name the right ones in `inputs` of {self.spec.source_path or self.spec.name}"
            )
        numbers = [F.col(f"`{c}`").try_cast("double") for c in self.inputs.columns.values()]
        keyed = frame.select(
            *_build_key_columns(by),
            *(number.alias(f"v{i}") for i, number in enumerate(numbers)),
        )
        nulls = [F.col(f"`{name}`").isNull().alias(f"_null_{name}") for name in by.columns]
        texted = keyed.withColumn("_text", build_key_text(by))
        identity = [one for one in build_identity_columns(by, F.col("_text"))][: 1 if by.integer else 2]
        filled = [
            F.coalesce(one, F.lit(0)).alias(n)
            for one, n in zip(identity, ("identity", "check"), strict=False)
        ]
        return texted.select(
            F.coalesce("_text", F.lit("")).alias("_text"),
            *nulls,
            *filled,
            *(f"v{i}" for i in range(len(numbers))),
        )


def check_inputs(rows: pa.Table, by: KeyKind, columns: Sequence[str], where: str) -> Records:
    """Return the rows of a table of inputs as records, ordered by route.

    Args:
        rows: rows with the keys' text and identity (and check), a null flag for each key column, and v0, v1, ...
        by: kind of the keys.
        columns: names of v0, v1, ... in the table.
        where: the table and its version, for error messages.

    Raises:
        UserError: a key is missing or has two rows, or a value is missing or not finite.
    """
    texts = rows.column("_text").combine_chunks()
    for name in by.columns:
        _refuse(rows.column(f"_null_{name}").to_numpy(), f"{where}: a row has no {name}", None)
    u = np.array([rows.column(f"v{i}").to_numpy() for i in range(len(columns))], float)
    for column, values in zip(columns, u, strict=True):
        _refuse(~np.isfinite(values), f"{where}: {column} is missing or not a finite number", texts)
    names = ["identity"] if by.integer else ["identity", "check"]
    arrays = build_identity_arrays({name: rows.column(name).to_numpy() for name in names})
    order = np.lexsort(tuple(reversed(list(arrays.values()))))
    arrays = {name: values[order] for name, values in arrays.items()}
    repeated = np.zeros(len(order), bool)
    repeated[order[1:]] = np.all([values[1:] == values[:-1] for values in arrays.values()], axis=0)
    _refuse(repeated, f"{where}: there are two rows", texts)
    return Records({**arrays, "u": u[:, order]}, None)


def _refuse(bad: NDArray[np.bool_], problem: str, texts: pa.Array | None) -> None:
    places = np.flatnonzero(bad)
    if len(places) == 0:
        return
    where = "" if texts is None else f" for key {texts[int(places[0])].as_py()}"
    more = f", and {len(places) - 1:,} more like it" if len(places) > 1 else ""
    raise UserError(
        f"{problem}{where}{more}; a key has one row, and every input is a number: correct the table"
    )


def _build_key_columns(by: KeyKind) -> list[Column]:
    """Return the key columns with the types of the measurements table."""
    typed = zip(by.columns, by.types, strict=True)
    return [F.col(f"`{name}`").try_cast(kind).alias(name) for name, kind in typed]


KEPT = 100
"""Number of micro-batches whose pins are kept, which is the number of micro-batches whose state Spark keeps."""
FOLDER = "inputs"


class InputPins:
    """The pins of a generation, for its driver."""

    def __init__(self, model: DeployedModel[Warehouse], kind: KeyKind, generation: Generation) -> None:
        """Read the table, so that errors in it are raised before the stream starts.

        Raises:
            UserError: the table cannot be used, or the warehouse is neither a folder that workers can read nor in S3.
        """
        files = _open_pins(model.warehouse, generation)
        if files is None:
            raise UserError(
                f"{model.name}: `inputs` needs a warehouse in a folder that all workers share, or in S3, and this one "
                f"is {model.warehouse.root}: set --warehouse to one of these, or join the inputs before `ingest`"
            )
        self._spark, self._kind, self._files = model.warehouse.spark, kind, files
        self._table = InputsTable(model)
        self._meaning = _hash_meaning(self._table, kind)
        self._packet(self._table.newest())

    def take(self, batch: int) -> Version:
        """Pin a version for a micro-batch without a pin; set the pinned version for this thread's jobs, and return it.

        Raises:
            UserError: the latest version cannot be used.
        """
        pinned = self.find_pinned_version(batch)
        if pinned is None:
            version = self._table.newest()
            self._packet(version)
            self._files.create(_pin(batch), json.dumps(version._asdict()).encode())
            pinned = self.find_pinned_version(batch)
            assert pinned is not None
            self._forget(batch)
        path = f"{self._files.root}/{self._packet(pinned)}"
        self._spark.sparkContext.setLocalProperty(PROPERTY, path)
        return pinned

    def find_pinned_version(self, batch: int) -> Version | None:
        """Return the pinned version of a micro-batch, or None."""
        kept = self._files.read(_pin(batch))
        return None if kept is None else Version(**json.loads(kept))

    def drop(self, batch: int) -> None:
        """Remove the pin of a micro-batch that has written nothing, so that it can use a corrected table of inputs."""
        self._files.remove(_pin(batch))

    def _packet(self, version: Version) -> str:
        """Write the packet of a version unless the packet exists; return its name."""
        name = f"{_format_prefix(version)}{self._meaning}.packet"
        if not self._files.exists(name):
            if version.id != self._table.newest().id:
                raise UserError(
                    f"{version.table} has been recreated since a micro-batch began with its version "
                    f"{version.version}, and {self._files.root}/{name} is gone: restore one of them",
                    RUN_FAILED,
                )
            self._files.write(name, self._table.packet(self._kind, version.version))
        return name

    def _forget(self, batch: int) -> None:
        """Remove old pins, and the packets to which no remaining pin refers."""
        pins = {int(name.removesuffix(".json")): name for name in self._files.names("pins")}
        for number, name in pins.items():
            if number <= batch - KEPT:
                self._files.remove(f"pins/{name}")
        kept = [self.find_pinned_version(number) for number in pins if number > batch - KEPT]
        named = tuple(_format_prefix(one) for one in kept if one is not None)
        for name in self._files.names(""):
            if name.endswith(".packet") and not name.startswith(named):
                self._files.remove(name)


def join_of(spec: ModelSpec, fmt: RowFormat) -> Join:
    """Return the join that workers apply for a model."""
    assert spec.inputs is not None
    defaults = spec.inputs.defaults
    return Join(fmt, None if defaults is None else tuple(defaults[name] for name in spec.input_names))


def read_pinned_version(warehouse: Warehouse, generation: Generation, batch: int) -> dict[str, Any] | None:
    """Return the pinned version of the inputs of a generation's micro-batch, or None if it is unknown."""
    files = _open_pins(warehouse, generation)
    kept = None if files is None else files.read(_pin(batch))
    return None if kept is None else json.loads(kept)


def _open_pins(warehouse: Warehouse, generation: Generation) -> LocalFiles | ObjectFiles | None:
    """Return the folder of pins in a generation's checkpoint; None if the store cannot create files exclusively."""
    root = warehouse.path(f"{generation.checkpoint}/{FOLDER}")
    folder = find_local_path(root)
    return LocalFiles(folder) if folder is not None else ObjectFiles(root) if is_in_s3(root) else None


def _format_prefix(version: Version) -> str:
    """Return the prefix that the names of a version's packets share."""
    return f"{version.id[:8]}-{version.version}-"


def _hash_meaning(table: InputsTable, kind: KeyKind) -> str:
    """Return a short hash of the columns and keys in a packet."""
    what = [table.inputs.key, list(table.inputs.columns.values()), kind]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:8]


def _pin(batch: int) -> str:
    return f"pins/{batch}.json"
