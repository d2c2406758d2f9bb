"""Recompute some keys of a generation from its snapshot and their landed rows, and compare. Needs no Spark.

The filter is the stream's filter. Rows are applied in the stream's order: by micro-batch, then by event time, then by
their values. If late rows are replayed, the order is by event time alone. The division of rows into calls changes no
bit of a result, so one call for all micro-batches gives the same bits as the stream.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jobs.snapshots.state_rows import count_state_numbers, find_state_extras_widths
from jobs.state.encoding.estimates import EstimateFormat, locate_packed_full
from jobs.state.encoding.keys import KeyKind
from jobs.state.encoding.packets import CONTROL, MEASURED, NEVER, Records
from jobs.state.encoding.routing import compute_routes
from jobs.state.encoding.rows import KeyedRows
from jobs.state.expiry import run_lives
from jobs.state.filter_step import Begin
from jobs.state.row_filter import RowFilter
from jobs.verification.matching import (
    Bools,
    CodedRows,
    Fates,
    Floats,
    Ints,
    apply_corrections,
    convert_to_bits,
    match_fates,
    number_elements,
)
from jobs.verification.runs import COUNTS, SHOWN, Findings, describe_difference, sum_findings
from kalman.filters.numerics import NUMERICS, may_differ
from kalman.flags import FLAGS
from kalman.run import KeyStates, Outputs, SortedRows, initial_states
from kalman.types import Filter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

FINDINGS = f"{', '.join(f'{name} bigint' for name in COUNTS)}, firsts string"
"""Columns of the output of `check_partitions`, which has one row per partition."""


class Kind(IntEnum):
    """Kind of a row in the checker's input."""

    ROW = 0
    REFUSED = 1
    REFUSED_STATE = 2
    WAITING = 3
    ESTIMATE = 4
    SEED = 5
    OFFER = 6
    END = 7


class Recipe(NamedTuple):
    """The settings to recompute the keys of a generation; they are sent to the executors.

    kernel, unit, begin, idle: as in the stream (`jobs.state.plan.Plan`).
    kind, estimates: the formats of keys and estimates.
    measured, controls, landed: number of measurements in a row, number of controls, and number of landed values.
    stored: the NumPy type in which states are stored.
    in_order: whether rows are applied by event time, regardless of their micro-batch.
    replays: whether a row may have corrected estimates, of which the last one counts.
    forgets: whether maintenance may have removed rows from quarantine.
    apply_late: whether a late row is applied at its state's time.
    has_end: whether to compare the states at the end.
    expired_before: the event time before which states may have expired.
    since: the event time before which estimates are recomputed but not compared.
    tolerance: the relative difference up to which numbers count as close.
    numerics: the version of the numerics with which the generation began.
    """

    kernel: Filter
    unit: float
    kind: KeyKind
    estimates: EstimateFormat
    measured: int
    controls: int
    landed: int
    stored: str
    begin: Begin | None = None
    idle: int | None = None
    in_order: bool = False
    replays: bool = False
    forgets: bool = False
    apply_late: bool = False
    has_end: bool = True
    expired_before: int = NEVER
    since: int = NEVER
    tolerance: float = 0.0
    numerics: int = NUMERICS

    @property
    def names(self) -> list[str]:
        """Return the names of an estimate's numbers."""
        fmt = self.estimates
        p = fmt.states**2
        extra = [f"{name}[{i}]" for name, width in fmt.extra for i in range(width)]
        moments = [f"mean[{i}]" for i in range(fmt.states)] + [f"covariance[{i}]" for i in range(p)]
        return [*moments, "log_likelihood", "nis", *extra]

    @property
    def optional(self) -> list[Ints]:
        """Return groups of positions of numbers that the spec may omit: covariances, and each additional output."""
        n = self.estimates.states
        off = np.array([n + i * n + j for i in range(n) for j in range(n) if i != j], np.int64)
        sections, at = [off], n + n * n + 2
        for _, width in self.estimates.extra:
            sections.append(np.arange(at, at + width))
            at += width
        return [one for one in sections if len(one)]


class States(NamedTuple):
    """States of K keys in the form of a snapshot: counts, event times, log-likelihoods and (d, K) numbers.

    there: whether a key has a state.
    """

    there: Bools
    count: Ints
    event_time: Ints
    log_likelihood: Floats
    numbers: Floats


