"""Find the roles of the files' columns (time, key, measurements) and the rhythm of the rows. No Spark.

The key is the columns, or the file's name, that distinguish the series.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.choosing.columns import DESCRIBES, KEY, SERIES, NumericColumn, Roles, Wishes, find_marks, find_roles
from jobs.choosing.rhythm import Rhythm, find_rhythm
from jobs.choosing.table import InputTable
from jobs.choosing.times import join_given_parts
from jobs.choosing.times_apart import find_column_within_times, find_half_day, has_clock, note_zones
from jobs.choosing.wide import convert_to_long
from jobs.core.errors import UserError
from jobs.core.report import format_count
from jobs.core.stopwatch import Stopwatch
from jobs.landing.checking import ParsedRows, parse
from jobs.landing.dialects import ANY
from jobs.landing.raw_rows import RawRows, parse_name, take_columns
from jobs.landing.values.keys import assign_codes, join_codes
from jobs.specs.column_names import find_time_part
from jobs.specs.files import Files
from jobs.specs.model_spec import DEFAULT_MISSING, ModelSpec
from jobs.state.encoding import arrow
from jobs.state.encoding.row_order import count_repeats

Ints = NDArray[np.int64]
FEW = 0.01
"""The maximum share of rows that may repeat key and time of another row."""
APART = 0.5
"""A column's values are different series if the differences between them make up this share of a measurement's
variance.
"""
MOST_COLUMNS = 3
OFTEN = 5
"""If texts name series, at least half of a column's texts have this number of rows."""
TURNS = 0.8
"""The minimum frequency of a change of text between rows, relative to chance, if devices take turns."""
CALMER = 0.7
"""The maximum spread of each device's time steps, or size of its changes, relative to all rows together."""
JOIN = 2.0
"""The maximum number of usual time steps between the end of a file and the beginning of the next file."""


class Keys(NamedTuple):
    """The key: its columns, the name of the column with the file's name (or None), and the reason for the choice.

    code: (N,) number of each row's key, from 0.
    count: number of keys.
    """

    columns: list[str]
    from_name: str | None
    why: str
    code: Ints
    count: int


def find_keys(table: InputTable, roles: Roles, wishes: Wishes) -> Keys:
    """Find the key columns, or check the columns that the user names.

    Raises:
        UserError: a choice does not fit the files, such as a key that is the time or a measurement.
    """
    if wishes.no_key:
        if wishes.key or wishes.key_from_name is not None:
            raise UserError("--no-key says that all rows are one series: leave out --key and --key-from-name")
        return _build_single_key(table, "as given: all rows are one series")
    if wishes.key or wishes.key_from_name is not None:
        return _build_given_keys(table, roles, wishes)
    file, name = table.file, _choose_free_name(table)
    # Columns with a typical key name come first.
    candidates = sorted(roles.keys, key=lambda name: (KEY.search(name) is None, roles.keys.index(name)))
    within = _compute_repeats(file, roles)
    per_file = _find_file_constant(table, roles, candidates)
    if within <= FEW:
        if per_file is not None:
            return _build_keys([per_file], None, "one value a file", _encode_column(table, per_file))
        for find in (_find_named_key, _find_timed_key):
            apart = find(table, roles, candidates)
            if apart is not None:
                return _build_keys(
                    [apart], None, "its values are different series", _encode_column(table, apart)
                )
        if _are_consecutive(table, roles):
            return _build_single_key(table, "the files continue each other: all rows are one series")
        why = "each time is once in a file" if len(table.files) > 1 else "each time is there once"
        return _build_keys([name], name, f"the file's name: {why}", file)
    best = _find_fewest(table, roles, candidates)
    if best is None:
        return _build_keys([name], name, "the file's name: no column tells rows of one time apart", file)
    columns, left, with_file = best
    code = join_codes(
        [*(_encode_column(table, column) for column in columns), *([file] if with_file else [])]
    )
    why = "rows of one time differ in it" + ("" if left <= FEW else f"; {left:.1%} still repeat key and time")
    return _build_keys([*columns, *([name] if with_file else [])], name if with_file else None, why, code)


