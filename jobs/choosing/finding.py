"""Find a model for files: columns, key, rhythm, season, structure; then filter the files with it. No Spark."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC
from pathlib import Path
from time import perf_counter
from typing import NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
from numpy.typing import NDArray

import kalman
from jobs.choosing.columns import Given, Roles, find_roles
from jobs.choosing.held_out import FEWEST
from jobs.choosing.keys import Keys, find_keys, no_key
from jobs.choosing.missing_marks import Numbers, name_marks
from jobs.choosing.rhythm import Rhythm, find_rhythm
from jobs.choosing.search import Choice, Final, finish, search
from jobs.choosing.seasons import Season, find_season
from jobs.choosing.series import Series, sample_series
from jobs.choosing.structures import structures
from jobs.choosing.table import Table, read_table
from jobs.core.errors import UserError
from jobs.core.report import plural
from jobs.core.times import UNIT_US
from jobs.encoding import arrow
from jobs.encoding.keys import ALL_ROWS
from jobs.landing.dialects import ANY
from jobs.landing.key_from_name import name_of
from jobs.landing.parsing import ParsedRows, parse
from jobs.landing.raw_rows import Source
from jobs.landing.values.absent_values import absent_in
from jobs.offline.filtering import Fit, in_order, nis_ratio, watch
from jobs.offline.filtering import fit as fit_of
from jobs.offline.whole_files import files_of
from jobs.specs.files import Files
from jobs.specs.model_spec import DEFAULT_MISSING, ModelSpec

Floats = NDArray[np.float64]

MOST_MEASUREMENTS = 4
LONG = 20_000
"""Rows of a series times states from which on a search of its parameters takes minutes."""
LEARNT = 1_000
"""Newest rows of a series that are told to be enough to learn from."""
SEASON_KEYS = 12
"""Sampled keys whose periodograms are looked at."""


class Wishes(NamedTuple):
    """What the user says: the columns' roles, the time zone and format, the structure; and how much to try.

    keys, rows: sampled keys, and the last rows of each that structures are fitted on
    """

    time: str | None = None
    time_format: str | None = None
    time_zone: str = "UTC"
    key: list[str] = []
    key_from_name: str | None = None
    measurement: list[str] = []
    structure: str | None = None
    keys: int = 32
    rows: int = 400
    no_key: bool = False


@dataclass
class Phases:
    """Seconds of each phase, in order."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a phase."""
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start


class Filtered(NamedTuple):
    """The rows filtered with the model, each sampled key with its own parameters.

    rows (N,) sorted; mean, deviation (m, N) of the measured quantities after each row; innovations (m, N) normalised
    nis (N,); fit: the test of the sampled keys' innovations; ratio: mean NIS a measured component of them;
    of_spec: the same of all keys with the spec's numbers, which `filter` reports before anything is learned
    """

    rows: kalman.SortedRows
    mean: Floats
    deviation: Floats
    innovations: Floats
    nis: Floats
    fit: Fit
    ratio: float | None
    of_spec: float | None


class Found(NamedTuple):
    """All that was found, in the order in which it was."""

    table: Table
    files: Files
    roles: Roles
    measurements: list[Numbers]
    keys: Keys
    names: list[str]
    rhythm: Rhythm
    parsed: ParsedRows
    season: Season | None
    series: Series
    choice: Choice
    final: Final
    filtered: Filtered
    notes: list[str]
    seconds: dict[str, float]

    @property
    def rejected(self) -> int:
        """How many rows the spec rejects."""
        return int((self.parsed.reason != None).sum())  # noqa: E711 - elementwise


