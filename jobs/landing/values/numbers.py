"""Read the numbers of raw rows: decide if a value is missing, a number, or invalid."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.core.errors import UserError
from jobs.landing.raw_rows import RawRows, reject
from jobs.landing.values.number_writing import BLANKS, PLAIN_NUMBER, NumberReader
from jobs.specs.files import Files
from jobs.state.encoding import arrow

Floats = NDArray[np.float64]

_INFINITE = re.compile(r"[+-]?inf(?:inity)?", re.IGNORECASE)
_PLAIN = re.compile(PLAIN_NUMBER)
_OK, _NOT_A_NUMBER, _NOT_FINITE = 0, 1, 2
_REASONS = {_NOT_A_NUMBER: "not a number", _NOT_FINITE: "not finite"}
_NARROW = {pa.float32(): np.float32, pa.float16(): np.float16}


class NumberRules(NamedTuple):
    """Rules of a spec for numbers: how files write them, and which texts and numbers mean a missing value."""

    files: Files
    texts: frozenset[str]
    numbers: tuple[float, ...]


def build_rules(missing_values: Sequence[str], files: Files) -> NumberRules:
    """Return the rules of a spec; a number in `missing_values` matches every way to write it."""
    numbers: list[float] = []
    for text in (one.strip(BLANKS) for one in missing_values):
        written = NumberReader(files)(text) or (text if _PLAIN.fullmatch(text) else None)
        if written is not None and math.isfinite(float(written)) or _INFINITE.fullmatch(text):
            numbers.append(float(written or text))
    texts = frozenset(text.strip(" ").casefold() for text in missing_values)
    return NumberRules(files, texts, tuple(numbers))


def parse_numbers(
    names: Sequence[str],
    what: str,
    source: RawRows,
    rules: NumberRules,
    file: str,
    reason: NDArray[np.object_],
) -> Floats:
    """Return the numbers (d, N) in columns, NaN where missing; reject rows with any other value.

    Args:
        names: names of the d columns.
        what: role of the columns, for reasons.
        source: N rows.
        rules: rules of the spec.
        file: name of the rows' file, for errors.
        reason: (N,) why each row is rejected; updated in place.

    Raises:
        UserError: a column's type cannot hold numbers.
    """
    result = np.full((len(names), source.rows), np.nan)
    for row, name in enumerate(names):
        column = source.columns[name]
        kind = column.type
        if pa.types.is_string(kind):
            values, codes = _read_texts(column, rules, source.decimal, name)
        elif (
            arrow.is_number(kind)
            or pa.types.is_boolean(kind)
            and {"true", "false"} <= rules.files.words.keys()
        ):
            values = _read_stored(column, rules)
            codes = np.where(np.isinf(values), _NOT_FINITE, _OK)
        elif pa.types.is_null(kind):
            continue
        else:
            raise UserError(f"{file}: {what} column '{name}' holds {kind}; {_suggest_remedy(kind)}")
        for code, text in _REASONS.items():
            reject(reason, codes == code, f"{what} {name}: {text}")
        result[row] = values
    return result


def _suggest_remedy(kind: pa.DataType) -> str:
    if pa.types.is_boolean(kind):
        return 'it must hold numbers, or set files: {words: {"true": 1, "false": 0}} in the spec'
    return "it must hold numbers"


def _read_stored(column: pa.Array, rules: NumberRules) -> Floats:
    """Return stored numbers or booleans (N,), NaN where missing."""
    kind = column.type
    if pa.types.is_boolean(kind):
        of_true, of_false = (rules.files.words[word] for word in ("true", "false"))
        values = np.where(arrow.to_numpy(column, False), of_true, of_false)
        return np.where(arrow.to_numpy(column.is_null()), np.nan, values)
    values = arrow.to_numpy(column.cast(pa.float64(), safe=False), math.nan)
    narrow = _NARROW.get(kind, np.float64)
    with np.errstate(over="ignore"):
        missing = np.array([float(narrow(number)) for number in rules.numbers])
    if pa.types.is_decimal(kind):  # Arrow's cast may return a neighbour of the nearest double
        missing = np.unique([np.nextafter(missing, -np.inf), missing, np.nextafter(missing, np.inf)])
    return _blank_missing(values, missing)


def _blank_missing(values: Floats, missing: Sequence[float] | Floats) -> Floats:
    """Return values (N,) with NaN in place of missing values."""
    absent = np.isin(values, missing) if len(missing) else np.zeros(0, bool)
    return np.where(absent, np.nan, values) if absent.any() else values


def _read_texts(
    column: pa.Array, rules: NumberRules, decimal: str, name: str
) -> tuple[Floats, NDArray[np.int64]]:
    """Return the numbers (N,) of texts, NaN where missing, and the state of each text."""
    files = rules.files
    thousands = None if files.thousands == decimal else files.thousands
    if (decimal, thousands) != (files.decimal, files.thousands):
        files = files.model_copy(update={"decimal": decimal, "thousands": thousands})
    reader = NumberReader(files, files.units.get(name))
    read, usual = reader.read_usual(column)
    values, codes = arrow.to_numpy(read, math.nan).copy(), np.full(len(column), _OK)
    places = np.flatnonzero(~usual)
    words = {word.casefold(): number for word, number in files.words.items()}
    texts, which = arrow.find_distinct_values(column.take(arrow.build_integers(places)))
    parsed = [_read_text(text, rules.texts, words, reader) for text in texts]
    values[places] = np.array([value for value, _ in parsed] + [math.nan])[which]
    codes[places] = np.array([code for _, code in parsed] + [_OK])[which]
    values = _blank_missing(values, rules.numbers)
    codes[np.isinf(values)] = _NOT_FINITE
    return values, codes


def _read_text(
    text: str, missing: frozenset[str], words: dict[str, float], reader: NumberReader
) -> tuple[float, int]:
    word = text.strip(" ").casefold()
    if word in missing:
        return math.nan, _OK
    if word in words:
        return words[word], _OK
    number = reader(text)
    if number is not None:
        return float(number), _OK
    if _INFINITE.fullmatch(word):
        return float(word), _OK
    return math.nan, _NOT_A_NUMBER
