"""Check raw rows against a model's spec in Spark: typed columns, or the reason why a row does not fit.

The rules are those of the offline command (`jobs.rows`), as docs/models.md lists them; both read times by the one
regular expression of `jobs.times`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs.errors import UserError
from jobs.spec import ModelSpec
from jobs.times import EPOCH_FORMATS, MAX_US, MIN_US, PARTS, TimePattern, time_pattern

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructType

REASON = "_reason"
CORRUPT = "_corrupt"
_NUMBER = r"[+-]?([0-9]+([.][0-9]*)?|[.][0-9]+)([eE][+-]?[0-9]+)?"
_PARTS, _TIME = "_parts", "_time"
_SEPARATOR = "\x1f"  # in no part of a time
_INFINITE = r"(?i)[+-]?inf(inity)?"


def checked_rows(raw: DataFrame, spec: ModelSpec, key_types: dict[str, str]) -> DataFrame:
    """Add the spec's columns, typed, and `_reason`: null where the row fits.

    Args:
        raw: rows as they came; of text columns, or of typed ones.
        spec: of the model they are for.
        key_types: Spark type of each key column.

    Returns:
        columns `_reason`, `_payload` (the raw row as JSON), and the spec's columns.
    """
    from pyspark.sql import functions as F

    schema = raw.schema
    staged = _with_time(raw, spec)
    reasons: list[Column] = []
    if CORRUPT in schema.names:
        reasons.append(F.when(F.col(CORRUPT).isNotNull(), F.lit("row: not as many fields as the header")))
    values: list[Column] = []
    for name in spec.key:
        value, reason = _key(name, schema[name].dataType, key_types[name])
        values.append(value.alias(name))
        reasons.append(reason)
    time, reason = _time(spec, schema[spec.time].dataType)
    values.append(time.alias(spec.time))
    reasons.append(reason)
    for role, names in (("measurement", spec.measurement), ("control", spec.control)):
        for name in names:
            value, reason = _number(role, name, schema[name].dataType, spec.missing_values)
            values.append(value.alias(name))
            reasons.append(reason)
    payload = F.to_json(F.struct(*[F.col(f"`{name}`") for name in schema.names]))
    return staged.select(F.coalesce(*reasons).alias(REASON), payload.alias("_payload"), *values)


def check_types(path: str, schema: StructType, spec: ModelSpec) -> None:
    """Refuse a file with a column whose type can never hold what the spec says of it.

    Raises:
        UserError: it names the column, and what to do.
    """
    for role, names in (("key", spec.key), ("measurement", spec.measurement), ("control", spec.control)):
        for name in names:
            kind = schema[name].dataType.simpleString()
            nested = kind.startswith(("array", "map", "struct", "variant")) or kind == "void"
            if nested or (
                role != "key" and kind in ("boolean", "binary", "date", "timestamp", "timestamp_ntz")
            ):
                raise UserError(
                    f"{path}: {role} column '{name}' holds {kind}; give "
                    f"{'text or numbers' if role == 'key' else 'numbers'}"
                )
    kind = schema[spec.time].dataType
    simple = kind.simpleString()
    if simple in ("timestamp", "timestamp_ntz", "date") or _is_text(kind):
        return
    numeric = simple in ("tinyint", "smallint", "int", "bigint", "float", "double") or simple.startswith(
        "decimal"
    )
    if not (numeric and spec.time_format in EPOCH_FORMATS):
        raise UserError(
            f"{path}: time column '{spec.time}' holds {simple}; set time_format to one of "
            f"{', '.join(EPOCH_FORMATS)}, or give times"
        )


def measurement_columns(spec: ModelSpec, key_types: dict[str, str]) -> str:
    """Return the columns of the model's measurements table as DDL."""
    keys = [f"`{name}` {key_types[name]}" for name in spec.key]
    numbers = [f"`{name}` double" for name in (*spec.measurement, *spec.control)]
    return ", ".join([*keys, f"`{spec.time}` timestamp", *numbers, "_origin string", "_landed_at timestamp"])


def key_types_of(spec: ModelSpec, schema: StructType) -> dict[str, str]:
    """Choose the types of key columns: a whole number stays one, everything else is text."""
    from jobs.keys import is_integer

    return {name: "bigint" if is_integer(schema[name].dataType) else "string" for name in spec.key}


def _is_text(kind: DataType) -> bool:
    return kind.simpleString() in ("string", "binary") or kind.simpleString().startswith(("char", "varchar"))


def _key(name: str, kind: DataType, wanted: str) -> tuple[Column, Column]:
    from pyspark.sql import functions as F

    raw = F.col(f"`{name}`")
    value = raw.try_cast(wanted)
    missing = raw.isNull()
    if _is_text(kind):
        missing = missing | (raw == "")
    elif kind.simpleString() in ("float", "double"):
        missing = missing | F.isnan(raw)
    reason = F.when(missing, F.lit(f"key {name}: missing")).when(
        value.isNull(), F.lit(f"key {name}: not a whole number")
    )
    return value, reason