def _build_single_key(table: InputTable, why: str) -> Keys:
    return Keys([], None, why, np.zeros(len(table.file), np.int64), 1)


def _build_given_keys(table: InputTable, roles: Roles, wishes: Wishes) -> Keys:
    """Return the keys that the user named, and the file's name if rows repeat key and time without it."""
    name, why = wishes.key_from_name, "as given"
    if name is not None:
        _check_free(table, name)
    taken = {*roles.time.columns, *(one.name for one in roles.measurements)}
    for column in wishes.key:
        if column in taken:
            raise UserError(f"--key {column}: is the time, or a measurement; a column has one role")
    code = join_codes(
        [np.zeros(len(table.file), np.int64), *(_encode_column(table, one) for one in wishes.key)]
    )
    both = join_codes([code, table.file])
    repeats = len(table.files) > 1 and _compute_repeats(code, roles) > FEW
    if name is None and repeats and _compute_repeats(both, roles) <= FEW:
        name, why = _choose_free_name(table), "as given, and the file's name"
    if name is None:
        return _build_keys([*wishes.key], None, why, code)
    return _build_keys([*wishes.key, name], name, why, both)


def _check_free(table: InputTable, name: str) -> None:
    if name.casefold() in _list_taken_names(table):
        raise UserError(
            f"--key-from-name {name}: the files have a column of that name; use --key, or another name"
        )
    if not name.isidentifier() or name.startswith("_"):
        raise UserError(f"--key-from-name {name}: use letters, digits and _, beginning with a letter")


def _choose_free_name(table: InputTable) -> str:
    """Return an unused column name for the file's name as a key."""
    taken = _list_taken_names(table)
    return next(one for one in ("series", "file", "file_name", "series_name") if one not in taken)


def _list_taken_names(table: InputTable) -> set[str]:
    return {name.casefold() for name in (*table.source.columns, *table.partial)}


def _are_consecutive(table: InputTable, roles: Roles) -> bool:
    """Return whether files follow each other: no overlap in time, and most begin about a step after another ends."""
    known = roles.time.known
    file, time = table.file[known], roles.time.micros[known]
    order = np.lexsort((time, file))
    file, time = file[order], time[order]
    starts = np.flatnonzero(np.diff(file, prepend=-1))
    if len(starts) < 2:
        return False
    within = np.diff(time)[np.diff(file) == 0]
    ends = np.append(starts[1:], len(file)) - 1
    by_time = np.argsort(time[starts], kind="stable")
    joins = time[starts[by_time[1:]]] - time[ends[by_time[:-1]]]
    if not len(within) or (joins <= 0).any():
        return False
    return bool((joins <= JOIN * np.median(within)).mean() >= 0.5)


def _build_keys(columns: list[str], from_name: str | None, why: str, code: Ints) -> Keys:
    return Keys(columns, from_name, why, code, int(code.max()) + 1)


def _encode_column(table: InputTable, name: str) -> Ints:
    return assign_codes(table.source.columns[name])


def _compute_repeats(code: Ints, roles: Roles) -> float:
    """Return the share of rows that repeat key and time of an earlier row."""
    known = roles.time.known
    return float(count_repeats(code[known], roles.time.micros[known]) / max(known.sum(), 1))


def _find_file_constant(table: InputTable, roles: Roles, candidates: list[str]) -> str | None:
    """Return a column that is constant in each file and distinguishes files, such as a place in a file per month."""
    for name in candidates:
        codes = _encode_column(table, name)
        values, files = int(codes.max()) + 1, len(table.files)
        if len(np.unique(codes * files + table.file)) != files:
            continue
        if values == files:
            if values > 1 or KEY.search(name) is not None and DESCRIBES.search(name) is None:
                return name
        elif values > 1 and _compute_repeats(codes, roles) <= FEW:
            if _is_series_name(name) or not _are_consecutive(table, roles):
                return name
    return None


def _is_series_name(name: str) -> bool:
    """Return whether a column has a typical name for a device or a place."""
    return SERIES.search(name) is not None and DESCRIBES.search(name) is None


