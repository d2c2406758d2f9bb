"""Read the Delta table of a model's inputs at a version, and validate it: one row per key, one number per input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import functions as F

from jobs.core.errors import UserError
from jobs.core.redaction import show_names
from jobs.core.roots import find_local_path
from jobs.lineage.joined_inputs import build_inputs_layout
from jobs.lineage.model import DeployedModel
from jobs.spark.warehouse import Warehouse
from jobs.state.encoding.keys import (
    KeyKind,
    build_identity_arrays,
    build_identity_columns,
    build_key_columns,
    build_key_text,
    select_sub_kind,
)
from jobs.state.encoding.packets import Records
from jobs.storage.warehouse import find_home

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


INPUTS = "inputs"
"""The column with the inputs of a key, array<double>."""


class Version(NamedTuple):
    """One version of a table of inputs: the table's location and Delta id, and the version's number."""

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
        """Return the write time of a version in ns; it differs if the table is recreated."""
        folder, name = find_local_path(self._home.path(self._table)), f"{number:020d}.json"
        if folder is not None:
            return (folder / "_delta_log" / name).stat().st_mtime_ns
        at = self._home.files(f"{self._table}/_delta_log").read_modified_time(name)
        return round(at.timestamp() * 1e9)

    def load(self, kind: KeyKind, version: int) -> Records:
        """Return a version as records (`join.build_inputs_layout`), ordered by route.

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
        """Return measurement rows with their keys' inputs, in columns with the names in the model.

        A row whose key has no inputs gets the defaults, or nulls without defaults.
        """
        by = select_sub_kind(kind, tuple(self.inputs.key or self.spec.key))
        defaults = self.inputs.defaults or {}
        rows = self._home.read(self._table, version).select(
            *_build_key_columns(by),
            *(F.col(f"`{c}`").try_cast("double").alias(n) for n, c in self.inputs.columns.items()),
        )
        both = frame.join(rows, list(by.columns), how="left")
        for name, number in defaults.items():
            both = both.withColumn(name, F.coalesce(F.col(f"`{name}`"), F.lit(number)))
        return both.select(*frame.columns, *self.inputs.columns)

    def complete_rows(self, frame: DataFrame, kind: KeyKind, version: int) -> DataFrame:
        """Return the measurement rows whose keys have inputs, with these (`joined`).

        Raises:
            UserError: the version of the table is invalid (`load`).
        """
        self.load(kind, version)
        return self.joined(frame, kind, version).dropna(subset=self.spec.input_names)

    def by_key(self, texts: DataFrame, kind: KeyKind) -> tuple[DataFrame, int]:
        """Return the inputs of keys from the newest version, as the columns `key` and `inputs`, and that version.

        NaN stands for the inputs of a key that is not in the table, and has no defaults.

        Args:
            texts: one column, the text of each key.
            kind: of the model's keys.
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

    def _columns(self, by: KeyKind, version: int, where: str) -> DataFrame:
        frame = self._home.read(self._table, version)
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
    """Return a table's rows as records, ordered by route.

    Args:
        rows: rows with the keys' text, identity (and check), a null flag for each key column, and v0, v1, ...
        by: kind of the keys.
        columns: names of v0, v1, ... in the table.
        where: the table and its version, for messages.

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