class PairwiseComparison(NamedTuple):
    """Which of N pairs differ, which agree only within the tolerance, and the first number that differs (-1: none)."""

    differ: Bools
    close: Bools
    first: Ints


def check(recipe: Recipe, table: pa.Table) -> Findings:
    """Compare a partition's rows and states with the recomputed rows and states.

    Args:
        recipe: the settings to recompute the generation.
        table: all rows of each key, with the columns kind, key, time, batch, place, numbers, flag, count,
            log_likelihood.
    """
    inputs, width = _encode_keys(table), recipe.measured + recipe.controls
    rows = inputs.part(Kind.ROW, width)
    refused, bad = _join_refused(
        *(inputs.part(one, recipe.landed) for one in (Kind.REFUSED, Kind.REFUSED_STATE))
    )
    estimates, flags = inputs.part(Kind.ESTIMATE, len(recipe.names)), inputs.flags(Kind.ESTIMATE)
    corrected = np.flatnonzero(estimates.place) if recipe.replays else np.empty(0, np.int64)
    first = np.setdiff1d(np.arange(len(estimates.code)), corrected)
    known = match_fates(rows, refused, bad, inputs.part(Kind.WAITING, width), estimates.take(first))
    if recipe.replays:
        known = apply_corrections(known, rows, estimates, first)
    return _Check(recipe, inputs.keys, inputs, rows, known, estimates, flags, refused, bad).findings()


def _encode_keys(table: pa.Table) -> _Inputs:
    """Return a partition's table with numbered keys."""
    column = table.column("key")
    coded = pa.concat_arrays(column.chunks).dictionary_encode()
    return _Inputs(table, coded.indices.to_numpy(zero_copy_only=False).astype(np.int64), coded.dictionary)


class _Inputs(NamedTuple):
    """The table of a partition, the number of each row's key, and the keys."""

    table: pa.Table
    code: Ints
    keys: pa.Array

    def where(self, kind: Kind) -> Ints:
        return np.flatnonzero(self.table.column("kind").to_numpy() == kind)

    def part(self, kind: Kind, width: int) -> CodedRows:
        which = self.where(kind)
        some = self.table.take(pa.array(which))
        time, batch, place = (
            some.column(name).fill_null(0).to_numpy() for name in ("time", "batch", "place")
        )
        return CodedRows(self.code[which], time, batch, place, _convert_matrix(some.column("numbers"), width))

    def flags(self, kind: Kind) -> NDArray[Any]:
        some = self.table.column("flag").take(pa.array(self.where(kind)))
        return np.array(some.to_pylist(), dtype=object)

    def states(self, kind: Kind, width: int) -> States:
        """Return the states of all keys; `there` is whether a key has a state. Of several states of a key, the last
        counts.
        """
        which, size = self.where(kind), len(self.keys)
        some = self.table.take(pa.array(which))
        at = np.full(size, -1)
        at[self.code[which]] = np.arange(len(which))

        def of(name: str) -> NDArray[Any]:
            values = some.column(name).fill_null(0).to_numpy()
            return np.where(at >= 0, values[at], 0) if len(values) else np.zeros(size, values.dtype)

        numbers = np.zeros((width, size))
        found = _convert_matrix(some.column("numbers"), width)
        if len(which):
            numbers[:, at >= 0] = found[:, at[at >= 0]]
        return States(at >= 0, of("count"), of("time"), of("log_likelihood"), numbers)


class _Attempt(NamedTuple):
    """Recomputed keys: (D, N) numbers and flags of the rows, and the states at the end."""

    numbers: Floats
    flags: NDArray[np.uint8]
    states: KeyStates