def _find_named_key(table: InputTable, roles: Roles, candidates: list[str]) -> str | None:
    """Return a column with a typical device name, or with a key's name if it separates a measurement's values."""
    for name in candidates:
        codes = _encode_column(table, name)
        if codes.max() == 0 or KEY.search(name) is None and not _is_series_name(name):
            continue
        if _is_series_name(name) and np.median(np.bincount(codes)) >= OFTEN:
            return name
        if any(_compute_share_between(codes, one.values) > APART for one in roles.measurements):
            return name
    return None


def _find_timed_key(table: InputTable, roles: Roles, candidates: list[str]) -> str | None:
    """Return a column of texts that take turns, each with its own regular times or smoother values.

    An example is devices that report independently. Each device's times are far more regular than all times together,
    or each device's values are smoother than all values together.
    """
    known = roles.time.known
    order = np.argsort(roles.time.micros[known], kind="stable")
    time = roles.time.micros[known][order]
    if _is_regular(np.diff(time)):
        return None
    for name in candidates:
        codes = _encode_column(table, name)[known][order]
        counts = np.bincount(codes)
        if len(counts) < 2 or np.median(counts) < OFTEN or name not in roles.texts:
            continue
        by_chance = 1.0 - ((counts / len(codes)) ** 2).sum()
        if (np.diff(codes) != 0).mean() < TURNS * by_chance:
            continue
        by_code = np.argsort(codes, kind="stable")
        within = np.diff(codes[by_code]) == 0
        own = _compute_spread(np.diff(time[by_code])[within])
        if own < CALMER * _compute_spread(np.diff(time)):
            return name
        for one in roles.measurements:
            values = one.values[known][order]
            changes = np.nanmedian(np.abs(np.diff(values[by_code])[within]))
            if changes < CALMER * np.nanmedian(np.abs(np.diff(values))):
                return name
    return None


def _is_regular(steps: Ints) -> bool:
    """Return whether most steps are about as long as the usual step."""
    if not len(steps):
        return True
    usual = np.median(steps)
    return bool((np.abs(steps - usual) <= 0.1 * usual).mean() > 0.8)


def _compute_spread(steps: Ints) -> float:
    """Return the spread of the logarithms of time steps: the distance of their 10 % and 90 % quantiles."""
    low, high = np.quantile(np.log(np.maximum(steps, 1)), [0.1, 0.9])
    return float(high - low)


def _compute_share_between(codes: Ints, values: NDArray[np.float64]) -> float:
    good = np.isfinite(values)
    codes, values = codes[good], values[good]
    if len(values) == 0 or values.var() == 0:
        return 0.0
    counts = np.maximum(np.bincount(codes), 1)
    means = np.bincount(codes, values / counts[codes])
    return float(((means[codes] - values.mean()) ** 2).mean() / values.var())


def _find_fewest(
    table: InputTable, roles: Roles, candidates: list[str]
) -> tuple[list[str], float, bool] | None:
    """Return the fewest columns that make key and time (nearly) unique; None if they help too little.

    Also return the share of rows that still repeat key and time, and whether the file's name is part of the key.
    """
    names = candidates[:8]
    codes = {name: _encode_column(table, name) for name in names}
    best: tuple[float, int, list[str], bool] | None = None
    none = _compute_repeats(table.file, roles)
    for count in range(1, min(MOST_COLUMNS, len(names)) + 1):
        for chosen in combinations(names, count):
            for with_file in (False, True) if len(table.files) > 1 else (False,):
                parts = [*(codes[name] for name in chosen), *([table.file] if with_file else [])]
                left = _compute_repeats(join_codes(parts), roles)
                one = (0.0 if left <= FEW else round(left, 3), count + with_file, list(chosen), with_file)
                if best is None or one[:2] < best[:2]:
                    best = one
        if best is not None and best[0] == 0.0:
            break
    if best is None or best[0] > 0.5 * none:
        return None
    return best[2], best[0], best[3]


Floats = NDArray[np.float64]

MOST_MEASUREMENTS = 4


