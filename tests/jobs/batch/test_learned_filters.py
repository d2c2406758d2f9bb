"""Learning through `pretrain`: entries of matrices, EM, filters that are not linear, and modes, by key and by group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import kalman
from jobs.batch import key_learning
from jobs.batch.batch_filter import Batch, Interval
from jobs.batch.key_learning import fit_bucket, learn_key_states, learn_populations
from jobs.spark.local_frame import LocalFrame
from jobs.specs.model_spec import Learn, ModelSpec
from kalman.learning.key_fits import FitOutcome
from kalman.learning.learners import learnable
from tests.jobs.batch.test_learn import KIND, Work, keyed_bucket
from tests.jobs.offline.test_learned_parameters import filtered, last_rows, readings, spec, states_of
from tests.jobs.support.pipeline import Pipeline

BY_KEY = {"scope": "key"}
BY_GROUP = {"scope": "group", "by": ["site"]}
DECAY = {
    "process": {"kind": "explicit", "F": [[0.9]], "Q": [[1.0]]},
    "observation": {"H": [[1.0]], "R": [[1.0]]},
}
DRAWN = {
    "process": {"kind": "continuous", "A": [[-0.1]], "diffusion": [[1.0]]},
    "observation": DECAY["observation"],
}
MODES: dict[str, Any] = {
    "modes": [
        {"name": "slow", "process": {"kind": "random_walk", "variance": 0.05}},
        {"name": "fast", "process": {"kind": "random_walk", "variance": 2.0}},
    ],
    "transition": [[0.9, 0.1], [0.2, 0.8]],
    "process": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "entries_em": {**DECAY, "learn": {"parameters": ["F[0][0]", "Q", "R"], "method": "em", **BY_KEY}},
    "matrix_a": {**DRAWN, "learn": {"parameters": ["A[0][0]", "diffusion", "R"], **BY_KEY}},
    "extended": {"filter": "extended", "learn": {"parameters": ["variance", "R"], **BY_KEY}},
    "groups_em": {**DECAY, "learn": {"parameters": ["F[0][0]", "R"], "method": "em", **BY_GROUP}},
    "unscented": {"filter": "unscented", "learn": {"parameters": ["variance", "R"], **BY_GROUP}},
    "modes": {
        "filter": "imm",
        **MODES,
        "learn": {"parameters": ["fast.variance", "R", "transition"], **BY_KEY},
    },
}


def written(name: str) -> dict[str, Any]:
    whole = {**spec("by_key"), **MODELS[name], "name": name}
    return {field: value for field, value in whole.items() if value is not None}


@pytest.mark.parametrize(
    "name", ["entries_em", "matrix_a", "extended", pytest.param("modes", marks=pytest.mark.slow)]
)
def test_the_pass_that_filters_begins_each_key_with_what_it_learned(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Spark, a frame being a list of batches: the states are those of a run with each key's own values."""
    model_spec = ModelSpec.model_validate(written(name))
    definition, asked = model_spec.definition(), model_spec.learn
    assert isinstance(asked, Learn)
    length = 60 if name == "entries_em" else 24
    texts = [f'["N","{i}"]' for i in range(3)]
    buckets = [keyed_bucket(texts[:2], [1, 2], length), keyed_bucket(texts[2:], [3], length)]
    fmt: Any = SimpleNamespace(measurement=("a",), control=(), kind=KIND)
    batch = Batch(fmt, 1e6)

    def each_bucket(fmt: Any, work: Callable[[Any], Iterator[pa.RecordBatch]]) -> Work:
        return lambda batches: (made for one in batches for made in work(buckets[one.column(0)[0].as_py()]))

    monkeypatch.setattr(key_learning, "build_bucket_worker", each_bucket)
    packed: Any = LocalFrame(lambda: [pa.RecordBatch.from_arrays([pa.array([i])], ["n"]) for i in range(2)])
    populations = learn_populations(packed, definition, asked, batch, Interval(), 3, print)
    kernel, problem = kalman.build(definition), learnable(definition)
    assert populations.parameters(problem).keys() == problem.places.keys()
    found = learn_key_states(packed, definition, kernel, batch, Interval(), populations)
    states: list[Any] = [row for row in found.collect() if row["fit"] is None]
    fits: list[Any] = [row["fit"] for row in found.collect() if row["fit"] is not None]
    assert len(states) == len(fits) == 3
    at = 0
    for one in buckets:
        fit, _ = fit_bucket(problem, one, batch, Interval(), populations)
        keys = one.keys.size
        begun = kalman.initial_states(kernel, keys)
        begun = begun._replace(values=kernel.with_parameters(begun.values, fit.parameters))
        after, _ = kalman.run(kernel, begun, one.rows, 1e6)
        mean, _, _ = kernel.snapshot(after.values)
        for k in range(keys):
            assert states[at + k]["mean"] == mean[:, k].tolist()
            assert fits[at + k]["outcome"] == FitOutcome(fit.outcome[k]).name.lower()
            assert len(fits[at + k]["parameters"]) == len(fits[at + k]["standard_errors"])
        at += keys


@pytest.mark.spark
@pytest.mark.parametrize(
    "name",
    [name if name == "entries_em" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
)
def test_pretrain_writes_what_was_learned_and_filter_ends_in_its_states(tmp_path: Path, name: str) -> None:
    """Each key's own or its group's values, with outcomes and errors in `learned`; the same bits without Spark."""
    rows, scope = readings(), MODELS[name]["learn"]["scope"]
    pipeline = Pipeline(tmp_path, written(name))
    pipeline.land(rows)
    identity = pipeline.pretrain().data["snapshot"]
    report, out = filtered(pipeline, rows)
    assert report.data["snapshot"] == identity
    assert last_rows(out) == states_of(pipeline, identity)
    own = [row for row in pipeline.tables.rows("learned") if row["scope"] == scope]
    assert len(own) == (5 if scope == "key" else 2)
    assert len({tuple(sorted(dict(row["parameters"]).items())) for row in own}) == len(own), (
        "each has its own"
    )
    errors = [
        error
        for row in own
        if row["outcome"] == "converged"
        for error in dict(row["standard_errors"]).values()
        if error is not None
    ]
    assert errors and min(errors) > 0.0
    assert all(row["outcome"] in ("converged", "at_bound", "too_few_rows") for row in own)
    assert np.isfinite([row["nis"] for row in own]).all()
    # A key that the snapshot does not know has the population's values, or its group's.
    known: Any = rows[rows["id"] == 2]
    last = last_rows(filtered(pipeline, pd.concat([known, known.assign(id=77)]))[1])
    assert (last[2] == last[77]) == (scope == "group")
