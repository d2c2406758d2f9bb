"""Find a model for files: columns, key, rhythm, season, structure; then filter the files with it. No Spark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import kalman
from jobs.choosing.columns import Wishes
from jobs.choosing.finding import Columns, find_columns
from jobs.choosing.rhythm import Rhythm, Season, find_season
from jobs.choosing.samples import FEWEST, SampledSeries, sample_series
from jobs.choosing.search import Final, StructureChoice, finish, list_structures, rescale, search
from jobs.choosing.table import read_table
from jobs.core.errors import UserError
from jobs.core.report import format_count
from jobs.core.stopwatch import Stopwatch
from jobs.core.times import UNIT_US
from jobs.landing.checking import build_payloads, parse
from jobs.landing.file_rows import list_input_files
from jobs.landing.raw_rows import take_columns
from jobs.landing.reading import ALWAYS_READ, select_reader
from jobs.landing.remarks import find_absent_notes
from jobs.landing.values.rejected import describe_clock_changes, explain_reason
from jobs.offline import filtering
from jobs.offline.filtering import order_accepted_rows, select_unflagged_nis
from jobs.state.encoding import arrow
from jobs.state.encoding.keys import ALL_ROWS
from jobs.state.kernel import project_states
from jobs.state.row_filter import RowFilter
from kalman.evaluation.diagnostics import coverage
from kalman.evaluation.row_figures import INNOVATION
from kalman.filters.robust.updates import temper_innovations
from kalman.learning.key_learning import compute_goodness_of_fit
from kalman.linalg.packing import unpack

Floats = NDArray[np.float64]

LONG = 20_000
"""For a series with this number of rows times states or more, a search for its parameters takes minutes."""
LEARNT = 1_000
"""The number of a series' newest rows that the note on long series recommends for learning."""
RESCALED = 5
"""The number of times that the size of the noise of robust updates is fitted to all rows; once is exact without."""
MANY_STATES = 12
"""With more states of several measurements, `pretrain` takes minutes or refuses the model."""
SEASON_KEYS = 12
"""The number of sampled keys whose periodograms are computed."""


class Filtered(NamedTuple):
    """Rows filtered with the model, each sampled key with its learned parameters.

    rows: N sorted rows of the sampled keys, with keys numbered as in the sample.
    mean, deviation: (m, N) of the measured quantities after each row.
    innovations: (m, N) normalised.
    nis: (N,).
    fit: the test of the sampled keys' innovations.
    ratio: the mean NIS per measured component of the sampled keys.
    of_spec: this mean for all keys with the spec's numbers, as `filter` reports it before any learning.
    inside: (K,) the share of each sampled key's rows in their predicted 95 % interval.
    far, dependent: (K,) whether a sampled key's NIS is far from 1, and its innovations dependent, as for `pretrain`.
    """

    rows: kalman.SortedRows
    mean: Floats
    deviation: Floats
    innovations: Floats
    nis: Floats
    fit: filtering.ModelFit
    ratio: float | None
    of_spec: float | None
    inside: Floats
    far: NDArray[np.bool_]
    dependent: NDArray[np.bool_]


@dataclass(frozen=True)
class ModelFinding(Columns):
    """The result of the search.

    names: each key as text.
    seconds: the duration of each phase, in order.
    """

    names: list[str]
    season: Season | None
    series: SampledSeries
    choice: StructureChoice
    final: Final
    filtered: Filtered
    seconds: dict[str, float]

    @property
    def rejected(self) -> int:
        """Return the number of rows that the spec rejects."""
        return int((~self.parsed.accepted).sum())


