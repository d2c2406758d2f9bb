"""A stream in micro-batches, simulated, against its recomputation in one pass; and every kind of damage is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

import kalman
from jobs.state.block_format import build_state_layout
from jobs.state.encoding.estimates import EstimateFormat
from jobs.state.encoding.keys import KeyKind
from jobs.state.encoding.packets import Records
from jobs.state.encoding.routing import compute_routes
from jobs.state.encoding.row_order import order_rows
from jobs.state.encoding.rows import KeyedRows
from jobs.state.filter_step import filter_step
from jobs.state.row_filter import RowFilter
from jobs.verification.recomputing import Kind, Recipe, check
from jobs.verification.runs import Findings
from kalman.flags import FLAGS
from kalman.run import SortedRows

KIND = KeyKind(("id",), ("bigint",), True)
DEFINITION: dict[str, Any] = {
    "states": ["level", "slope"],
    "measurement": ["a", "b"],
    "process": {"kind": "local_linear_trend", "level_variance": 0.5, "slope_variance": 0.01},
    "observation": {"H": [[1.0, 0.0], [0.5, 1.0]], "R": [[1.0, 0.3], [0.3, 2.0]]},
    "initial": {"mean": [0.0, 0.0], "covariance": [[10.0, 0.0], [0.0, 1.0]]},
}
COLUMNS = ("kind", "key", "time", "batch", "place", "numbers", "flag", "count", "log_likelihood")


class Streamed(NamedTuple):
    """The checker's input, as rows by name of column, and how to check it."""

    rows: list[dict[str, Any]]
    recipe: Recipe

    def found(self, damage: Callable[[list[dict[str, Any]]], None] | None = None) -> Findings:
        """Check the rows, damaged or whole."""
        rows = [dict(row) for row in self.rows]
        if damage is not None:
            damage(rows)
        types = (
            pa.int32(), pa.string(), pa.int64(), pa.int64(), pa.int64(), pa.list_(pa.float64()), pa.string(),
            pa.int64(), pa.float64(),
        )  # fmt: skip
        columns = {
            name: pa.array([row.get(name) for row in rows], kind)
            for name, kind in zip(COLUMNS, types, strict=True)
        }
        return check(self.recipe, pa.table(columns))


def streamed(seed: int, apply_late: bool = False, batches: int = 6, keys: int = 7) -> Streamed:
    """Simulate a stream: micro-batch 0 gives the snapshot, the others its rows, some of them late or flagged."""
    kernel = kalman.build(DEFINITION, {})
    layout, row_filter = build_state_layout(KIND, kernel.size), RowFilter(kernel, 60e6)
    recipe = Recipe(
        kernel, 60e6, KIND, EstimateFormat(KIND, 2, False, ()), 2, 0, 2, "<f8", apply_late=apply_late
    )
    rng = np.random.default_rng(seed)
    states = layout.empty()
    out: list[dict[str, Any]] = []
    for batch in range(batches):
        size = 60
        key = rng.integers(0, keys, size)
        minute = 20 * batch + rng.integers(-15 if batch > 1 else 0, 20, size)
        y = np.round(rng.normal(size=(2, size)), 1)
        y[rng.random((2, size)) < 0.2] = np.nan
        y[0, rng.random(size) < 0.05] = np.inf  # flagged: the state stays as it was
        time = minute * 60_000_000
        order = order_rows(key, time, y)
        present, code = np.unique(key[order], return_inverse=True)
        rows = SortedRows(code.astype(np.int64), time[order], y[:, order], np.empty((0, size)))
        records = Records({"route": compute_routes(present)}, None)
        by_route = np.argsort(records.arrays["route"])
        again = np.argsort(by_route)
        keyed = KeyedRows(records.take(by_route), rows._replace(key=again[rows.key]))
        sort = np.argsort(keyed.rows.key, kind="stable")
        keyed = keyed._replace(rows=keyed.rows.take(sort))
        names = present[by_route][keyed.rows.key]
        result = filter_step(row_filter, layout, states, keyed, apply_late)
        states, outputs = result.records, result.outputs
        if batch == 0:
            out += snapshot(Kind.SEED, kernel, states)
            continue
        for i in range(size):
            row = {
                "key": str(names[i]),
                "time": int(keyed.rows.time[i]),
                "numbers": keyed.rows.y[:, i].tolist(),
            }
            out.append({**row, "kind": Kind.ROW, "place": batch})
            if outputs.late[i]:
                out.append({**row, "kind": Kind.REFUSED, "batch": batch})
                continue
            full = outputs.covariance[[0, 1, 1, 2], i]
            numbers = [*outputs.mean[:, i], *full, outputs.log_likelihood[i], outputs.nis[i]]
            estimate = {**row, "kind": Kind.ESTIMATE, "batch": batch, "numbers": [float(x) for x in numbers]}
            out.append({**estimate, "flag": FLAGS[outputs.flag[i]]})
    out += snapshot(Kind.END, kernel, states)
    rng.shuffle(out)  # type: ignore[arg-type]
    return Streamed(out, recipe)


