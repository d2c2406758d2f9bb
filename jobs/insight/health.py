"""The content of the page on a model's health: sums over time and by key, examples, lag, versions, parameters.

NIS is judged on rows without a flag. Coverage counts gated rows too, because a row outside the gate is outside the
interval. Both need the number of components that each row measured. This number is one for a model with one measured
column. Otherwise it comes from the estimates' column `innovation` or `measured`, which only some specs ask for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from jobs.core.errors import RUN_FAILED, UserError
from jobs.insight import examples
from jobs.insight.examples import Example
from jobs.insight.status import describe_other_version
from jobs.lineage.catalog import Catalog
from jobs.lineage.generations import Generation, LineageSegment
from jobs.lineage.live_rows import EstimatesTable, build_counted_query, open_estimates, read_counted_batches
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding.arrow import convert_to_micros, find_distinct_values, to_numpy
from jobs.storage.quarantine import HELD
from jobs.storage.quarantine import TABLE as QUARANTINE
from jobs.storage.queries import build_in_condition, open_queries, quote_name
from jobs.storage.table_rows import read_column_types, read_table
from jobs.storage.tables import estimates as estimates_table
from jobs.storage.tables import estimates_history
from jobs.storage.warehouse import Tables
from jobs.supervision.progress import read_all_records
from kalman.evaluation.diagnostics import inside, mean_bounds
from kalman.filters.state_output import OUTPUT

Floats = NDArray[np.float64]
BINS = 40
PROBABILITY = 0.95
WORST = 10
GATED = "gated"


class OverTime(NamedTuple):
    """Sums in bins of equal width of event time, (B,) each; time: the middles of the bins in microseconds.

    judged: number of rows without a flag whose NIS and degrees are known.
    nis, nis2: sums of these rows' NIS and of its square.
    degrees: sum of these rows' measured components.
    scored: number of rows whose NIS shows whether the measurement is inside the predicted interval.
    inside: number of scored rows inside the interval.
    flags: number of rows with each flag, (B,) each.
    """

    time: NDArray[np.int64]
    rows: Floats
    judged: Floats
    nis: Floats
    nis2: Floats
    degrees: Floats
    scored: Floats
    inside: Floats
    flags: dict[str, Floats]


class Reason(NamedTuple):
    """The number of rows that were rejected for one reason; status: held, replaying, replayed or discarded."""

    reason: str
    status: str
    rows: int


class KeySums(NamedTuple):
    """Sums by key, (K,) each; key: the texts of the keys."""

    key: list[str]
    rows: Floats
    nis: Floats
    degrees: Floats
    flagged: Floats

    @property
    def ratio(self) -> Floats:
        """Return NIS per component (K,); NaN for a key without judged rows."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.nis / self.degrees

    @property
    def surprise(self) -> Floats:
        """Return the distance of each key's NIS from its expected value in standard deviations (K,); 0 without judged
        rows.
        """
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.nan_to_num((self.nis - self.degrees) / np.sqrt(2 * self.degrees))


class Health(NamedTuple):
    """The content of the health page.

    spec: the spec of the live generation.
    specs: the spec of each generation.
    other_version: a sentence if the deployed version is not live, or if its spec cannot be read.
    without: the reason why NIS cannot be judged; empty if NIS is judged.
    """

    model: str
    description: str
    made_at: datetime
    estimates: EstimatesTable
    spec: ModelSpec
    generations: list[Generation]
    specs: dict[str, ModelSpec]
    first_rows: dict[str, int]
    over_time: OverTime
    keys: KeySums
    examples: list[Example]
    fates: list[Reason]
    progress: list[dict[str, Any]]
    learned: list[dict[str, Any]]
    learned_in: str
    other_version: str | None
    without: str

    @property
    def rows(self) -> int:
        """Return the number of rows with a valid estimate."""
        return int(self.over_time.rows.sum())

    @property
    def outside(self) -> float | None:
        """Return the share of keys whose NIS is outside its 95 % bounds; None means that no key is judged."""
        known = self.keys.degrees > 0
        if not known.any():
            return None
        low, high = mean_bounds(1, self.keys.degrees[known])
        ratio = self.keys.ratio[known]
        return float(np.mean((ratio < low) | (ratio > high)))


