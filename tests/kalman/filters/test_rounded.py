"""A state of 32 bits: what is lost, and that nothing else is."""

import numpy as np
import pytest

import kalman
from kalman import flags
from kalman.evaluation.forecast import forecast
from kalman.filters.rounded import find_storage_dtype
from kalman.smoothers.smooth import smooth
from tests.kalman.support import laws
from tests.kalman.support.models import random_definition, random_rows, same
from tests.kalman.support.nonlinear import random_nonlinear
from tests.kalman.support.oracles import UNIT

KINDS = ["explicit", "local_linear_trend", "constant_velocity", "ornstein_uhlenbeck", "seasonal_dummy", "sum"]
FLOAT32 = {"storage": {"dtype": "float32"}}


def both(definition, rows, keys):
    found = []
    for one in (definition, {**definition, **FLOAT32}):
        model = kalman.build(one)
        found.append((model, *kalman.run(model, kalman.initial_states(model, keys), rows, UNIT)))
    return found


@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["covariance", "square_root"])
def test_the_loss(kind, form, offset):
    """Means within 1e-3 of a standard deviation up to 100 of them from zero; variances to 1e-4 of themselves."""
    rng = np.random.default_rng([len(kind), len(form), int(offset)])
    worst_mean, worst_variance = 0.0, 0.0
    for _ in range(3):
        definition = {**random_definition(rng, kind, 2, 2), "form": form}
        rows = random_rows(rng, definition, 20, 60)
        rows = rows._replace(y=rows.y + offset)
        (_, _, exact), (model, states, outputs) = both(definition, rows, 20)
        assert not outputs.flag.any() and find_storage_dtype(model) == "<f4"
        same(states.values, states.values.astype(np.float32).astype(float))
        variances = exact.covariance[[i * (i + 3) // 2 for i in range(len(definition["states"]))]]
        after = outputs.covariance[[i * (i + 3) // 2 for i in range(len(definition["states"]))]]
        deviations = np.sqrt(variances)
        near = np.maximum(1.0, np.abs(exact.mean) / (100.0 * deviations))
        worst_mean = max(worst_mean, (np.abs(outputs.mean - exact.mean) / deviations / near).max())
        worst_variance = max(worst_variance, np.abs(after / variances - 1.0).max())
    assert 0.0 < worst_mean < 1e-3 and worst_variance < 1e-4


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"smoothing": {"lag": 2}},
        {"robust": {"gate": {"probability": 0.99}}},
        {"initial": {"diffuse": True}},
    ],
)
def test_laws(change):
    rng = np.random.default_rng(5)
    definition = {**random_definition(rng, "explicit", 2, 2), **FLOAT32, **change}
    rows = random_rows(rng, definition, 12, 9)
    model = kalman.build(definition)
    laws.splitting_and_permuting_keys_changes_no_bit(model, rows, 12, rng)
    laws.cutting_rows_changes_no_bit(model, rows, 12, rng)
    laws.snapshot_restores_every_bit(model, rows, 12)
    laws.a_bad_row_hurts_its_own_key_alone(model, rows, 12, np.inf, flags.NON_FINITE)


def test_a_state_beyond_float32_is_an_overflow_and_leaves_the_state():
    definition = {
        "states": ["level"],
        "measurement": ["y"],
        "process": {"kind": "random_walk", "variance": 1.0},
        "observation": {"R": [[1.0]]},
        "initial": {"mean": [0.0], "covariance": [[4.0]]},
        **FLOAT32,
    }
    y = np.array([[1.0, 1e39, 2.0, 1.0, 2.0]])
    rows = kalman.SortedRows(np.array([0, 0, 0, 1, 1]), np.array([0, 1, 2, 0, 2]), y, np.empty((0, 5)))
    model = kalman.build(definition)
    states, outputs = kalman.run(model, kalman.initial_states(model, 2), rows, UNIT)
    assert outputs.flag.tolist() == [0, flags.OVERFLOW, 0, 0, 0]
    assert np.isnan(outputs.log_likelihood[1]) and states.count.tolist() == [2, 2]
    same(states.values[:, 0], states.values[:, 1])


@pytest.mark.parametrize("kind", ["linear", "unscented", "imm", "rls", "poisson_mixture"])
def test_every_kind_can_be_rounded_and_continues_from_the_rounded_state(kind):
    rng = np.random.default_rng(6)
    if kind == "unscented":
        definition = random_nonlinear(rng, kind, 2, 2, 0)
    elif kind == "rls":
        definition = {"filter": kind, "states": ["a", "b"], "measurement": ["y"], "control": ["x"]}
    elif kind == "poisson_mixture":
        definition = {"filter": kind, "measurement": ["y"], "mixture": {"components": 2, "rates": [2.0, 9.0]}}
    else:
        definition = random_definition(rng, "explicit", 2, 1)
        if kind == "imm":
            process = definition.pop("process")
            louder = {**process, "Q": (9.0 * np.array(process["Q"])).tolist()}
            definition |= {
                "filter": kind,
                "modes": [{"process": process}, {"process": louder}],
                "transition": [[0.9, 0.1], [0.1, 0.9]],
            }
    rows = random_rows(rng, {"control": [], **definition}, 8, 12)
    if kind == "poisson_mixture":
        rows = rows._replace(y=np.round(np.abs(rows.y) * 3))
    (_, _, exact), (model, states, outputs) = both(definition, rows, 8)
    np.testing.assert_array_equal(outputs.flag, exact.flag)
    close = np.isfinite(exact.mean) & (np.abs(exact.mean) < 1e6)
    np.testing.assert_allclose(outputs.mean[close], exact.mean[close], rtol=1e-3, atol=1e-3)
    same(states.values, states.values.astype(np.float32).astype(float))
    laws.snapshot_restores_every_bit(model, rows, 8)


def test_smoothing_and_forecasts_see_the_filter_beneath():
    rng = np.random.default_rng(7)
    definition = random_definition(rng, "sum", 3, 2)
    rows = random_rows(rng, definition, 8, 12)
    found = []
    for one in (definition, {**definition, **FLOAT32}):
        model = kalman.build(one)
        states, _, smoothed = smooth(model, kalman.initial_states(model, 8), rows, UNIT)
        found.append([*smoothed[:2], *forecast(model, states, np.ones((2, 8)))])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_a_mistake_is_named():
    definition = random_definition(np.random.default_rng(1), "explicit", 2, 1)
    with pytest.raises(kalman.ModelError, match="float16"):
        kalman.build({**definition, "storage": {"dtype": "float16"}})
