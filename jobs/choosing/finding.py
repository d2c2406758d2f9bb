"""Find the roles of the files' columns (time, key, measurements) and the rhythm of the rows. No Spark."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jobs.choosing.columns import NumericColumn, Roles, Wishes, find_marks, find_roles
from jobs.choosing.keys import Keys, find_keys
from jobs.choosing.rhythm import Rhythm, find_rhythm
from jobs.choosing.table import InputTable
from jobs.choosing.time_parts import find_column_within_times, has_clock
from jobs.choosing.wide import convert_to_long
from jobs.core.errors import UserError
from jobs.core.report import format_count
from jobs.core.stopwatch import Stopwatch
from jobs.landing.checking import ParsedRows, parse
from jobs.landing.dialects import ANY
from jobs.landing.raw_rows import RawRows
from jobs.landing.values.spec_columns import parse_name, take_columns
from jobs.specs.column_names import find_time_part
from jobs.specs.files import Files
from jobs.specs.model_spec import DEFAULT_MISSING, ModelSpec
from jobs.state.encoding import arrow

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
    notes += [*marked, *note_left_out_texts(table, roles, keys)]
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
    apart = next((name for name in keys.columns if name not in wishes.key and _has_clock(table, name)), None)
    rest = ""
    if apart is None and wishes.time is None:
        rest = f"; to go on without it, --time {shlex.quote(time.columns[0])}"
        apart = find_column_within_times(table, keys.code, time, [*keys.columns, *time.columns])
    if apart is None:
        return
    names = " and ".join(f"'{name}'" for name in time.columns)
    columns = ",".join([*time.columns, apart])
    raise UserError(
        f"{table.files[0]}: rows of one {names} differ in '{apart}', which may be a part of the time: name all "
        f"columns of the time, --time {shlex.quote(columns)}, or write the time into one column; if '{apart}' names "
        f"series, take it as --key {shlex.quote(apart)}{rest}"
    )


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
    notes: list[str] = []
    for name in roles.keys:
        count = len(table.source.columns[name].unique())
        if count > 1 and name in roles.texts:
            rows = table.source.rows // count
            notes.append(
                f"{name} holds {count:,} texts, each in about {format_count(rows, 'row')}, and is not taken "
                f"as a key; if "
                f"each is a series of its own, give --key {shlex.quote(name)}"
            )
    return notes


def name_model(input: str) -> str:
    """Return a model's name from the name of the input: a file, a folder or a glob."""
    path = Path(input)
    text = (
        path.name if path.is_dir() else parse_name(path) if path.is_file() else path.parent.name or "series"
    )
    name = re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")
    return name[:64] if name[:1].isalpha() else f"series_{name}"[:64].rstrip("_")