def snapshot(kind: Kind, kernel: Any, states: Records) -> list[dict[str, Any]]:
    from jobs.state.encoding.routing import compute_identities

    arrays = states.arrays
    mean, covariance, extras = kernel.snapshot(np.array(arrays["values"]))
    numbers = np.vstack([mean, covariance, *extras.values()])
    return [
        {
            "kind": kind,
            "key": str(key),
            "time": int(arrays["event_time"][i]),
            "numbers": numbers[:, i].tolist(),
            "count": int(arrays["count"][i]),
            "log_likelihood": float(arrays["log_likelihood"][i]),
        }
        for i, key in enumerate(compute_identities(np.array(arrays["route"])).tolist())
    ]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("apply_late", [False, True])
def test_a_stream_in_micro_batches_is_one_recomputed_pass(seed: int, apply_late: bool) -> None:
    stream = streamed(seed, apply_late)
    found = stream.found()
    kinds = [row["kind"] for row in stream.rows]
    assert found.differences == 0, found
    assert found.counts["rows"] == kinds.count(Kind.ROW)
    assert found.counts["equal"] == kinds.count(Kind.ESTIMATE)
    assert found.counts["refused"] == kinds.count(Kind.REFUSED)
    assert (found.counts["refused"] > 0) == (not apply_late)
    assert found.counts["states"] == kinds.count(Kind.END)
    assert {row["flag"] for row in stream.rows if row["kind"] == Kind.ESTIMATE} > {None}


def of(rows: list[dict[str, Any]], kind: Kind, place: int = 40) -> dict[str, Any]:
    return [row for row in rows if row["kind"] == kind][place]


def flip(rows: list[dict[str, Any]], kind: Kind, number: int, place: int = 3) -> None:
    row = of(rows, kind, place)
    numbers = np.array(row["numbers"])
    numbers.view(np.int64)[number] ^= 1
    row["numbers"] = numbers.tolist()


