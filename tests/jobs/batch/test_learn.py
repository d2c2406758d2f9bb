"""Learning from buckets of rows, in one process, without Spark."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import kalman
from jobs.batch import learning
from jobs.batch.batch_filter import Batch, Interval
from jobs.batch.learning import learn_pooled
from jobs.spark.local_frame import LocalFrame
from jobs.specs.model_spec import Learn
from jobs.state.encoding.keys import KeyKind
from jobs.state.encoding.packets import Records
from jobs.state.encoding.routing import compute_routes
from jobs.state.key_groups import group_begin, group_keys
from kalman.learning.learners import learnable
from kalman.learning.maximum_likelihood import build_linear_learner, fit

Work = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


@pytest.fixture
def history() -> tuple[LocalFrame, Batch, kalman.SortedRows]:
    """Return earthquakes in three buckets with several keys each, and as one set of rows."""
    path = Path(__file__).parents[2] / "fixtures" / "earthquakes.csv"
    y = np.loadtxt(path, delimiter=",", skiprows=1, usecols=1)[None]
    key = np.arange(107) // 10
    whole = kalman.SortedRows(key, np.arange(107), y, np.empty((0, 107)))
    batch: Any = SimpleNamespace(rows=SimpleNamespace(measurement=("count",), control=()), unit=1.0)
    layout = learning._build_layout(batch)
    batches: list[pa.RecordBatch] = []
    for place, (low, high) in enumerate(((0, 3), (3, 4), (4, 11))):
        here = (key >= low) & (key < high)
        arrays = {"key": key[here] - low, "time": whole.time[here], "y": y[:, here]}
        packet = layout.encode(Records(arrays, None))
        rows = [pa.array([9 - place]), pa.array([int(here.sum())]), pa.array([packet], pa.binary())]
        batches.append(pa.RecordBatch.from_arrays(rows, ["place", "rows", "payload"]))
    return LocalFrame(lambda: batches), batch, whole


DEFINITION = {
    "filter": "poisson_mixture",
    "measurement": ["count"],
    "mixture": {"components": 2},
    "learn": {"parameters": ["weights", "rates"]},
}


def on_buckets(monkeypatch: pytest.MonkeyPatch, frame: LocalFrame) -> None:
    monkeypatch.setattr(learning, "pack_window_rows", lambda *_: frame)


def test_a_mixture_learns_the_same_from_buckets_as_from_all_rows(
    history: tuple[Any, Batch, kalman.SortedRows], monkeypatch: pytest.MonkeyPatch
) -> None:
    frame, batch, whole = history

    on_buckets(monkeypatch, frame)
    said: list[str] = []
    asked = Learn(parameters=["weights", "rates"], max_iterations=500)
    found = learn_pooled(frame, DEFINITION, asked, batch, Interval(), None, said.append)
    assert found.fit.converged and found.rows == 107 and "weights, rates" in said[-1]
    assert found.fit.log_likelihood == pytest.approx(-360.369044, abs=1e-6)
    model = kalman.build(DEFINITION, found.parameters)
    np.testing.assert_allclose(model.initial(1)[:4, 0], [0.675726, 0.324274, 15.777108, 26.839895], rtol=1e-3)

    problem = learnable(DEFINITION)
    direct = problem.fit(lambda theta: problem.evaluate(theta, whole, 11, 1.0), lambda: whole.y, 500)
    # Held-out rows differ, and so the start.
    np.testing.assert_allclose(found.fit.theta, direct.theta, rtol=1e-2)


def test_maximum_likelihood_learns_the_same_from_buckets_as_from_all_rows(
    history: tuple[Any, Batch, kalman.SortedRows], monkeypatch: pytest.MonkeyPatch
) -> None:
    frame, batch, whole = history
    definition = {
        "states": ["level"],
        "measurement": ["count"],
        "process": {"kind": "explicit", "F": [[1.0]], "Q": [[1.0]]},
        "observation": {"H": [[1.0]], "R": [[30.0]]},
        "initial": {"mean": [20.0], "covariance": [[50.0]]},
        "learn": {"parameters": ["Q", "R"]},
    }
    on_buckets(monkeypatch, frame)
    found = learn_pooled(frame, definition, Learn(parameters=["Q", "R"]), batch, Interval(), None, print)
    problem = build_linear_learner(definition)
    direct = fit(lambda theta: problem.compute_gradient(theta, whole, 11, 1.0), problem.start)
    assert found.fit.converged and found.fit.held_out is None
    assert found.fit.log_likelihood == pytest.approx(direct.log_likelihood, rel=1e-10)
    np.testing.assert_allclose(found.fit.theta, direct.theta, rtol=1e-4)


def test_a_sample_has_every_nth_row_of_each_bucket(history: tuple[Any, Batch, kalman.SortedRows]) -> None:
    frame, batch, whole = history
    some = learning._sample_measurements(frame, batch, 7)
    expected = [whole.y[:, low:high:7] for low, high in ((40, 107), (30, 40), (0, 30))]
    np.testing.assert_array_equal(some, np.concatenate(expected, axis=1))
    np.testing.assert_array_equal(np.sort(learning._sample_measurements(frame, batch, 1)), np.sort(whole.y))


def keyed_bucket(texts: list[str] | None, numbers: list[int], rows: int) -> Any:
    """Return a bucket of keys with `rows` rows each."""
    from jobs.state.encoding.rows import KeyedRows

    rng = np.random.default_rng(numbers)
    route = np.array(numbers, np.uint64) << np.uint64(40)
    arrays = (
        {"route": route} if texts is None else {"route": route, "check": np.zeros(len(numbers), np.int64)}
    )
    keys = Records(arrays, None if texts is None else pa.array(texts))
    key = np.repeat(np.arange(len(numbers)), rows)
    time = np.tile(np.arange(rows) * 1_000_000, len(numbers))
    steps = rng.normal(size=(2, len(numbers), rows)) * np.array(numbers)[:, None]
    y = np.cumsum(steps[0], axis=1) + steps[1]
    return KeyedRows(keys, kalman.SortedRows(key, time, y.reshape(1, -1), np.empty((0, len(key)))))


REGIONS = [r'["north \"1\"","a"]', r'["süd, \\","a"]', r'["north \"1\"","b]"]', r'["x",null]']
KIND = KeyKind(("region", "id"), ("string", "string"), False)


def test_keys_are_grouped_by_some_of_their_columns() -> None:
    texts = pa.array(REGIONS)
    keys = Records({"route": np.arange(4, dtype=np.uint64), "check": np.arange(4)}, texts)
    for by in (("region",), ("id",), ("id", "region")):
        found = group_keys(KIND, by, keys)
        wanted = [[json.loads(text)[KIND.columns.index(name)] for name in by] for text in REGIONS]
        assert [json.loads(found.names[code]) for code in found.code] == wanted
        assert len(set(found.names)) == len(found.names)
    integer = KeyKind(("id",), ("bigint",), True)
    routes = compute_routes(np.array([-7, 7, 12]))
    found = group_keys(integer, ("id",), Records({"route": routes}, None))
    assert [found.names[code] for code in found.code] == ['["-7"]', '["7"]', '["12"]']


@pytest.mark.parametrize("how", ["mle", "em", "cubature"])
def test_groups_learn_the_same_from_buckets_as_from_all_rows(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    definition: dict[str, Any] = {
        "states": ["level"],
        "measurement": ["y"],
        "process": {"kind": "random_walk", "variance": 4.0},
        "observation": {"R": [[1.0]]},
        "initial": {"mean": [0.0], "covariance": [[50.0]]},
        "learn": {"parameters": ["variance", "R"], "scope": "group", "by": ["region"]},
    }
    definition |= {"filter": "cubature"} if how == "cubature" else {}
    definition["learn"] |= {"method": "em"} if how == "em" else {}
    texts = [f'["{"NSE"[i % 3]}","{i}"]' for i in range(10)]
    buckets = [keyed_bucket(texts[:4], [1, 2, 3, 4], 30), keyed_bucket(texts[4:], list(range(5, 11)), 30)]
    fmt: Any = SimpleNamespace(measurement=("y",), control=(), kind=KIND)
    batch = Batch(fmt, 1e6)

    def each_bucket(fmt: Any, work: Callable[[Any], Iterator[pa.RecordBatch]]) -> Work:
        return lambda batches: (made for one in batches for made in work(buckets[one.column(0)[0].as_py()]))

    monkeypatch.setattr(learning, "build_bucket_worker", each_bucket)
    packed: Any = LocalFrame(lambda: [pa.RecordBatch.from_arrays([pa.array([i])], ["n"]) for i in range(2)])
    kept: Any = learning.pack_window_rows(packed, batch, Interval(), 1.0, ("region",))
    on_buckets(monkeypatch, kept)
    asked = Learn(parameters=["variance", "R"], scope="group", by=["region"])
    found = learn_pooled(kept, definition, asked, batch, Interval(), None, print)
    assert found.groups is not None and found.groups.result.converged.all()
    groups = found.parameters["groups"]
    assert groups["by"] == ["region"] and groups["values"] == [["E"], ["N"], ["S"]]
    assert groups["parameters"] == found.groups.result.parameters

    # the gradient of each group's log posterior over all its rows is zero at the result
    problem = build_linear_learner({**definition, "filter": "linear"})
    key = np.concatenate([buckets[0].rows.key, buckets[1].rows.key + 4])
    y = np.concatenate([one.rows.y for one in buckets], axis=1)
    time = np.concatenate([one.rows.time for one in buckets])
    for j, name in enumerate("ENS"):
        members = [i for i in range(10) if texts[i][2] == name]
        mask = np.isin(key, members)
        number = np.searchsorted(members, key[mask])
        rows = kalman.SortedRows(number, time[mask], y[:, mask], np.empty((0, int(mask.sum()))))
        theta = found.groups.result.theta[:, j]
        value, gradient, used = problem.compute_gradient(theta, rows, len(members), 1e6)
        np.testing.assert_allclose(gradient, theta - found.fit.theta, atol=1e-4)
        assert used == found.groups.result.used[j] == 30 * len(members)
        assert found.groups.result.log_likelihood[j] == pytest.approx(value, rel=1e-9)

    # keys begin with the parameters of their group, keys of an unknown group with the pooled ones
    begin = group_begin(KIND, definition, found.parameters)
    assert begin is not None
    new = keyed_bucket([r'["S","1000"]', r'["W","1"]'], [1, 2], 1)
    states = pickle.loads(pickle.dumps(begin))(new)
    errors = found.groups.result.errors[0]
    assert errors is not None and 0.0 < errors["R"][0][0] < 100.0
    for column, learned in zip(states.T, (groups["parameters"][2], found.parameters), strict=True):
        assert column[2:].tolist() == [learned["variance"], learned["R"][0][0]]
