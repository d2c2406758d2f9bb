"""The log-likelihood of the newest measured rows: sums by hand, in every kind of filter and storage."""

import numpy as np
import pytest

import kalman
from kalman.learning.learners import learnable
from kalman.learning.maximum_likelihood import build_linear_learner
from tests.kalman.evaluation.test_row_figures import functional, one_key
from tests.kalman.filters.test_linear import NILE, nile_model
from tests.kalman.support.models import random_definition, random_rows, same
from tests.kalman.support.oracles import UNIT

OUTPUT = "sliding_log_likelihood"
LEVEL = nile_model({"mean": [1000.0], "covariance": [[1e4]]})
IMM = LEVEL | {
    "filter": "imm",
    "process": None,
    "modes": [{"process": {"kind": "random_walk", "variance": q}} for q in (10.0, 5e3)],
    "transition": [[0.9, 0.1], [0.2, 0.8]],
}
MIXTURE = {
    "filter": "gaussian_mixture",
    "states": ["y"],
    "measurement": ["y"],
    "mixture": {"means": [900.0, 1100.0], "covariances": [[[1e4]], [[1e4]]]},
}
RLS = {"filter": "rls", "states": ["level"], "measurement": ["y"]}
KINDS = {
    "linear": LEVEL,
    "diffuse": nile_model({"diffuse": True}),
    "square root": LEVEL | {"form": "square_root"},
    "gated": LEVEL | {"robust": {"gate": {"threshold": 4.0}}},
    "fixed lag": LEVEL | {"smoothing": {"lag": 3}},
    "extended": functional("extended"),
    "unscented": functional("unscented"),
    "imm": IMM,
    "mixture": MIXTURE,
    "rls": RLS,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [1, 7])
def test_it_is_the_sum_over_the_newest_measured_rows(kind, window):
    y = NILE[:60].copy() if kind not in ("extended", "unscented") else NILE[:60] / 1000
    y[[4, 5, 30]] = np.nan
    y[20] = np.inf  # flagged, and not applied
    rows = one_key(y[None])
    plain = kalman.build(KINDS[kind])
    model = kalman.build(KINDS[kind] | {OUTPUT: window})
    _, want = kalman.run(plain, kalman.initial_states(plain, 1), rows, UNIT)
    states, outputs = kalman.run(model, kalman.initial_states(model, 1), rows, UNIT)
    found = outputs.extra.pop(OUTPUT)[0]
    same(outputs._asdict(), want._asdict())
    counted: list[float] = []
    for k in range(60):
        if want.flag[k] == 0 and not np.isnan(y[k]):
            counted.append(want.log_likelihood[k])
        if want.flag[k] != 0 or len(counted) < window:
            assert np.isnan(found[k])
        else:
            total = 0.0
            for one in counted[-window:]:
                total += one
            assert found[k] == total
    # a snapshot's parts give the state back, to the bit
    same(model.restore(*model.snapshot(states.values)), states.values)
    assert np.isfinite(states.values).all()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_it_goes_on_where_a_run_was_cut(dtype):
    rng = np.random.default_rng(3)
    definition = random_definition(rng, "local_linear_trend") | {OUTPUT: 4, "storage": {"dtype": dtype}}
    rows = random_rows(rng, definition, 200, 12)
    model = kalman.build(definition)
    begin = kalman.initial_states(model, 200)
    after, whole = kalman.run(model, begin, rows, UNIT)
    early = rows.time < np.quantile(rows.time, 0.5)
    middle, first = kalman.run(model, begin, rows.take(early), UNIT)
    last, second = kalman.run(model, middle, rows.take(~early), UNIT)
    same(tuple(last), tuple(after))
    same(first.extra[OUTPUT], whole.extra[OUTPUT][:, early])
    same(second.extra[OUTPUT], whole.extra[OUTPUT][:, ~early])


@pytest.mark.parametrize("kind", ["linear", "fixed lag", "extended", "imm"])
def test_smoothing_and_learning_are_as_without_it(kind):
    rows = one_key(NILE[None] if kind != "extended" else NILE[None] / 1000)
    results = []
    for more in ({}, {OUTPUT: 5}):
        model = kalman.build(KINDS[kind] | more)
        _, _, smoothed = kalman.smooth(model, kalman.initial_states(model, 1), rows, UNIT)
        results.append(smoothed)
    same(results[1]._asdict(), results[0]._asdict())
    if kind in ("linear", "imm"):
        wanted = {"parameters": ["R"]} if kind == "linear" else {"parameters": ["transition"]}
        learnable(KINDS[kind] | {OUTPUT: 5, "learn": wanted})
    if kind == "linear":
        build_linear_learner(KINDS[kind] | {OUTPUT: 5, "learn": {"parameters": ["R"], "scope": "key"}})


def test_filters_without_a_log_likelihood_are_refused():
    lms = {"filter": "lms", "states": ["a"], "measurement": ["y"], "lms": {"step": 0.1}, OUTPUT: 5}
    with pytest.raises(
        kalman.ModelError, match=r"outputs\.sliding_log_likelihood: .*no log-likelihood; give observation"
    ):
        kalman.build(lms)
    with pytest.raises(kalman.ModelError, match=r"outputs\.sliding_log_likelihood"):
        kalman.build(LEVEL | {OUTPUT: 0})