def _number(role: str, name: str, kind: DataType, missing_values: list[str]) -> tuple[Column, Column]:
    from pyspark.sql import functions as F

    raw = F.col(f"`{name}`")
    text = F.trim(raw.cast("string"))
    if _is_text(kind):
        words = [word.strip().lower() for word in missing_values]
        missing = raw.isNull() | F.lower(text).isin(words)
        number = F.when(~missing & text.rlike(rf"^{_NUMBER}\z"), text.try_cast("double"))
        infinite = text.rlike(rf"^{_INFINITE}\z") | F.coalesce(F.abs(number) == float("inf"), F.lit(False))
    else:
        number = raw.try_cast("double")
        missing = raw.isNull() | F.isnan(number)
        infinite = F.coalesce(F.abs(number) == float("inf"), F.lit(False))
    value = F.when(~missing & ~infinite, number)
    reason = F.when(~missing & infinite, F.lit(f"{role} {name}: not finite")).when(
        ~missing & number.isNull(), F.lit(f"{role} {name}: not a number")
    )
    if role == "control":  # a missing measurement has a meaning; a missing input has none
        reason = reason.when(missing, F.lit(f"{role} {name}: missing"))
    return value, reason


def _with_time(raw: DataFrame, spec: ModelSpec) -> DataFrame:
    """Add `_time`: the row's time, null where it is none.

    It is a column of its own, and so are the parts of a written time, because Spark writes an expression out wherever
    it is used: one row's text would go through the regular expression dozens of times.
    """
    from pyspark.sql import functions as F

    column, kind = F.col(f"`{spec.time}`"), raw.schema[spec.time].dataType
    if _is_text(kind) and spec.time_format not in EPOCH_FORMATS:
        pattern = time_pattern(spec.time_format)
        whole, text = rf"^(?:{pattern.regex})\z", F.trim(column)
        groups = _SEPARATOR.join(f"${number}" for number in range(1, len(pattern.groups) + 1))
        parts = F.split(F.regexp_replace(text, whole, groups), _SEPARATOR)
        raw = raw.withColumn(_PARTS, F.when(text.rlike(whole), parts))
        return raw.withColumn(_TIME, _written_time(spec, pattern))
    return raw.withColumn(_TIME, _stored_time(spec, kind))


def _stored_time(spec: ModelSpec, kind: DataType) -> Column:
    """Read a time that is stored as one, or as a number."""
    from pyspark.sql import functions as F

    raw = F.col(f"`{spec.time}`")
    simple = kind.simpleString()
    if simple == "timestamp":
        value = raw
    elif simple in ("timestamp_ntz", "date"):
        value = F.to_utc_timestamp(raw.cast("timestamp_ntz").cast("timestamp"), spec.time_zone)
    elif spec.time_format in EPOCH_FORMATS:
        scale = EPOCH_FORMATS[spec.time_format]
        text = F.trim(raw.cast("string") if _is_text(kind) else raw.try_cast("decimal(38,9)").cast("string"))
        micros = (text.try_cast("decimal(38,9)") * F.lit(scale)).try_cast("bigint")
        value = F.when(text.rlike(r"^[+-]?[0-9]{1,18}([.][0-9]*)?\z"), F.timestamp_micros(micros))
    else:
        value = F.lit(None).cast("timestamp")
    return value


def _time(spec: ModelSpec, kind: DataType) -> tuple[Column, Column]:
    from pyspark.sql import functions as F

    name = spec.time
    raw, value = F.col(f"`{name}`"), F.col(_TIME)
    missing = raw.isNull() | (raw == "") if _is_text(kind) else raw.isNull()
    value = F.when(F.unix_micros(value).between(MIN_US, MAX_US), value)
    reason = F.when(missing, F.lit(f"time {name}: missing")).when(
        value.isNull(), F.lit(f"time {name}: not a time")
    )
    return value, reason


def _written_time(spec: ModelSpec, pattern: TimePattern) -> Column:
    """Put a time together from the parts that the pattern found in its text; null where it did not match."""
    from pyspark.sql import functions as F

    def part(name: str, default: str) -> Column:
        if name not in pattern.groups:
            return F.lit(default)
        found = F.col(_PARTS)[pattern.groups[name] - 1]
        return F.when(found == "", F.lit(default)).otherwise(found)

    year, month, day, hour, minute, second, fraction, zone = (
        part(name, {"zone": "", "month": "1", "day": "1"}.get(name, "0")) for name in PARTS
    )
    offset = F.regexp_replace(zone, r"^([+-][0-9]{2}):?([0-9]{2})?$", "$1:$2")
    offset = (
        F.when(zone == "Z", F.lit("+00:00"))
        .when(F.length(offset) == 4, F.concat(offset, F.lit("00")))
        .otherwise(offset)
    )
    within = (
        (zone == "")
        | (zone == "Z")
        | (
            (
                F.substring(offset, 2, 2).try_cast("int") * 60 + F.substring(offset, 5, 2).try_cast("int")
                <= 18 * 60
            )
            & (F.substring(offset, 5, 2).try_cast("int") <= 59)
        )
    )
    seconds = F.concat(second, F.lit("."), F.substring(F.rpad(fraction, 6, "0"), 1, 6)).try_cast(
        "decimal(16,6)"
    )
    moment = F.try_make_timestamp(
        year.try_cast("int"),
        month.try_cast("int"),
        day.try_cast("int"),
        hour.try_cast("int"),
        minute.try_cast("int"),
        seconds,
        F.when(zone == "", F.lit(spec.time_zone)).otherwise(offset),
    )
    return F.when(F.col(_PARTS).isNotNull() & within & (second.try_cast("int") < 60), moment)