def gather(root: str, model: str, deployed: ModelSpec | None, wanted: Sequence[str] = ()) -> Health:
    """Return the health of a model.

    Args:
        root: the path of the warehouse.
        model: the name of the model.
        deployed: the deployed spec; None if its file no longer exists.
        wanted: keys to show besides the automatically chosen keys.

    Raises:
        UserError: the model has no estimates, or no estimate of a wanted key.
    """
    tables = Tables(root)
    catalog = Catalog(tables)
    known = list(catalog.generations(model))
    specs = catalog.read_specs(model, deployed)
    estimates = _find_estimates(root, model, catalog.lineage(model))
    if estimates is not None and wanted:
        _check_keys(root, model, estimates, wanted)
    first = None if estimates is None else _find_span(root, estimates)
    spec = catalog.live_spec(model, deployed)
    if estimates is None or first is None or spec is None:
        raise UserError(
            f"model {model} has no estimates to report on: land newer rows than its snapshot has and run "
            f"`kalman-pipeline stream --model {model}`, or estimate its history with `kalman-pipeline estimate --model "
            f"{model}`",
            RUN_FAILED,
        )
    sums = _Sums(root, estimates, spec, *first)
    keys = sums.keys()
    chosen = [*((key, "asked for") for key in wanted), *choose_keys(keys)]
    snapshot, learned = _find_learned(root, model, known)
    return Health(
        model,
        spec.description,
        datetime.now(UTC),
        estimates,
        spec,
        known,
        specs,
        sums.first_rows,
        sums.over_time(),
        keys,
        _read_examples(root, estimates, spec, specs, known, list(dict(reversed(chosen)).items())[::-1], sums),
        _count_rejected(tables, model),
        read_all_records(tables, model),
        learned,
        snapshot,
        describe_other_version(catalog, model, deployed),
        "" if sums.judges else _NOT_JUDGED,
    )


_NOT_JUDGED = (
    "NIS and coverage need the number of components that each row measured, which the estimates of a model with "
    "several measured columns have with outputs: {innovation: true} in the spec."
)


def _find_estimates(root: str, model: str, lineage: Sequence[LineageSegment]) -> EstimatesTable | None:
    """Return the model's live estimates by their lineage, else the estimates of its history; None without either."""
    if lineage and read_column_types(root, estimates_table(model)):
        return open_estimates(root, estimates_table(model), lineage)
    if read_column_types(root, estimates_history(model)):
        return open_estimates(root, estimates_history(model))
    return None


def _check_keys(root: str, model: str, estimates: EstimatesTable, wanted: Sequence[str]) -> None:
    """Check, before all rows are read, that each wanted key has an estimate; a table without rows passes.

    Raises:
        UserError: a wanted key has no estimate.
    """
    with open_queries(root) as queries:
        rows = build_counted_query(queries, estimates, ["key"])
        is_wanted = build_in_condition(quote_name("key"), wanted)
        found = queries.run(f"SELECT DISTINCT key FROM ({rows}) AS counted WHERE {is_wanted}")
        lost = sorted(set(wanted) - set(found["key"].to_pylist()), key=wanted.index)
        if lost:
            known = queries.run(f"SELECT min(key) AS key FROM ({rows}) AS counted")["key"][0].as_py()
            if known is not None:
                raise UserError(f"--key {lost[0]}: model {model} has no estimate of it, such as of {known}")


def _count_rejected(tables: Tables, model: str) -> list[Reason]:
    """Return the number of a model's quarantined rows by status and reason (without its value), largest first."""
    if not tables.exists(QUARANTINE):
        return []
    counts: Counter[tuple[str, str]] = Counter()
    for one in tables.group_counts(QUARANTINE, ("model", "reason", "status")):
        if one["model"] == model:
            counts[_strip_value(one["reason"]), one["status"] or HELD] += one["count"]
    found = [Reason(reason, status, rows) for (reason, status), rows in counts.items()]
    return sorted(found, key=lambda one: (-one.rows, one.reason, one.status))