@dataclass(frozen=True)
class Columns:
    """Roles of the files' columns, and the rows as a spec of these columns reads them.

    spec: the spec of the columns, before a structure is chosen.
    source: the N rows as written, with a column for the key from the file's name.
    parsed: the N rows as parsed.
    """

    table: InputTable
    files: Files
    roles: Roles
    keys: Keys
    rhythm: Rhythm
    spec: ModelSpec
    source: RawRows
    parsed: ParsedRows
    notes: list[str]

    @property
    def measurements(self) -> list[NumericColumn]:
        """Return the measured columns."""
        return self.roles.measurements


def find_columns(input: str, table: InputTable, wishes: Wishes, watch: Stopwatch) -> Columns:
    """Find the roles of the files' columns, and read the rows with these roles.

    Raises:
        UserError: there is no time or measurement, or a choice of the user does not fit the files.
    """
    with watch.step("columns"):
        table = convert_to_long(table, wishes)
        roles = find_roles(table, wishes)
        measurements, notes = _limit_measurements(roles, wishes)
        roles = roles._replace(measurements=measurements)
        keys = find_keys(table, roles, wishes)
        _refuse_time_apart(table, roles, keys, wishes)
        roles = _drop_attributes(roles, keys, wishes)
        measurements, marked = find_marks(roles.measurements, keys.code)
        roles = roles._replace(measurements=measurements)
    with watch.step("rows"):
        files = table.numbers.added_to(table.written, [one.name for one in measurements])
        spec = build_skeleton(roles, keys, wishes, files)
        source = _add_name_column(table, keys)
        parsed = parse(spec, take_columns(spec, source), input)
        rhythm = find_rhythm(keys.code[roles.time.known], parsed.time[roles.time.known])
        spec = spec.model_copy(update={"time_unit": rhythm.unit})
    notes += [*marked, *note_left_out_texts(table, roles, keys), *note_zones(table, roles.time, wishes.zone)]
    return Columns(table, files, roles, keys, rhythm, spec, source, parsed, notes)


def _limit_measurements(roles: Roles, wishes: Wishes) -> tuple[list[NumericColumn], list[str]]:
    found = roles.measurements
    if wishes.measurement or len(found) <= MOST_MEASUREMENTS:
        return found, []
    rest = ", ".join(one.name for one in found[MOST_MEASUREMENTS:])
    return found[:MOST_MEASUREMENTS], [
        f"the first {MOST_MEASUREMENTS} measurements are taken, without {rest}; name others with --measurement"
    ]


def _drop_attributes(roles: Roles, keys: Keys, wishes: Wishes) -> Roles:
    """Return roles without measurements that are constant for each key, unless all are constant or there is one key."""
    if wishes.measurement or keys.count < 2:
        return roles
    told = [one for one in roles.measurements if _is_varying_within(one.values, keys.code)]
    if not told:
        return roles
    names = {one.name for one in roles.measurements} - {one.name for one in told}
    refused = {**roles.refused, **dict.fromkeys(names, "is one number for each key")}
    return roles._replace(measurements=told, refused=refused)


def _is_varying_within(values: Floats, code: NDArray[np.int64]) -> bool:
    """Return whether numbers (N,) vary within a key.

    code: (N,) number of each row's key.
    """
    good = np.isfinite(values)
    order = np.lexsort((values[good], code[good]))
    same_key = np.diff(code[good][order]) == 0
    return bool((np.diff(values[good][order])[same_key] != 0).any())