class _Check(NamedTuple):
    """Comparison of one partition."""

    recipe: Recipe
    keys: pa.Array
    inputs: _Inputs
    rows: CodedRows
    fates: Fates
    estimates: CodedRows
    flags: NDArray[Any]
    refused: CodedRows
    bad: Bools

    def findings(self) -> Findings:
        """Recompute, compare and count."""
        known, rows = self.fates, self.rows
        applied, unrecorded = self._find_applied_rows()
        attempt, compared, ends, taken = self._choose_best(applied)
        undecided = self._find_undecided_keys(applied, compared, ends)
        compared = _clear_differences(compared, undecided[rows.code[applied]])
        ends = ends and _clear_differences(ends, undecided)
        explained = self._find_numerics_keys(taken)
        numerics = compared.differ & explained[rows.code[applied]]
        compared = compared._replace(differ=compared.differ & ~numerics)
        expecting = (known.refusal[applied] < 0) & (rows.time[applied] >= self.recipe.since)
        missing = applied[expecting & (known.estimate[applied] < 0)]
        paired = expecting & (known.estimate[applied] >= 0)
        counted = {
            "rows": rows.place >= 0,
            "different": compared.differ,
            "close": compared.close,
            "equal": paired & ~compared.differ & ~compared.close & ~numerics,
            "refused": known.refusal >= 0,
            "waiting": known.waits,
            "undecided": undecided,
            "numerics": numerics,
            "doubled": known.doubled,
            "strange": known.strange,
            "baseless": known.baseless,
        }
        firsts = [*self._describe_differing(applied, compared, attempt), *self._describe_misplaced(missing)]
        if ends is not None:
            kept, made = self._read_states(Kind.END).there, attempt.states.count > 0
            others = ends.differ & explained & kept & made
            ends = _clear_differences(ends, others)
            counted |= {
                "states_numerics": others,
                "states_different": ends.differ,
                "states_close": ends.close,
            }
            counted["states"] = (kept | made) & ~ends.differ & ~ends.close & ~others
            firsts += self._describe_ends(ends)
        counts = {name: int(np.count_nonzero(which)) for name, which in counted.items()}
        lengths = {"keys": len(self.keys), "unrecorded": len(unrecorded), "missing": len(missing)}
        return Findings.of(*firsts, **counts, **lengths)

    def _find_numerics_keys(self, taken: Bools) -> Bools:
        """Return the keys whose differences are excused because the generation began with other numerics.

        taken: the keys that began with their offered state.
        """
        recipe, fresh = self.recipe, self._fresh()
        begin = self._states(Kind.SEED, fresh)
        values = np.where(taken, self._build_offered_states(begin).values, begin.values)
        explained = may_differ(recipe.kernel, values, recipe.numerics)
        if recipe.idle is not None:  # an expired key begins anew
            explained |= may_differ(recipe.kernel, fresh.values, recipe.numerics)
        return explained

    def _find_undecided_keys(
        self, applied: Ints, compared: PairwiseComparison, ends: PairwiseComparison | None
    ) -> Bools:
        """Return the keys whose differences are excused because the stream's order of rows with one time is unknown.

        This can happen if late rows are replayed, and other rows of their time had left the replay window.
        """
        size, code = len(self.keys), self.rows.code[applied]
        wrong = np.bincount(code[compared.differ], minlength=size) > 0
        if ends is not None:
            wrong |= ends.differ
        same = np.zeros(len(applied), bool)
        same[1:] = (code[1:] == code[:-1]) & (np.diff(self.rows.time[applied]) == 0)
        tied = np.bincount(code[same], minlength=size) > 0
        return wrong & tied if self.recipe.replays else np.zeros(size, bool)

    def _choose_best(
        self, applied: Ints
    ) -> tuple[_Attempt, PairwiseComparison, PairwiseComparison | None, Bools]:
        """Recompute and compare; a key with an offered state begins with this state if the result fits better.

        A key that had rows before the stream took the offer did not begin with the offered state. The last item of the
        result marks the keys that began with it.
        """
        begin = self._states(Kind.SEED, self._fresh())
        attempt = self._filter_applied(applied, begin)
        compared, ends = self._compare_both(applied, attempt)
        offered, better = self._build_offered_states(begin), np.zeros(len(self.keys), bool)
        if offered is not begin:
            other = self._filter_applied(applied, offered)
            size = len(self.keys)
            code = self.rows.code[applied]
            also, other_ends = self._compare_both(applied, other)
            wrong, wrong_too = (
                np.bincount(code[one.differ], minlength=size)
                + (0 if end is None else end.differ.astype(np.int64))
                for one, end in ((compared, ends), (also, other_ends))
            )
            better = wrong_too < wrong
            compared = _choose_pairs(compared, also, better[code])
            if ends is not None and other_ends is not None:
                ends = _choose_pairs(ends, other_ends, better)
        reach = self.rows.time[applied] >= self.recipe.since
        reached = PairwiseComparison(compared.differ & reach, compared.close & reach, compared.first)
        return attempt, reached, ends, better

    def _build_offered_states(self, begin: KeyStates) -> KeyStates:
        """Return the initial states of keys under the assumption that offers were taken; keys of the snapshot take
        none.
        """
        return self._states(Kind.OFFER, begin, ~self._read_states(Kind.SEED).there)

    def _compare_both(
        self, applied: Ints, attempt: _Attempt
    ) -> tuple[PairwiseComparison, PairwiseComparison | None]:
        """Compare the estimates, and the states at the end if the segment has them."""
        return self._compare_estimates(applied, attempt), self._ends(attempt) if self.recipe.has_end else None

    def _find_applied_rows(self) -> tuple[Ints, Ints]:
        """Return the positions of applied rows in their order of application, and the positions of late rows without a
        record.
        """
        known, rows, recipe = self.fates, self.rows, self.recipe
        taken = ~known.waits & ((known.refusal < 0) | self._is_bad())
        which = np.flatnonzero(taken)
        y = rows.numbers
        batch = np.zeros(len(which), np.int64) if recipe.in_order else known.batch[which]
        columns = (*(column[which] for column in y[::-1]), rows.time[which], batch, rows.code[which])
        order = which[np.lexsort(columns)]
        # Such a late row is in no table: maintenance has removed it from quarantine.
        lost = (known.estimate[order] < 0) & (known.refusal[order] < 0)
        if recipe.in_order and recipe.forgets:
            return order[~lost], order[lost]
        if not lost.any() or recipe.in_order or recipe.apply_late:
            return order, np.empty(0, np.int64)
        newest = _compute_running_max(rows.code[order], np.where(lost, NEVER, rows.time[order]))
        seeds = self._read_states(Kind.SEED)
        held = np.where(seeds.there & (seeds.count > 0), seeds.event_time, NEVER)
        late = lost & (rows.time[order] < np.maximum(newest, held[rows.code[order]]))
        return order[~late], order[late]

    def _is_bad(self) -> Bools:
        """Return whether the filter applied each row (N,) and left its key without a valid state."""
        refusal = self.fates.refusal
        return (refusal >= 0) & self.bad[refusal] if len(self.bad) else np.zeros(len(refusal), bool)

    def _read_states(self, kind: Kind) -> States:
        return self.inputs.states(kind, count_state_numbers(self.recipe.kernel))

    def _fresh(self) -> KeyStates:
        """Return the initial states of new keys."""
        recipe, size = self.recipe, len(self.keys)
        fresh = initial_states(recipe.kernel, size)
        if recipe.begin is None or size == 0:
            return fresh
        if recipe.kind.integer:
            keys = Records({"route": compute_routes(self.keys.cast(pa.int64()).to_numpy())}, None)
        else:
            keys = Records({"route": np.arange(size, dtype=np.uint64)}, self.keys.cast(pa.string()))
        none = SortedRows(np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, 0)), np.empty((0, 0)))
        return fresh._replace(values=recipe.begin(KeyedRows(keys, none)))

    def _states(self, kind: Kind, fresh: KeyStates, wanted: Bools | None = None) -> KeyStates:
        """Return the states of all keys: states of this kind where a key has one, and initial states for all other
        keys.
        """
        recipe, given = self.recipe, self._read_states(kind)
        there = given.there if wanted is None else given.there & wanted
        if not there.any():
            return fresh
        n, widths = recipe.estimates.states, find_state_extras_widths(recipe.kernel)
        sections = np.split(given.numbers, np.cumsum([n, n * n, *widths.values()])[:-1])
        mean, covariance, *parts = (np.ascontiguousarray(one[:, there]) for one in sections)
        restored = recipe.kernel.restore(mean, covariance, dict(zip(widths, parts, strict=True)))
        states = fresh.take(np.arange(len(self.keys)))
        states.values[:, there] = restored.astype(recipe.stored).astype(np.float64)
        states.event_time[there] = given.event_time[there]
        states.count[there] = given.count[there]
        states.log_likelihood[there] = given.log_likelihood[there]
        return states

    def _filter_applied(self, applied: Ints, begin: KeyStates) -> _Attempt:
        """Filter the applied rows."""
        recipe, rows = self.recipe, self.rows
        row_filter = RowFilter(recipe.kernel, recipe.unit, recipe.estimates.beside)
        m = recipe.measured
        y = np.ascontiguousarray(rows.numbers[:m, applied])
        u = np.ascontiguousarray(rows.numbers[m:, applied])
        sorted_rows = SortedRows(rows.code[applied], rows.time[applied], y, u)
        if recipe.apply_late:
            after, outputs = _filter_batches(row_filter, begin, sorted_rows, self.fates.batch[applied])
        elif recipe.idle is not None and len(applied):
            lives = run_lives(row_filter, begin, self._fresh(), sorted_rows, recipe.idle)
            after, outputs = lives.after, lives.outputs
        else:
            after, outputs = row_filter.run(begin, sorted_rows)
        of_row = {MEASURED: y, CONTROL: u}
        return _Attempt(_stack_numbers(recipe.estimates, outputs, of_row), outputs.flag, after)

    def _compare_estimates(self, applied: Ints, attempt: _Attempt) -> PairwiseComparison:
        """Compare the applied rows' estimates with the recomputed numbers."""
        size = len(applied)
        result = PairwiseComparison(np.zeros(size, bool), np.zeros(size, bool), np.full(size, -1))
        estimate = self.fates.estimate[applied]
        mine = np.flatnonzero(estimate >= 0)
        if len(mine) == 0:
            return result
        theirs = estimate[mine]
        numbers = self.estimates.numbers
        expected = attempt.numbers[:, mine]
        for section in self.recipe.optional:
            omitted = np.isnan(numbers[np.ix_(section, theirs)]).all(axis=0)
            expected[np.ix_(section, np.flatnonzero(omitted))] = np.nan
        batch = self.fates.batch[applied[mine]]
        theirs = _align_ties(self.rows.take(applied[mine]), batch, expected, theirs, numbers)
        found = compare(expected, numbers[:, theirs], self.recipe.tolerance)
        names = np.array(FLAGS, dtype=object)[attempt.flags[mine]]
        flagged = np.array([a != b for a, b in zip(names, self.flags[theirs], strict=True)], bool)
        result.differ[mine] = found.differ | flagged
        result.close[mine] = found.close & ~flagged
        result.first[mine] = np.where(flagged & ~found.differ, len(expected), found.first)
        return result

    def _ends(self, attempt: _Attempt) -> PairwiseComparison:
        """Compare the states at the end with the recomputed states."""
        recipe, found = self.recipe, self._read_states(Kind.END)
        values, count, event_time, log_likelihood = (
            getattr(attempt.states, name) for name in ("values", "count", "event_time", "log_likelihood")
        )
        mean, covariance, extras = recipe.kernel.snapshot(values.astype(recipe.stored).astype(np.float64))
        numbers = np.vstack([mean, covariance, *extras.values()])
        there, both = count > 0, (count > 0) & found.there
        compared = compare_states(
            States(there, count, event_time, log_likelihood, numbers), found, recipe.tolerance
        )
        absent = there & ~found.there & (event_time >= recipe.expired_before)
        differ = both & compared.differ | found.there & ~there | absent
        return PairwiseComparison(differ, both & compared.close & ~differ, compared.first)

    def _describe_differing(
        self, applied: Ints, compared: PairwiseComparison, attempt: _Attempt
    ) -> Iterator[dict[str, Any]]:
        """Yield a description of the first differing estimate of each of some keys."""
        names = [*self.recipe.names, "flags"]
        which = np.flatnonzero(compared.differ)
        _, first = np.unique(self.rows.code[applied[which]], return_index=True)
        for i in which[np.sort(first)][:SHOWN].tolist():
            field = int(compared.first[i])
            what = f"{names[field]} differs from what the row gives"
            if field < len(attempt.numbers):
                found = self.estimates.numbers[field, self.fates.estimate[applied[i]]]
                what = f"{names[field]} is {found!r}, and recomputed {attempt.numbers[field, i]!r}"
            yield self._describe_row(self.rows, int(applied[i]), int(self.fates.batch[applied[i]]), what)

    def _describe_misplaced(self, missing: Ints) -> Iterator[dict[str, Any]]:
        """Yield descriptions of rows, estimates and refusals without a counterpart."""
        known = self.fates
        yield from self._named(self.rows, missing, "the row has no estimate and is not in quarantine")
        for part, which, what in (
            (self.estimates, known.doubled, "the row has the estimate twice"),
            (self.estimates, known.strange, "the estimate is of no landed row"),
            (self.refused, known.baseless, "the row in quarantine is no landed one, or is there twice"),
        ):
            yield from self._named(part, np.flatnonzero(which), what)

    def _named(self, part: CodedRows, which: Ints, what: str) -> Iterator[dict[str, Any]]:
        for i in which[:SHOWN].tolist():
            yield self._describe_row(part, i, None if part is self.rows else int(part.batch[i]), what)

    def _describe_row(self, part: CodedRows, i: int, batch: int | None, what: str) -> dict[str, Any]:
        at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=int(part.time[i]))
        key = self.keys[int(part.code[i])].as_py()
        return {"key": key, "event_time": at.isoformat(), "batch": batch, "what": what}

    def _describe_ends(self, ends: PairwiseComparison) -> Iterator[dict[str, Any]]:
        for i in np.flatnonzero(ends.differ)[:SHOWN].tolist():
            what = "the state at the end is not the one that its rows give"
            yield {"key": self.keys[i].as_py(), "event_time": None, "batch": None, "what": what}