DAMAGES: dict[str, tuple[str, Callable[[list[dict[str, Any]]], None]]] = {
    "a flipped bit of a mean": ("different", lambda rows: flip(rows, Kind.ESTIMATE, 0)),
    "a flipped bit of a covariance": ("different", lambda rows: flip(rows, Kind.ESTIMATE, 3)),
    "a flipped bit of a likelihood": ("different", lambda rows: flip(rows, Kind.ESTIMATE, 6)),
    "a deleted estimate": ("missing", lambda rows: rows.remove(of(rows, Kind.ESTIMATE))),
    "a doubled estimate": ("doubled", lambda rows: rows.append(dict(of(rows, Kind.ESTIMATE)))),
    "an estimate of no row": ("strange", lambda rows: rows.append({**of(rows, Kind.ESTIMATE), "time": 5})),
    "a refusal of no row": ("baseless", lambda rows: rows.append({**of(rows, Kind.REFUSED, 0), "time": 5})),
    "a flag": ("different", lambda rows: of(rows, Kind.ESTIMATE).update(flag="gated")),
    "a flipped bit of a state": ("states_different", lambda rows: flip(rows, Kind.END, 1)),
    "a deleted state": ("states_different", lambda rows: rows.remove(of(rows, Kind.END, 2))),
    "a state's count": ("states_different", lambda rows: of(rows, Kind.END, 2).update(count=1)),
    "a state of no key": ("states_different", lambda rows: rows.append({**of(rows, Kind.END, 2), "key": "99"})),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_each_kind_of_damage_is_counted_once_and_named(name: str) -> None:
    count, damage = DAMAGES[name]
    found = streamed(1).found(damage)
    assert found.counts[count] == 1, found
    assert found.differences == 1, found
    assert found.firsts
    assert found.firsts[0]["what"]


def test_a_lost_refusal_is_told_from_a_lost_estimate() -> None:
    found = streamed(1).found(lambda rows: rows.remove(of(rows, Kind.REFUSED, 0)))
    assert found.counts["unrecorded"] == 1
    assert found.differences == 0


def test_a_tolerance_separates_close_from_different() -> None:
    stream = streamed(2)
    close = stream._replace(recipe=stream.recipe._replace(tolerance=1e-9))
    found = close.found(lambda rows: flip(rows, Kind.ESTIMATE, 0))
    assert (found.counts["close"], found.differences) == (1, 0)


def test_estimates_before_since_are_not_compared() -> None:
    stream = streamed(2)
    all_of = [row["time"] for row in stream.rows if row["kind"] == Kind.ESTIMATE]
    middle = sorted(all_of)[len(all_of) // 2]
    late = stream._replace(recipe=stream.recipe._replace(since=middle))
    found = late.found()
    assert found.counts["equal"] == sum(time >= middle for time in all_of)
    assert found.differences == 0


def test_a_new_key_begins_as_it_was_offered_unless_it_is_known() -> None:
    stream = streamed(3)

    def offered(rows: list[dict[str, Any]]) -> None:
        of(rows, Kind.SEED, 0).update(kind=Kind.OFFER)
        other = of(rows, Kind.SEED, 1)
        rows.append({**other, "kind": Kind.OFFER, "count": 5})

    whole = stream.found(offered)
    assert whole.differences == 0, whole
    lost = stream.found(lambda rows: rows.remove(of(rows, Kind.SEED, 0)))
    assert lost.counts["different"] > 10
    assert lost.counts["states_different"] == 1


def test_a_key_without_a_valid_state_has_its_rows_in_quarantine() -> None:
    stream = streamed(4)
    key = of(stream.rows, Kind.SEED, 0)["key"]

    def broken(rows: list[dict[str, Any]]) -> None:
        for row in list(rows):
            if row["key"] == key and row["kind"] in (Kind.ESTIMATE, Kind.REFUSED):
                rows.remove(row)
        for row in list(rows):
            if row["key"] != key:
                continue
            if row["kind"] == Kind.ROW:
                rows.append({**row, "kind": Kind.REFUSED_STATE, "batch": row["place"]})
            elif row["kind"] in (Kind.SEED, Kind.END):
                row["numbers"] = [np.nan] * len(row["numbers"])

    found = stream.found(broken)
    assert found.counts["different"] == found.counts["missing"] == found.counts["baseless"] == 0, found


def of_numerics(stream: Streamed, numerics: int) -> Streamed:
    return stream._replace(recipe=stream.recipe._replace(numerics=numerics))


def damaged(stream: Streamed, key: str) -> tuple[int, int]:
    """Return how many estimates differ, and how many may, if one of a key has a flipped bit."""

    def flipped(rows: list[dict[str, Any]]) -> None:
        mine = [row for row in rows if row["key"] == key]
        flip(mine, Kind.ESTIMATE, 0)

    found = stream.found(flipped)
    return found.counts["different"], found.counts["numerics"]


def seeded(stream: Streamed, diffuse: bool) -> dict[str, Any]:
    """Return a key's state in the snapshot, one that is still diffuse or none."""
    seeds = (row for row in stream.rows if row["kind"] == Kind.SEED)
    return next(row for row in seeds if any(row["numbers"][6:]) is diffuse)


@pytest.fixture
def diffuse(monkeypatch: pytest.MonkeyPatch) -> Streamed:
    """Return a stream of keys that began diffuse, of which the snapshot has some that still are."""
    monkeypatch.setitem(DEFINITION, "initial", {"diffuse": True})
    return streamed(1)


@pytest.mark.parametrize("numerics", [1, kalman.NUMERICS, kalman.NUMERICS + 1])
def test_what_began_diffuse_with_other_numerics_is_no_difference(diffuse: Streamed, numerics: int) -> None:
    other = of_numerics(diffuse, numerics)
    assert other.found().counts == diffuse.found().counts
    # Other starts are, to the checker, what other numerics would have made of them: all of each key has other bits.
    found = other._replace(rows=[row for row in other.rows if row["kind"] != Kind.SEED]).found()
    names = ("numerics", "states_numerics", "different", "states_different", "equal", "states")
    all_of = sum(row["kind"] == Kind.ESTIMATE for row in other.rows), 7
    expected = (0, 0, *all_of) if numerics == kalman.NUMERICS else (*all_of, 0, 0)
    assert tuple(found.counts[name] for name in names) == (*expected, 0, 0)
    assert (found.differences > 0) == (numerics == kalman.NUMERICS)


def test_missing_rows_and_states_are_missing_with_other_numerics(diffuse: Streamed) -> None:
    other, key = of_numerics(diffuse, 1), seeded(diffuse, True)["key"]

    def lost(rows: list[dict[str, Any]]) -> None:
        for kind in (Kind.ESTIMATE, Kind.END):
            rows.remove(next(row for row in rows if row["kind"] == kind and row["key"] == key))

    found = other.found(lost)
    assert (found.counts["missing"], found.counts["states_different"], found.differences) == (1, 1, 2)


def test_keys_that_are_no_longer_diffuse_are_compared_whatever_the_numerics(diffuse: Streamed) -> None:
    other = of_numerics(diffuse, 1)
    assert damaged(other, seeded(diffuse, True)["key"]) == (0, 1)
    assert damaged(other, seeded(diffuse, False)["key"]) == (1, 0)


def test_a_start_that_was_proper_is_compared_whatever_the_numerics() -> None:
    assert damaged(of_numerics(streamed(1), 1), "3") == (1, 0)


def test_an_offer_tells_how_a_key_began_only_where_it_was_taken(diffuse: Streamed) -> None:
    other, still, left = of_numerics(diffuse, 1), seeded(diffuse, True), seeded(diffuse, False)
    offer = {**left, "kind": Kind.OFFER}
    # The snapshot has the key: its diffuse state was the start, whatever was offered.
    known = other._replace(rows=[*other.rows, {**offer, "key": still["key"]}])
    assert damaged(known, still["key"]) == (0, 1)
    taken = other._replace(rows=[offer if row is left else row for row in other.rows])
    assert damaged(taken, left["key"]) == (1, 0)
    # The key had rows before it was offered, and began diffuse as a new one.
    many = of_numerics(streamed(1, keys=40), 1)
    new = {row["key"] for row in many.rows} - {row["key"] for row in many.rows if row["kind"] == Kind.SEED}
    key = max(new, key=lambda one: sum(row["key"] == one for row in many.rows))
    late = many._replace(rows=[*many.rows, {**offer, "key": key, "time": 0}])
    assert late.found().differences == 0
    assert damaged(late, key) == (0, 1)