def _refuse_time_apart(table: InputTable, roles: Roles, keys: Keys, wishes: Wishes) -> None:
    """Refuse files if another column than the columns of the found time holds a part of the time.

    Raises:
        UserError: such a column exists; the message names it.
    """
    time = roles.time
    half = find_half_day(table, time)
    if half is not None and half not in wishes.key:
        raise UserError(
            f"{table.files[0]}: '{half}' has AM and PM, which are a part of the time: write the time with it into one "
            "column, such as 03/31/2025 01:15 PM"
        )
    apart = next((name for name in keys.columns if name not in wishes.key and _has_clock(table, name)), None)
    rest = ""
    if apart is None and wishes.time is None:
        rest = f"; to go on without it, --time {shlex.quote(time.columns[0])}"
        of_keys = {name: _encode_column(table, name) for name in roles.keys if keys.from_name}
        for name, code in {"": keys.code, **of_keys}.items():
            if apart is None:
                apart = find_column_within_times(table, code, time, [name, *keys.columns, *time.columns])
                rest += f"; the series may be --key {shlex.quote(name)}" if apart is not None and name else ""
    if apart is None:
        return
    names = " and ".join(f"'{name}'" for name in time.columns)
    remedy = "write the time of each row into one column, such as 2025-03-31 13:15"
    orders = [*time.columns, apart], [apart, *time.columns]
    columns = next((one for one in orders if _is_time(table, one, wishes)), None)
    if columns is not None:
        remedy = f"name all columns of the time, --time {shlex.quote(','.join(columns))}, or {remedy}"
    raise UserError(
        f"{table.files[0]}: rows of one {names} differ in '{apart}', which may be a part of the time: {remedy}; if "
        f"'{apart}' names series, take it as --key {shlex.quote(apart)}{rest}"
    )


def _is_time(table: InputTable, columns: list[str], wishes: Wishes) -> bool:
    """Return whether columns together make a time, so that `--time` may name them."""
    try:
        join_given_parts(table, columns, wishes.zone, wishes.time_format)
    except UserError:
        return False
    return True


def _has_clock(table: InputTable, name: str) -> bool:
    return name in table.source.columns and (has_clock(table, name) or find_time_part(name) is not None)


def build_skeleton(roles: Roles, keys: Keys, wishes: Wishes, files: Files = ANY) -> ModelSpec:
    """Return a spec with the found columns, so that rows are read in the same way as by every other command."""
    one = {"kind": "random_walk", "variance": 1.0}
    names = [numbers.name for numbers in roles.measurements]
    size = range(len(names))
    process = {"kind": "sum", "parts": [{"name": f"part_{i}", **one} for i in size]}
    return ModelSpec.model_validate(
        {
            "name": "found",
            "version": 1,
            "key": keys.columns,
            "key_from_name": keys.from_name,
            "time": roles.time.written,
            "time_zone": wishes.time_zone,
            "time_format": roles.time.time_format,
            "missing_values": missing_values(roles),
            "files": files.model_copy(update={"columns": []}).model_dump(),
            "measurement": names,
            "states": [f"level_{i}" for i in size],
            "process": process,
            "observation": {"H": np.eye(len(names)).tolist(), "R": np.eye(len(names)).tolist()},
            "initial": {"diffuse": True},
        }
    )


def missing_values(roles: Roles) -> list[str]:
    """Return the texts that mean a missing measurement: the usual texts, and others that the files contain."""
    absent = {text for one in roles.measurements for text in one.absent}
    marks = {f"{mark:.15g}" for one in roles.measurements for mark in one.marks}
    return [*DEFAULT_MISSING, *sorted(absent | marks)]


def _add_name_column(table: InputTable, keys: Keys) -> RawRows:
    if keys.from_name is None:
        return table.source
    names = np.array([parse_name(path) for path in table.files], dtype=object)[table.file]
    columns = {**table.source.columns, keys.from_name: arrow.build_texts(names.tolist())}
    return table.source._replace(columns=columns)


def note_left_out_texts(table: InputTable, roles: Roles, keys: Keys) -> list[str]:
    """Return notes on unused columns of repeated texts, if no column is a key."""
    if any(name in table.source.columns for name in keys.columns):
        return []
    counts = {name: len(table.source.columns[name].unique()) for name in roles.keys if name in roles.texts}
    return [
        f"{name} holds {count:,} texts, each in about {format_count(table.source.rows // count, 'row')}, and is not "
        f"taken as a key; if each is a series of its own, give --key {shlex.quote(name)}"
        for name, count in counts.items()
        if count > 1
    ]


def name_model(input: str) -> str:
    """Return a model's name from the name of the input: a file, a folder or a glob."""
    path = Path(input)
    text = (
        path.name if path.is_dir() else parse_name(path) if path.is_file() else path.parent.name or "series"
    )
    name = re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")
    return name[:64] if name[:1].isalpha() else f"series_{name}"[:64].rstrip("_")