def find(input: str, wishes: Wishes) -> Found:
    """Find a model for the files that an input names.

    Raises:
        UserError: there is no file, time or measurement, too few rows, or a wish that cannot be met.
    """
    phase = Phases()
    zone = UTC if wishes.time_zone == "UTC" else ZoneInfo(wishes.time_zone)
    with phase("read"):
        table = read_table(files_of(input))
    with phase("columns"):
        given = Given(wishes.time, wishes.time_format, tuple(wishes.measurement), tuple(wishes.key))
        roles = find_roles(table, zone, given)
        measurements, notes = _measurements(roles, wishes)
        roles = roles._replace(measurements=measurements)
        keys = _keys(table, roles, wishes)
        measurements, marked = name_marks(measurements, keys.code)
        roles = roles._replace(measurements=measurements)
        rhythm = find_rhythm(keys.code[roles.time.known], roles.time.micros[roles.time.known])
    with phase("rows"):
        measured = [one.name for one in measurements]
        files = table.numbers.of(measured).model_copy(update={"columns": table.written.columns})
        spec = skeleton(roles, keys, rhythm, wishes, files)
        source = _with_name(table, keys)
        parsed = parse(spec, source, input)
        _, rows = in_order(parsed)
        names = _names(parsed, source, keys)
    if not len(rows.key):
        reason = next(str(one) for one in parsed.reason if one is not None)
        raise UserError(f"{input}: every row is rejected, the first for: {reason}")
    with phase("season"):
        series = sample_series(rows, parsed.keys, wishes.keys, wishes.rows)
        if series is None:
            raise UserError(
                f"{input}: no key has {FEWEST} rows with each measurement; give more rows, name another key with "
                "--key, or fewer measurements with --measurement; of short series write the spec yourself "
                "(docs/models.md)"
            )
        season = _season(rows, series, rhythm)
    if season is not None:
        most = _rows_for(season, rhythm, wishes.rows)
        series = sample_series(rows, parsed.keys, wishes.keys, most) or series
    unit = float(UNIT_US[rhythm.unit])
    with phase("fit and rank"):
        choice = search(series, structures(rhythm, season), unit, rhythm.step_in_units, wishes.structure)
    with phase("fit the choice"):
        final = finish(series, [one.name for one in measurements], choice, unit, rhythm.step_in_units)
    with phase("filter"):
        filtered = _filter(rows, parsed.keys, series, final, unit)
    notes += [
        *marked,
        *absent_in(spec, parsed, table.files),
        *_doubts(table, roles, keys, parsed, final),
        *long_series(rows, len(final.definition["states"])),
    ]
    return Found(
        table, files, roles, measurements, keys, names, rhythm, parsed, season, series, choice, final, filtered, notes,
        phase.seconds,
    )  # fmt: skip


def _measurements(roles: Roles, wishes: Wishes) -> tuple[list[Numbers], list[str]]:
    found = roles.measurements
    if wishes.measurement or len(found) <= MOST_MEASUREMENTS:
        return found, []
    rest = ", ".join(one.name for one in found[MOST_MEASUREMENTS:])
    return found[:MOST_MEASUREMENTS], [
        f"the first {MOST_MEASUREMENTS} measurements are taken, without {rest}; name others with --measurement"
    ]


def _keys(table: Table, roles: Roles, wishes: Wishes) -> Keys:
    if wishes.no_key:
        if wishes.key or wishes.key_from_name is not None:
            raise UserError("--no-key says that all rows are one series: leave out --key and --key-from-name")
        return no_key(table, "as given: all rows are one series")
    if wishes.key_from_name is not None:
        _check_free(table, wishes.key_from_name)
        code = table.file
        if not wishes.key:
            return Keys([wishes.key_from_name], wishes.key_from_name, "as given", code, len(table.files))
        given = find_keys(table, roles, wishes.key, wishes.key_from_name)
        both = np.unique(given.code * len(table.files) + code, return_inverse=True)[1]
        columns = [*wishes.key, wishes.key_from_name]
        return Keys(columns, wishes.key_from_name, "as given", both, int(both.max()) + 1)
    taken = {name.casefold() for name in (*table.source.columns, *table.partial)}
    name = next(one for one in ("series", "file", "file_name", "series_name") if one not in taken)
    return find_keys(table, roles, wishes.key, name)