def compare(expected: Floats, found: Floats, tolerance: float) -> PairwiseComparison:
    """Compare two (d, N) arrays of numbers, bit by bit and within a relative tolerance."""
    unequal = convert_to_bits(expected) != convert_to_bits(found)
    near = np.zeros_like(unequal)
    if tolerance > 0 and unequal.any():
        scale = np.maximum(np.abs(expected), np.abs(found))
        with np.errstate(invalid="ignore"):
            near = unequal & (np.abs(expected - found) <= tolerance * scale)
    differ = (unequal & ~near).any(axis=0)
    first = (
        np.where(differ, np.argmax(unequal & ~near, axis=0), -1)
        if len(expected)
        else np.full(len(differ), -1)
    )
    return PairwiseComparison(differ, unequal.any(axis=0) & ~differ, first)


def compare_states(expected: States, found: States, tolerance: float) -> PairwiseComparison:
    """Compare the numbers, counts and event times of K states."""
    numbers = compare(
        np.vstack([expected.numbers, expected.log_likelihood]),
        np.vstack([found.numbers, found.log_likelihood]),
        tolerance,
    )
    other = (expected.count != found.count) | (expected.event_time != found.event_time)
    return numbers._replace(differ=numbers.differ | other)


def check_states(width: int, tolerance: float, table: pa.Table, by_numerics: bool = False) -> Findings:
    """Compare found states (kind `END`) with the expected states (kind `SEED`), of `width` numbers per key.

    by_numerics: whether a difference is excused because other numerics filtered the states; a missing state never is.
    """
    inputs = _encode_keys(table)
    expected, found = inputs.states(Kind.SEED, width), inputs.states(Kind.END, width)
    compared = compare_states(expected, found, tolerance)
    differ = compared.differ | (expected.there != found.there)
    others = differ & expected.there & found.there & by_numerics
    differ &= ~others
    what = "the snapshot's state is not the one that its lineage gives"
    some = np.flatnonzero(differ)[:SHOWN].tolist()
    return Findings.of(
        *(describe_difference(what, inputs.keys[i].as_py()) for i in some),
        states_numerics=int(np.count_nonzero(others)),
        states_different=int(np.count_nonzero(differ)),
        states_close=int(np.count_nonzero(compared.close & ~differ)),
        states=int(np.count_nonzero(~compared.close & ~differ & ~others)),
    )