def find(input: str, wishes: Wishes) -> ModelFinding:
    """Find a model for the files of an input.

    Raises:
        UserError: there is no file, time or measurement, there are too few rows, or a choice does not fit the files.
    """
    watch = Stopwatch()
    with watch.step("read"):
        table = read_table(list_input_files(input, ALWAYS_READ))
    columns = find_columns(input, table, wishes, watch)
    rhythm, parsed = columns.rhythm, columns.parsed
    with watch.step("rows"):
        _, rows = order_accepted_rows(parsed)
        names = _format_keys(columns)
    if not len(rows.key):
        raise UserError(f"{input}: every row is rejected, the first for: {_explain_first_rejection(columns)}")
    with watch.step("season"):
        series = sample_series(rows, parsed.keys, wishes.keys, wishes.rows)
        if series is None:
            raise UserError(
                f"{input}: no key has {FEWEST} rows with each measurement; give more rows, name another key with "
                "--key, or fewer measurements with --measurement; of short series write the spec yourself "
                "(docs/models.md)"
            )
        season = _find_season(rows, series, rhythm)
    if season is not None:
        most = int(min(max(wishes.rows, 4.0 * season.period / rhythm.step), 2.5 * wishes.rows))
        series = sample_series(rows, parsed.keys, wishes.keys, most) or series
    unit = float(UNIT_US[rhythm.unit])
    with watch.step("fit and rank"):
        choice = search(series, list_structures(rhythm, season), unit, rhythm.step_in_units, wishes.structure)
    names_of, mine = columns.spec.measurement, _take_sampled(rows, series)
    with watch.step("fit the choice"):
        final = finish(series, names_of, choice, unit, rhythm.step_in_units)
        for _ in range(RESCALED if choice.robust else 1):
            scale = _measure_noise(mine, _run(mine, final, unit)[1], len(series.keys))
            final = rescale(final, choice, names_of, scale)
    with watch.step("filter"):
        filtered = _filter(rows, parsed.keys, mine, final, unit)
    columns.notes.extend(
        [
            *find_absent_notes(columns.spec, parsed, table.files),
            *(note.removeprefix("note: ") for note in describe_clock_changes(columns.spec, parsed.clocks)),
            *_list_doubts(columns, final),
            *note_long_series(rows, len(final.definition["states"])),
        ]
    )
    return ModelFinding(
        **vars(columns),
        names=names,
        season=season,
        series=series,
        choice=choice,
        final=final,
        filtered=filtered,
        seconds=watch.seconds,
    )


def _explain_first_rejection(columns: Columns) -> str:
    """Return why the first rejected row of the files is rejected, with the remedy."""
    reader = select_reader(columns.spec, str(columns.table.files[0]))
    source = next(one for piece in reader.pieces() for one in reader.sources(piece) if one.rows)
    parsed = parse(columns.spec, take_columns(columns.spec, source), str(columns.table.files[0]))
    place = int(np.argmin(parsed.accepted))
    first = np.arange(source.rows) == place
    return explain_reason(
        columns.spec, str(parsed.reason[place]), build_payloads(source, first)[place].as_py()
    )


def _format_keys(found: Columns) -> list[str]:
    """Return each key as text: its columns' values joined by a slash."""
    parsed, keys = found.parsed, found.keys
    if not keys.columns:
        return [ALL_ROWS]
    first = np.full(parsed.keys, 0)
    first[parsed.key[::-1]] = np.arange(len(parsed.key))[::-1]
    columns = [
        found.source.columns[name].take(arrow.build_integers(first)).to_pylist() for name in keys.columns
    ]
    return ["/".join(str(value) for value in values) for values in zip(*columns, strict=True)]


def _find_season(rows: kalman.SortedRows, series: SampledSeries, rhythm: Rhythm) -> Season | None:
    """Return the season of the first measurement that has one; None if no measurement has a season."""
    starts = np.searchsorted(rows.key, series.keys)
    ends = np.searchsorted(rows.key, series.keys, "right")
    some = np.unique(
        np.linspace(0, len(series.keys) - 1, min(SEASON_KEYS, len(series.keys))).round().astype(int)
    )
    places = [slice(starts[k], ends[k]) for k in some]
    found = (find_season([(rows.time[at], values[at]) for at in places], rhythm.step) for values in rows.y)
    return next((one for one in found if one is not None), None)


def _take_sampled(rows: kalman.SortedRows, series: SampledSeries) -> kalman.SortedRows:
    """Return all rows of the sampled keys, with keys numbered as in the sample."""
    mine = rows.take(np.isin(rows.key, series.keys))
    return mine._replace(key=np.searchsorted(series.keys, mine.key))