def _check_free(table: Table, name: str) -> None:
    if name.casefold() in {one.casefold() for one in (*table.source.columns, *table.partial)}:
        raise UserError(
            f"--key-from-name {name}: the files have a column of that name; use --key, or another name"
        )
    if not name.isidentifier() or name.startswith("_"):
        raise UserError(f"--key-from-name {name}: use letters, digits and _, beginning with a letter")


def skeleton(roles: Roles, keys: Keys, rhythm: Rhythm, wishes: Wishes, files: Files = ANY) -> ModelSpec:
    """Return a spec with the columns that were found, to read the rows as every other command does."""
    one = {"kind": "random_walk", "variance": 1.0}
    names = [numbers.name for numbers in roles.measurements]
    process = {"kind": "sum", "parts": [{"name": name, **one} for name in names]}
    size = range(len(names))
    return ModelSpec.model_validate(
        {
            "name": "found",
            "version": 1,
            "key": keys.columns,
            "key_from_name": keys.from_name,
            "time": roles.time.name,
            "time_unit": rhythm.unit,
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
    """Return the texts that mean a missing measurement: the usual ones, and those in the files."""
    absent = {text for one in roles.measurements for text in one.absent}
    marks = {f"{mark:.15g}" for one in roles.measurements for mark in one.marks}
    return [*DEFAULT_MISSING, *sorted(absent | marks)]


def _with_name(table: Table, keys: Keys) -> Source:
    if keys.from_name is None:
        return table.source
    names = np.array([name_of(path) for path in table.files], dtype=object)[table.file]
    columns = {**table.source.columns, keys.from_name: arrow.texts(names.tolist())}
    return table.source._replace(columns=columns)


def _names(parsed: ParsedRows, source: Source, keys: Keys) -> list[str]:
    """Return each key as text, its columns' values joined by a slash."""
    if not keys.columns:
        return [ALL_ROWS]
    first = np.full(parsed.keys, 0)
    first[parsed.key[::-1]] = np.arange(len(parsed.key))[::-1]
    columns = [source.columns[name].take(arrow.integers(first)).to_pylist() for name in keys.columns]
    return ["/".join(str(value) for value in values) for values in zip(*columns, strict=True)]


def _season(rows: kalman.SortedRows, series: Series, rhythm: Rhythm) -> Season | None:
    """Return the season of the first measurement that has one."""
    starts = np.searchsorted(rows.key, series.keys)
    ends = np.searchsorted(rows.key, series.keys, "right")
    some = np.unique(
        np.linspace(0, len(series.keys) - 1, min(SEASON_KEYS, len(series.keys))).round().astype(int)
    )
    for values in rows.y:
        found = find_season(
            ((rows.time[starts[k] : ends[k]], values[starts[k] : ends[k]]) for k in some.tolist()),
            rhythm.step,
        )
        if found is not None:
            return found
    return None


def _rows_for(season: Season, rhythm: Rhythm, rows: int) -> int:
    """Return how many rows of a key to fit on, so that they hold four periods, as far as that is cheap."""
    return int(min(max(rows, 4.0 * season.period / rhythm.step), 2.5 * rows))


def _filter(rows: kalman.SortedRows, keys: int, series: Series, final: Final, unit: float) -> Filtered:
    model = kalman.build(final.definition)
    as_written = kalman.initial_states(model, keys)
    _, out = kalman.run(model, as_written, rows, unit)
    of_spec = nis_ratio(out.nis, out.flag == 0, rows.y)
    own = np.repeat(final.usual[:, None], keys, axis=1)
    own[:, series.keys] = final.parameters
    states = as_written._replace(values=model.with_parameters(as_written.values, own))
    watched = watch(model, states, rows)
    _, out = kalman.run(model, states, rows, unit, watched)
    innovations = np.full(rows.y.shape, np.nan) if watched is None else watched.normalised()
    mean, deviation = _measured(final, out)
    sampled = np.isin(rows.key, series.keys)
    number = np.zeros(keys, np.int64)
    number[series.keys] = np.arange(len(series.keys))
    part = kalman.Outputs(
        out.mean[:, sampled],
        out.covariance[:, sampled],
        out.log_likelihood[sampled],
        out.nis[sampled],
        out.flag[sampled],
        out.late[sampled],
        {},
    )
    judged = fit_of(number[rows.key[sampled]], part, len(series.keys), innovations[:, sampled])
    ratio = nis_ratio(part.nis, part.flag == 0, rows.y[:, sampled])
    return Filtered(rows, mean, deviation, innovations, out.nis, judged, ratio, of_spec)


def _measured(final: Final, out: kalman.Outputs) -> tuple[Floats, Floats]:
    """Return mean and standard deviation (m, N) of what is measured, without its noise."""
    n = len(final.composed.states)
    H = np.array(final.composed.H)
    places = np.array([[max(i, j) * (max(i, j) + 1) // 2 + min(i, j) for j in range(n)] for i in range(n)])
    mean = H @ out.mean
    used = [(h[:, None] * h).ravel() for h in H]  # an unused entry may be infinite while the start is diffuse
    packed = out.covariance[places].reshape(n * n, -1)
    with np.errstate(invalid="ignore"):  # infinity less infinity, of which no band is drawn
        variance = np.array([weights[weights != 0] @ packed[weights != 0] for weights in used])
    return mean, np.sqrt(np.maximum(variance, 0.0))


def _doubts(table: Table, roles: Roles, keys: Keys, parsed: ParsedRows, final: Final) -> list[str]:
    """Return what a person should look at."""
    notes: list[str] = []
    if roles.time.note is not None:
        notes.append(roles.time.note)
    for one in roles.measurements:
        if one.name in table.numbers.notes:
            notes.append(f"{one.name}: {table.numbers.notes[one.name]}")
    if keys.from_name is not None and keys.count == len(table.files) == 1:
        notes.append(
            "the key is the file's name: another file is another series; use --no-key if later files continue this one"
        )
    notes += left_out_texts(table, roles, keys)
    if table.cut:
        notes.append("of long files only the first rows were read; filter and ingest read all")
    if table.found > len(table.files):
        notes.append(f"{len(table.files):,} of {table.found:,} files were read")
    if final.ratio > 100.0:
        notes.append(
            f"a parameter differs between keys by a factor of {final.ratio:,.0f}: the spec has the medians, and "
            "pretrain learns each key's own"
        )
    if final.still:
        notes.append(
            f"for {final.still:,} of {plural(final.parameters.shape[1], 'sampled key')} a variance is zero: that part "
            "of the state (level, slope or season) never changes"
        )
    return notes


def left_out_texts(table: Table, roles: Roles, keys: Keys) -> list[str]:
    """Return notes on columns of few texts that are no key, where no column is one."""
    if any(name in table.source.columns for name in keys.columns):
        return []
    notes = []
    for name in roles.keys:
        count = len(table.source.columns[name].unique())
        if count > 1 and name in roles.texts:
            rows = table.source.rows // count
            notes.append(
                f"{name} holds {count:,} texts, each in about {plural(rows, 'row')}, and is not taken as a key; if "
                f"each is a series of its own, give --key {shlex.quote(name)}"
            )
    return notes


def long_series(rows: kalman.SortedRows, states: int) -> list[str]:
    """Return a note on how to learn faster, where learning from all rows of the longest series takes minutes."""
    longest = int(np.argmax(np.bincount(rows.key)))
    time = rows.time[rows.key == longest]
    if len(time) * states < LONG:
        return []
    begin = str(np.datetime64(int(time[-LEARNT]), "us"))[:10]
    return [
        f"pretrain learns from every row of a key, here up to {len(time):,} one after another, for minutes; `pretrain "
        f"--learn-from {begin}` learns from the newest alone, and filters all the same"
    ]


def file_name(input: str) -> str:
    """Return a model's name made of an input's: of the file, the folder or the glob."""
    path = Path(input)
    text = path.name if path.is_dir() else name_of(path) if path.is_file() else path.parent.name or "series"
    name = re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")
    return name[:64] if name[:1].isalpha() else f"series_{name}"[:64].rstrip("_")