def _strip_value(reason: str | None) -> str:
    """Return the text of a reason without the value that it quotes."""
    text = reason or "unknown"
    return text.split(" '", 1)[0].split(" (", 1)[0].rstrip(" :,")[:120]


def _read_learned(root: str, model: str, snapshot: str) -> list[dict[str, Any]]:
    """Return the learned parameters of a snapshot, a row for each scope (key, group or population), maps as
    dictionaries.
    """
    names = ["scope", "key", "key_group", "outcome", "parameters", "standard_errors", "rows"]
    found = read_table(root, "learned", names, partition={"model": model, "snapshot_id": snapshot})
    rows = [] if found is None else found.to_pylist()
    for row in rows:
        for name in ("parameters", "standard_errors"):
            row[name] = dict(row[name] or ())
    return rows


def _find_learned(root: str, model: str, known: Sequence[Generation]) -> tuple[str, list[dict[str, Any]]]:
    """Return the newest snapshot of a generation that has rows of learned parameters, and these rows."""
    order = sorted(known, key=lambda one: one.status == "live")  # stable: the newest live one is last
    found = ((one.snapshot_id, _read_learned(root, model, one.snapshot_id)) for one in reversed(order))
    return next((one for one in found if one[1]), ("", []))


def _find_span(root: str, estimates: EstimatesTable) -> tuple[int, int] | None:
    """Return the first and the last event time of the valid estimates, in microseconds."""
    ends = [
        end(convert_to_micros(part["event_time"]))
        for part in read_counted_batches(root, estimates, ["event_time"])
        for end in (np.min, np.max)
    ]
    return (int(min(ends)), int(max(ends))) if ends else None


_PARTS = 64
"""The number of parts after which the parts' sums by key are added up."""


