"""What learning does with buckets of rows, without Spark: a frame here is a list of what its rows are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import kalman
from jobs import learn
from jobs.history import Batch
from jobs.learn import Window, learn_pooled
from jobs.packets import Records
from jobs.spec import Learn
from kalman.learning import fit, learnable, maximum_likelihood

Work = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


class Frame:
    """As much of a DataFrame as learning uses."""

    def __init__(self, batches: list[pa.RecordBatch]) -> None:
        self.batches = batches

    def mapInArrow(self, work: Work, schema: str) -> Frame:
        return Frame([made for one in self.batches for made in work(iter([one]))])

    def collect(self) -> list[Any]:
        return [Found(row) for one in self.batches for row in one.to_pylist()]


class Found(dict[str, Any]):
    def __lt__(self, other: Found) -> bool:
        return self["place"] < other["place"]


@pytest.fixture
def history() -> tuple[Frame, Batch, kalman.SortedRows]:
    """Return earthquakes in three buckets of some keys each, and all of them together."""
    path = Path(__file__).parents[1] / "fixtures" / "earthquakes.csv"
    y = np.loadtxt(path, delimiter=",", skiprows=1, usecols=1)[None]
    key = np.arange(107) // 10
    whole = kalman.SortedRows(key, np.arange(107), y, np.empty((0, 107)))
    batch: Any = SimpleNamespace(rows=SimpleNamespace(measurement=("count",), control=()), unit=1.0)
    layout = learn._layout(batch)
    batches: list[pa.RecordBatch] = []
    for place, (low, high) in enumerate(((0, 3), (3, 4), (4, 11))):
        here = (key >= low) & (key < high)
        arrays = {"key": key[here] - low, "time": whole.time[here], "y": y[:, here]}
        packet = layout.encode(Records(arrays, None))
        rows = [pa.array([9 - place]), pa.array([int(here.sum())]), pa.array([packet], pa.binary())]
        batches.append(pa.RecordBatch.from_arrays(rows, ["place", "rows", "payload"]))
    return Frame(batches), batch, whole


DEFINITION = {
    "filter": "poisson_mixture",
    "measurement": ["count"],
    "mixture": {"components": 2},
    "learn": {"parameters": ["weights", "rates"]},
}


def on_buckets(monkeypatch: pytest.MonkeyPatch, frame: Frame) -> None:
    class Kept(Frame):
        def persist(self) -> Kept:
            return self

        def unpersist(self) -> None:
            self.batches = []

        def groupBy(self) -> Any:
            return SimpleNamespace(sum=lambda name: SimpleNamespace(collect=lambda: [[107]]))

    def window_rows(*_: Any) -> Kept:
        return Kept(frame.batches)

    monkeypatch.setattr(learn, "_window_rows", window_rows)


def test_a_mixture_is_learned_from_buckets_as_from_all_rows(
    history: tuple[Any, Batch, kalman.SortedRows], monkeypatch: pytest.MonkeyPatch
) -> None:
    frame, batch, whole = history

    on_buckets(monkeypatch, frame)
    said: list[str] = []
    asked = Learn(parameters=["weights", "rates"], max_iterations=500)
    found = learn_pooled(frame, DEFINITION, asked, batch, Window(), None, said.append)
    assert found.converged and found.rows == 107 and "weights, rates" in said[-1]
    assert found.log_likelihood == pytest.approx(-360.369044, abs=1e-6)
    model = kalman.build(DEFINITION, found.parameters)
    np.testing.assert_allclose(model.initial(1)[:4, 0], [0.675726, 0.324274, 15.777108, 26.839895], rtol=1e-3)

    problem = learnable(DEFINITION)
    direct = problem.fit(lambda theta: problem.evaluate(theta, whole, 11, 1.0), lambda: whole.y, 500)
    np.testing.assert_allclose(found.theta, direct.theta, rtol=1e-2)  # held-out rows differ, and so the start


def test_maximum_likelihood_goes_the_same_way(
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
    found = learn_pooled(frame, definition, Learn(parameters=["Q", "R"]), batch, Window(), None, print)
    problem = maximum_likelihood(definition)
    direct = fit(lambda theta: problem.value_and_gradient(theta, whole, 11, 1.0), problem.start)
    assert found.converged and found.held_out is None
    assert found.log_likelihood == pytest.approx(direct.log_likelihood, rel=1e-10)
    np.testing.assert_allclose(found.theta, direct.theta, rtol=1e-4)


def test_a_sample_is_some_rows_of_every_bucket(history: tuple[Any, Batch, kalman.SortedRows]) -> None:
    frame, batch, whole = history
    some = learn._sample(frame, batch, 7)
    expected = [whole.y[:, low:high:7] for low, high in ((40, 107), (30, 40), (0, 30))]
    np.testing.assert_array_equal(some, np.concatenate(expected, axis=1))
    np.testing.assert_array_equal(np.sort(learn._sample(frame, batch, 1)), np.sort(whole.y))