def collect_findings(
    parts: DataFrame, check_one: Callable[[pa.Table], Findings], generation: str
) -> Findings:
    """Check the rows of each partition; return the sum of the findings, labelled with the generation or snapshot."""
    rows = parts.mapInArrow(check_partitions(check_one), FINDINGS).collect()
    total = sum_findings(
        Findings({name: row[name] for name in COUNTS}, json.loads(row["firsts"])) for row in rows
    )
    return Findings(total.counts, [{**one, "generation": generation} for one in total.firsts])


def check_partitions(check_one: Callable[[pa.Table], Findings]) -> Any:
    """Return a function that checks the rows in a partition's Arrow batches, and yields rows of `FINDINGS`."""

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        parts = [batch for batch in batches if batch.num_rows]
        if parts:
            found = check_one(pa.Table.from_batches(parts))
            columns = {name: [found.counts[name]] for name in COUNTS}
            yield pa.RecordBatch.from_pydict({**columns, "firsts": [json.dumps(found.firsts)]})

    return work


def _stack_numbers(fmt: EstimateFormat, outputs: Outputs, of_row: Mapping[str, Floats]) -> Floats:
    """Return the numbers (D, N) of estimates, in the order of the table's columns.

    of_row: additional outputs that are values of the rows.
    """
    extra = [of_row[name] if name in of_row else outputs.extra[name] for name, _ in fmt.extra]
    return np.vstack(
        [
            outputs.mean,
            outputs.covariance[locate_packed_full(fmt.states)],
            outputs.log_likelihood,
            outputs.nis,
            *extra,
        ]
    )