class _Sums:
    """Sums of the rows of valid estimates, computed one part of the rows at a time."""

    def __init__(self, root: str, estimates: EstimatesTable, spec: ModelSpec, first: int, last: int) -> None:
        self._first, self._width = first, max(1, -(-(last - first + 1) // BINS))
        self._time: dict[str, Floats] = {}
        self._by_key: list[tuple[pa.Array, Floats]] = []
        self.first_rows: dict[str, int] = {}
        self._components = len(spec.measurement)
        self.judges = self._components == 1
        self.columns = ["nis", *([] if self.judges else ["innovation", "measured"])]
        for part in read_counted_batches(root, estimates, ["key", "event_time", "flags", *self.columns]):
            self._take(part)

    def _take(self, part: pa.Table) -> None:
        at = convert_to_micros(part["event_time"])
        place = (at - self._first) // self._width
        nis = to_numpy(part["nis"].combine_chunks(), np.nan)
        flags, flag_of = find_distinct_values(part["flags"].combine_chunks().cast(pa.string()))
        good = flag_of == len(flags)
        gated = flag_of == (flags.index(GATED) if GATED in flags else -1)
        degrees = self.degrees(part, len(at))
        seen = np.isfinite(nis) & (degrees > 0)
        judged, scored = seen & good, seen & (good | gated)

        def add(name: str, values: Any, which: NDArray[np.bool_] | slice = slice(None)) -> None:
            weights = None if values is None else np.asarray(values, float)[which]
            found = np.bincount(place[which], weights, minlength=BINS).astype(float)
            self._time[name] = self._time.get(name, 0.0) + found

        add("rows", None)
        for name, values in (("judged", None), ("nis", nis), ("nis2", nis * nis), ("degrees", degrees)):
            add(name, values, judged)
        add("scored", None, scored)
        add("inside", None, scored & inside(nis, degrees, PROBABILITY))
        for number, flag in enumerate(flags):
            add(f"flag {flag}", None, flag_of == number)
        of_rows = np.array(
            [np.ones(len(at)), np.where(judged, nis, 0.0), np.where(judged, degrees, 0.0), ~good]
        )
        self._by_key.append(_sum_by_key(part["key"].combine_chunks().cast(pa.string()), of_rows))
        if len(self._by_key) > _PARTS:
            self._by_key = [self._sum_of_parts()]
        names, generation_of = find_distinct_values(part["generation"].combine_chunks().cast(pa.string()))
        for number, name in enumerate(names):
            first = int(at[generation_of == number].min())
            self.first_rows[name] = min(first, self.first_rows.get(name, first))

    def degrees(self, part: pa.Table, rows: int) -> Floats:
        """Return the number of components that each row measured (N,); 0 where the number is unknown."""
        if self._components == 1:
            return np.ones(rows)
        for name in ("innovation", "measured"):
            column = part[name].combine_chunks() if name in part.column_names else None
            if column is not None and column.null_count < rows:
                self.judges = True
                lengths = np.nan_to_num(to_numpy(pc.list_value_length(column))).astype(int)  # type: ignore[attr-defined]
                finite = np.isfinite(np.array(column.flatten(), float))
                return np.bincount(np.repeat(np.arange(rows), lengths), finite, rows).astype(float)
        return np.zeros(rows)

    def _sum_of_parts(self) -> tuple[pa.Array, Floats]:
        return _sum_by_key(
            pa.concat_arrays([keys for keys, _ in self._by_key]),
            np.concatenate([sums for _, sums in self._by_key], axis=1),
        )

    def keys(self) -> KeySums:
        """Return the sums by key, ordered by the keys' texts."""
        keys, sums = self._sum_of_parts()
        order = np.argsort(np.array(keys.to_pylist(), object), kind="stable")
        return KeySums([keys[at].as_py() for at in order.tolist()], *sums[:, order])

    def over_time(self) -> OverTime:
        """Return the sums in each time bin."""
        time = self._first + np.arange(BINS) * self._width + self._width // 2
        names = [name for name in OverTime._fields if name not in ("time", "flags")]
        flags = {
            name.removeprefix("flag "): sums
            for name, sums in sorted(self._time.items())
            if name.startswith("flag ")
        }
        return OverTime(time=time, flags=flags, **{name: self._time[name] for name in names})


def _sum_by_key(keys: pa.Array, sums: Floats) -> tuple[pa.Array, Floats]:
    """Return the distinct keys (K,) of N rows, and the sums (4, K) over each key's columns of `sums` (4, N)."""
    encoded = keys.dictionary_encode()
    place, count = to_numpy(encoded.indices), len(encoded.dictionary)
    return encoded.dictionary, np.array([np.bincount(place, one, count) for one in sums], float)


def choose_keys(keys: KeySums) -> list[tuple[str, str]]:
    """Return the key with the most rows, the worst-fitting key and a typical key, each key once, with the reason."""
    surprise = np.abs(keys.surprise)
    wanted = [
        (int(np.argmax(surprise)), "fits worst"),
        (int(np.argmax(keys.rows)), "the most rows"),
        (int(np.argsort(surprise, kind="stable")[len(surprise) // 2]), "typical"),
    ]
    return [(keys.key[at], why) for at, why in examples.join_reasons(wanted)]


def _read_examples(
    root: str,
    estimates: EstimatesTable,
    spec: ModelSpec,
    specs: Mapping[str, ModelSpec],
    generations: Sequence[Generation],
    chosen: Sequence[tuple[str, str]],
    sums: _Sums,
) -> list[Example]:
    """Return examples of the chosen keys; they show the first measured column if the model measures it linearly."""
    keys = [key for key, _ in chosen]
    columns = ["key", "event_time", "mean", "covariance", "flags", OUTPUT, *sums.columns]
    name, is_measured = examples.choose_quantity(spec)
    with open_queries(root) as queries:
        rows = examples.read_newest_rows(
            queries,
            build_counted_query(queries, estimates, columns, build_in_condition(quote_name("key"), keys)),
        )
        measured = examples.read_measured_rows(queries, spec, name, keys) if is_measured else None
    made_by = {one: specs.get(one, spec) for one in rows["generation"].unique().to_pylist()}
    known = {one.generation: one.snapshot_id for one in generations}

    def line(mine: pa.Table) -> examples.EstimateLine:
        found = examples.build_line(mine, sums.degrees(mine, mine.num_rows), made_by, name)
        begun = {one: (made_by[one], known[one]) for one in made_by if one in known}
        return examples.predict_line(root, found, mine, begun, name) if is_measured else found

    return examples.make_examples(chosen, name, measured, [rows], line)