def _run(rows: kalman.SortedRows, final: Final, unit: float) -> tuple[kalman.Outputs, Floats]:
    """Filter the sampled keys' rows, each key with its learned parameters.

    Also return the innovations (m, N), normalised and, for robust updates, tempered as `pretrain` does.
    """
    model = kalman.build(final.definition)
    states = kalman.initial_states(model, final.parameters.shape[1])
    states = states._replace(values=model.with_parameters(states.values, final.parameters))
    out = RowFilter(model, unit, (INNOVATION,)).run(states, rows)[1]
    white, noise = out.extra[INNOVATION], getattr(getattr(model, "robust", None), "noise", None)
    return out, np.where(out.flag == 0, temper_innovations(noise, white) if noise else white, np.nan)


def _measure_noise(rows: kalman.SortedRows, white: Floats, keys: int) -> Floats:
    """Return the mean square of the normalised innovations (m, K) of each key; 1 if it is unknown or zero."""
    scale = np.array([compute_goodness_of_fit(rows.key, one[None], keys, 0)[0] for one in white])
    return np.where(scale > 0.0, scale, 1.0)


def _filter(
    rows: kalman.SortedRows, keys: int, mine: kalman.SortedRows, final: Final, unit: float
) -> Filtered:
    model = kalman.build(final.definition)
    _, out = kalman.run(model, kalman.initial_states(model, keys), rows, unit)
    of_spec = filtering.compute_nis_ratio(select_unflagged_nis(out), rows.y)
    (out, white), count = _run(mine, final, unit), final.parameters.shape[1]
    n = len(final.composed.states)
    covariance = unpack(out.covariance).reshape(n, n, -1).transpose(2, 0, 1)
    measured = [project_states(out.mean.T, covariance, np.array(row), 0.0) for row in final.composed.H]
    mean, variance = (np.array(one) for one in zip(*measured, strict=True))
    nis = select_unflagged_nis(out)
    tempered = np.where(np.isfinite(nis), np.nansum(white**2, axis=0), np.nan)
    judged = filtering.fit(mine.key, tempered, count, white)
    of_key, p_value, values = compute_goodness_of_fit(mine.key, white, count, len(final.usual))
    far, dependent = filtering.find_misfits(values, of_key, p_value)
    several, keys_rows = np.isfinite(mine.y).sum(axis=0), [mine.key == k for k in range(count)]
    shares = np.array([coverage(nis[which], several[which]) for which in keys_rows])
    ratio = filtering.compute_nis_ratio(tempered, mine.y)
    deviation = np.sqrt(np.maximum(variance, 0.0))
    return Filtered(
        mine, mean, deviation, out.extra[INNOVATION], out.nis, judged, ratio, of_spec, shares, far, dependent
    )


def _list_doubts(found: Columns, final: Final) -> list[str]:
    """Return the doubts that a person should check."""
    table, roles, keys = found.table, found.roles, found.keys
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
    if table.cut:
        notes.append("of long files only the first rows were read; filter and ingest read all")
    if table.found > len(table.files):
        notes.append(f"{len(table.files):,} of {table.found:,} files were read")
    if final.ratio > 100.0:
        notes.append(
            f"a parameter differs between keys by a factor of {final.ratio:,.0f}: the spec has the medians, and "
            "pretrain learns each key's own"
        )
    if len(final.composed.H) > 1 and (states := len(final.composed.states)) > MANY_STATES:
        notes.append(f"{states} states are many to learn together; --measurement makes a model of one column")
    if final.still:
        notes.append(
            f"for {final.still:,} of {format_count(final.parameters.shape[1], 'sampled key')} a variance is "
            f"zero: that part "
            "of the state (level, slope or season) never changes"
        )
    return notes


def note_long_series(rows: kalman.SortedRows, states: int) -> list[str]:
    """Return a note on faster learning if learning from all rows of the longest series would take minutes."""
    longest = int(np.argmax(np.bincount(rows.key)))
    time = rows.time[rows.key == longest]
    if len(time) * states < LONG:
        return []
    begin = str(np.datetime64(int(time[-LEARNT]), "us"))[:10]
    return [
        f"pretrain learns from every row of a key, here up to {len(time):,} one after another, for minutes; `pretrain "
        f"--learn-from {begin}` learns from the newest alone, and filters all the same"
    ]