def _filter_batches(
    row_filter: RowFilter, states: KeyStates, rows: SortedRows, batch: Ints
) -> tuple[KeyStates, Outputs]:
    """Apply rows one micro-batch after another, and late rows at their state's time."""
    parts: list[tuple[Ints, Outputs]] = []
    for number in np.unique(batch):
        which = np.flatnonzero(batch == number)
        some = rows.take(which)
        held = np.where(states.count > 0, states.event_time, NEVER)
        some = some._replace(time=np.maximum(some.time, held[some.key]))
        states, outputs = row_filter.run(states, some)
        parts.append((which, outputs))
    if not parts:
        return row_filter.run(states, rows)
    back = np.argsort(np.concatenate([which for which, _ in parts]))
    several = [outputs for _, outputs in parts]
    extra = {
        name: np.concatenate([one.extra[name] for one in several], -1)[:, back] for name in several[0].extra
    }
    columns = zip(*(one[:-1] for one in several), strict=True)
    return states, Outputs(*(np.concatenate(some, -1)[..., back] for some in columns), extra=extra)


def _align_ties(rows: CodedRows, batch: Ints, expected: Floats, theirs: Ints, numbers: Floats) -> Ints:
    """Return the estimates of rows, reordered among rows with the same key, time and micro-batch.

    The table does not record which estimate belongs to which of these rows, so the bits of the numbers order both
    sides.
    """
    tie = number_elements([rows.code, rows.time, batch])
    tied = np.flatnonzero(np.bincount(tie)[tie] > 1)
    if len(tied) == 0:
        return theirs
    left = tied[np.lexsort((*convert_to_bits(expected[:, tied]), tie[tied]))]
    right = theirs[tied][np.lexsort((*convert_to_bits(numbers[:, theirs[tied]]), tie[tied]))]
    result = theirs.copy()
    result[left] = right
    return result


