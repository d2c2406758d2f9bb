"""Read a file of key inputs, with one row per key, and join the rows of a file with them. No Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.core.errors import UserError
from jobs.landing.checking import ParsedRows
from jobs.landing.file_rows import read_all
from jobs.landing.raw_rows import RawRows, reject, take_columns
from jobs.landing.values.keys import assign_codes, find_places, join_codes
from jobs.landing.values.number_reading import build_rules, parse_numbers
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding import arrow

REASON = "inputs: the file of inputs has no row for the key"


class FileInputs(NamedTuple):
    """The inputs u (c, F) of F keys; `keys`: the unparsed key columns of the file."""

    keys: list[pa.Array]
    u: NDArray[np.float64]


def read_inputs(spec: ModelSpec, file: str) -> FileInputs:
    """Read a file of a model's inputs.

    Raises:
        UserError: the file cannot be read, a key is missing or appears twice, or an input is not a number.
    """
    assert spec.inputs is not None
    names = [*(spec.inputs.key or spec.key), *spec.inputs.columns.values()]
    source = read_all(file, spec.list_file_columns(names), spec.files.drop_header_options())
    return parse_file_inputs(spec, take_columns(spec, source, names), file)


def parse_file_inputs(spec: ModelSpec, source: RawRows, file: str) -> FileInputs:
    """Return the inputs in a source's rows; `file` is the source's name in errors.

    Raises:
        UserError: a key is missing or appears twice, or an input is not a number.
    """
    assert spec.inputs is not None
    by, columns = spec.inputs.key or spec.key, list(spec.inputs.columns.values())
    reason = source.reasons()
    keys = [source.columns[name] for name in by]
    for name, column in zip(by, keys, strict=True):
        reject(reason, arrow.to_numpy(column.is_null()), f"{name} is missing")
    rules = build_rules(spec.missing_values, spec.files)
    u = parse_numbers(columns, "input", source, rules, file, reason)
    for name, values in zip(columns, u, strict=True):
        reject(reason, np.isnan(values), f"{name} is missing")
    code = join_codes(
        [np.zeros(source.rows, np.int64), *(assign_codes(convert_key_texts(one)) for one in keys)]
    )
    seen = np.ones(source.rows, bool)
    seen[np.unique(code, return_index=True)[1]] = False
    reject(reason, seen, "the key is there twice")
    refuse_rows(file, reason, {"key": keys}, "a key has one row, and every input is a number")
    return FileInputs(keys, u)


def refuse_rows(
    file: str, reason: NDArray[np.object_], names: Mapping[str, Sequence[pa.Array]], need: str
) -> None:
    """Raise an error if a file has unusable rows.

    Args:
        file: the name of the file in errors.
        reason: (N,) the reason why each row is unusable, or None.
        names: columns that identify a row in errors, by their label.
        need: the requirement for the rows, for the message.

    Raises:
        UserError: a row is unusable.
    """
    bad = np.flatnonzero(reason != None)  # noqa: E711 - elementwise
    if not len(bad):
        return
    at = int(bad[0])
    row = ", ".join(
        f"{what} {', '.join(str(column[at].as_py()) for column in columns)}"
        for what, columns in names.items()
    )
    more = f", and {len(bad) - 1:,} more rows like it" if len(bad) > 1 else ""
    why = reason[at].removeprefix("row: ")
    raise UserError(f"{file}: row {at + 1} ({row}): {why}{more}; {need}")


def refuse_inputs(spec: ModelSpec) -> NoReturn:
    """Refuse a file of inputs for a model without inputs.

    Raises:
        UserError: always.
    """
    raise UserError(f"--inputs: {spec.name} takes none: add `inputs` to its spec, or omit the option")


def join_file(spec: ModelSpec, rows: ParsedRows, keys: Sequence[pa.Array], file: str | None) -> ParsedRows:
    """Append the inputs of each row's key to the row's controls; a row whose key has no inputs is rejected.

    Args:
        spec: the spec of the model.
        rows: N rows.
        keys: the key columns of these rows.
        file: the file of inputs, or None.

    Raises:
        UserError: the file is missing, not needed, or unusable.
    """
    if spec.inputs is None:
        if file is not None:
            refuse_inputs(spec)
        return rows
    if file is None:
        raise UserError(f"{spec.name} has inputs: give a file of them, a row a key, with --inputs")
    u, known = find_key_inputs(spec, read_inputs(spec, file), keys)
    reject(rows.reason, ~known, REASON)
    return rows._replace(u=np.concatenate([rows.u, u]))


def find_key_inputs(
    spec: ModelSpec, table: FileInputs, keys: Sequence[pa.Array]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the inputs (i, N) of N keys, given by their columns, and which keys (N,) have inputs.

    A key that is not in the table gets the spec's defaults, or 0 if the spec has none.
    """
    assert spec.inputs is not None
    by = spec.inputs.key or spec.key
    wanted = [convert_key_texts(keys[spec.key.index(name)]) for name in by]
    known = table.u.shape[1]
    at = find_places(wanted, list(map(convert_key_texts, table.keys)), len(wanted[0]), known)
    defaults = spec.inputs.defaults
    missing = np.full((len(spec.input_names), 1), 0.0)
    if defaults is not None:
        missing[:, 0] = [defaults[name] for name in spec.input_names]
    u = np.where(at >= 0, table.u[:, at] if known else 0.0, missing)
    return u, (at >= 0) | (defaults is not None)


def convert_key_texts(column: pa.Array) -> pa.Array:
    """Return the values of a key column as texts."""
    texts = column.cast(pa.string())
    # `fill_null` imports pandas.
    return arrow.load_compute().coalesce(texts, arrow.repeat_text("", len(texts)))