def _compute_running_max(code: Ints, time: Ints) -> Ints:
    """Return the maximum time of the same key's earlier elements (N,), else `NEVER`; a key's elements are adjacent."""
    result = np.full(len(code), NEVER)
    starts = np.flatnonzero(np.concatenate([[True], code[1:] != code[:-1]])) if len(code) else []
    for start, stop in zip(starts, [*starts[1:], len(code)], strict=True):
        result[start + 1 : stop] = np.maximum.accumulate(time[start : stop - 1])
    return result


def _clear_differences(one: PairwiseComparison, which: Bools) -> PairwiseComparison:
    """Return a comparison in which the pairs selected by `which` do not differ."""
    return one._replace(differ=one.differ & ~which)


def _choose_pairs(one: PairwiseComparison, other: PairwiseComparison, which: Bools) -> PairwiseComparison:
    """Return the results of `other` where `which` is true, else those of `one`."""
    return PairwiseComparison(*(np.where(which, b, a) for a, b in zip(one, other, strict=True)))


def _join_refused(refused: CodedRows, bad: CodedRows) -> tuple[CodedRows, Bools]:
    """Return the rows of both arguments as one, and for each row whether it is from `bad`."""
    which = np.repeat([False, True], [len(refused.code), len(bad.code)])
    pairs: Any = zip(refused, bad, strict=True)
    return CodedRows(*(np.concatenate(pair, axis=-1) for pair in pairs)), which


def _convert_matrix(column: pa.ChunkedArray, width: int) -> Floats:
    """Return N Arrow lists of numbers as a matrix (width, N); a list with another length becomes NaN."""
    lists = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    size = len(lists)
    if size == 0 or width == 0:
        return np.empty((width, size))
    lengths = np.diff(lists.offsets.to_numpy())
    flat = lists.flatten().fill_null(np.nan).to_numpy(zero_copy_only=False)
    if lists.null_count == 0 and (lengths == width).all():
        return np.ascontiguousarray(flat.reshape(size, width).T)
    lengths = np.where(lists.is_valid().to_numpy(zero_copy_only=False), lengths, 0)
    result = np.full((width, size), np.nan)
    right = np.flatnonzero(lengths == width)
    starts = np.cumsum(lengths) - lengths
    result[:, right] = flat[starts[right][None, :] + np.arange(width)[:, None]]
    return result
