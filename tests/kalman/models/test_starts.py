"""Starts from columns: each key begins where its first row says, whatever the filter."""

from typing import Any

import numpy as np
import pytest
import statsmodels.api as sm

import kalman
from kalman.mixtures.building import request
from kalman.run import KeyStates
from kalman.smoothers.smooth import smooth
from tests.kalman.support.oracles import UNIT

SECOND = 1_000_000
HERE = "tests.kalman.filters.test_gaussian"
TREND: dict[str, Any] = {
    "states": ["level", "slope"],
    "measurement": ["y"],
    "control": ["level0", "var0", "cov0"],
    "process": {"kind": "explicit", "F": [[1.0, 1.0], [0.0, 1.0]], "Q": [[0.3, 0.0], [0.0, 0.1]]},
    "observation": {"H": [[1.0, 0.0]], "R": [[0.8]]},
    "initial": {"mean": ["level0", 0.5], "covariance": [["var0", "cov0"], ["cov0", 2.0]]},
}
MODE = {name: TREND[name] for name in ("process", "observation")}
NOISY = {**MODE, "observation": {**MODE["observation"], "R": [[5.0]]}}
SHARED = {name: TREND[name] for name in ("states", "measurement", "control", "initial")}
KINDS: dict[str, dict[str, Any]] = {
    "linear": TREND,
    "square root": {**TREND, "form": "square_root"},
    "information": {**TREND, "form": "information"},
    "extended": {**TREND, "filter": "extended"},
    "unscented": {**TREND, "filter": "unscented"},
    "cubature roots": {**TREND, "filter": "cubature", "form": "square_root"},
    "gated": {**TREND, "robust": {"gate": {"threshold": 1e6}}},
    "adaptive": {**TREND, "filter": "extended", "adaptive": {"R": 0.02}},
    "fixed lag": {**TREND, "smoothing": {"lag": 2}},
    "imm": {**SHARED, "filter": "imm", "modes": [MODE, NOISY], "transition": [[0.9, 0.1], [0.2, 0.8]]},
    "mmae": {**SHARED, "filter": "mmae", "modes": [MODE, NOISY]},
}
KEYS = 6


def rows_of(seed: int = 1, many: int = 8) -> kalman.SortedRows:
    """Rows of six keys; the columns are different in every row, so that only the first ones' may count."""
    rng = np.random.default_rng(seed)
    n = KEYS * many
    y = rng.normal(size=(1, n))
    y[0, [a for a in (3, 20) if a < n]] = np.nan
    u = np.array([rng.normal(size=n), rng.uniform(1.0, 3.0, n), rng.uniform(-0.5, 0.5, n)])
    return kalman.SortedRows(np.repeat(np.arange(KEYS), many), np.tile(np.arange(many), KEYS) * SECOND, y, u)


def with_numbers(definition: dict[str, Any], u: np.ndarray) -> dict[str, Any]:
    level, variance, covariance = (float(a) for a in u)
    initial = {"mean": [level, 0.5], "covariance": [[variance, covariance], [covariance, 2.0]]}
    return {**definition, "initial": initial, "control": []}


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_starts_as_its_first_row_says(kind):
    """As with the first row's numbers in the spec; also where the rows come in several calls."""
    definition, rows = KINDS[kind], rows_of()
    model = kalman.build(definition)
    states = kalman.initial_states(model, KEYS)
    whole = kalman.run(model, states, rows, UNIT)[1]
    early = rows.time < 3 * UNIT
    between, _ = kalman.run(model, states, rows.take(early), UNIT)
    _, later = kalman.run(model, between, rows.take(~early), UNIT)
    np.testing.assert_array_equal(later.mean, whole.mean[:, ~early])
    for key in range(KEYS):
        mine = rows.take(rows.key == key)._replace(key=np.zeros(8, np.int64))
        number = kalman.build(with_numbers(definition, mine.u[:, 0]))
        alone = kalman.run(number, kalman.initial_states(number, 1), mine._replace(u=mine.u[:0]), UNIT)[1]
        np.testing.assert_array_equal(whole.mean[:, rows.key == key], alone.mean)
        np.testing.assert_array_equal(whole.covariance[:, rows.key == key], alone.covariance)
        np.testing.assert_array_equal(whole.log_likelihood[rows.key == key], alone.log_likelihood)
        for name, value in alone.extra.items():
            np.testing.assert_array_equal(whole.extra[name][:, rows.key == key], value)


def test_the_start_is_that_of_statsmodels():
    rows = rows_of()
    mine = rows.take(rows.key == 2)._replace(key=np.zeros(8, np.int64))
    model = kalman.build(TREND)
    out = kalman.run(model, kalman.initial_states(model, 1), mine, UNIT)[1]
    level, variance, covariance = mine.u[:, 0]
    peer = sm.tsa.statespace.MLEModel(
        mine.y[0],
        k_states=2,
        initialization="known",
        initial_state=[level, 0.5],
        initial_state_cov=[[variance, covariance], [covariance, 2.0]],
    )
    peer["design"], peer["obs_cov"] = np.array([[1.0, 0.0]]), np.array([[0.8]])
    peer["transition"], peer["selection"] = np.array([[1.0, 1.0], [0.0, 1.0]]), np.eye(2)
    peer["state_cov"] = np.diag([0.3, 0.1])
    truth: Any = peer.ssm.filter()
    np.testing.assert_allclose(out.mean, truth.filtered_state, rtol=1e-11)
    np.testing.assert_allclose(out.log_likelihood, truth.llf_obs, rtol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_state_begins_there(kind):
    """Before its first row is used: each entry of it, of the keys that begin alone."""
    model: Any = kalman.build(KINDS[kind])
    u = rows_of().u[:, ::8]
    first = np.arange(KEYS) % 2 == 0
    before = model.initial(KEYS)
    begun, wrong = model.begun(before, first, u)
    assert not wrong.any()
    np.testing.assert_array_equal(begun[:, ~first], before[:, ~first])
    for key in np.flatnonzero(first):
        number = kalman.build(with_numbers(KINDS[kind], u[:, key]))
        np.testing.assert_array_equal(begun[:, key], number.initial(1)[:, 0])


@pytest.mark.parametrize("kind", ["linear", "square root", "unscented", "imm", "fixed lag"])
def test_smoothing_begins_there_too(kind):
    rows = rows_of()
    model = kalman.build(KINDS[kind])
    smoothed = smooth(model, kalman.initial_states(model, KEYS), rows, UNIT)[2]
    for key in (0, 4):
        mine = rows.take(rows.key == key)._replace(key=np.zeros(8, np.int64))
        number = kalman.build(with_numbers(KINDS[kind], mine.u[:, 0]))
        alone = smooth(number, kalman.initial_states(number, 1), mine._replace(u=mine.u[:0]), UNIT)[2]
        np.testing.assert_allclose(smoothed.mean[:, rows.key == key], alone.mean, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_start_that_is_no_distribution_flags_its_row(kind):
    """Its key begins with the next row whose columns are one; other keys go on."""
    rows = rows_of()
    u = rows.u.copy()
    u[1, 8] = -1.0  # a variance of key 1's first row
    u[2, 16] = 40.0  # a covariance of key 2's first row
    model = kalman.build(KINDS[kind])
    states, out = kalman.run(model, kalman.initial_states(model, KEYS), rows._replace(u=u), UNIT)
    assert [kalman.FLAGS[out.flag[i]] for i in (8, 16)] == ["not_psd"] * 2
    for figure in (out.log_likelihood, out.nis, *(row for extra in out.extra.values() for row in extra)):
        assert np.isnan(figure[[8, 16]]).all()
    assert not np.delete(out.flag, [8, 16]).any()
    assert states.count.tolist() == [8, 7, 7, 8, 8, 8]
    begun = rows.take((rows.key == 1) & (rows.time > 0))._replace(key=np.zeros(7, np.int64))
    alone = kalman.run(model, kalman.initial_states(model, 1), begun, UNIT)[1]
    np.testing.assert_array_equal(out.mean[:, 9:16], alone.mean)
    good = kalman.run(model, kalman.initial_states(model, KEYS), rows, UNIT)[1]
    np.testing.assert_array_equal(out.mean[:, rows.key == 5], good.mean[:, rows.key == 5])


@pytest.mark.parametrize("kind", KINDS)
def test_an_infinite_mean_flags_its_row_alone(kind):
    rows = rows_of(many=1)
    u = rows.u.copy()
    u[0, 4] = np.inf
    model = kalman.build(KINDS[kind])
    out = kalman.run(model, kalman.initial_states(model, KEYS), rows._replace(u=u), UNIT)[1]
    assert [kalman.FLAGS[flag] for flag in out.flag] == [*[None] * 4, "not_psd", None]


def test_what_a_key_has_of_its_own_stays():
    """Learned parameters in a state stay where mean and covariance are replaced."""
    model = kalman.build(KINDS["adaptive"])
    fresh = kalman.initial_states(model, KEYS)
    values = fresh.values.copy()
    values[-1] = np.arange(1.0, 1.0 + KEYS)  # R of each key
    rows = rows_of(many=1)
    y = np.full_like(rows.y, np.nan)
    after = kalman.run(model, KeyStates(values, *fresh[1:]), rows._replace(y=y), UNIT)[0]
    np.testing.assert_array_equal(after.values[-1], values[-1])
    np.testing.assert_array_equal(after.values[0], rows.u[0])


def test_a_forecast_of_a_key_without_rows_begins_there():
    model = kalman.build(TREND)
    u = np.array([[1.5], [2.0], [0.25]])
    found = kalman.forecast(model, kalman.initial_states(model, 1), np.ones((2, 1)), np.stack([u, 9.0 * u]))
    np.testing.assert_allclose(found.mean[:, :, 0], [[1.5, 2.0], [0.5, 0.5]], rtol=1e-15)


WRONG = [
    (
        {"control": [], "initial": {"mean": ["other", 0.0], "covariance": [[1.0, 0.0], [0.0, 1.0]]}},
        "initial.mean[0]",
        "not a control",
    ),
    (
        {
            "control": ["var0", "cov0"],
            "initial": {"mean": [0.0, 0.0], "covariance": [["var0", "cov0"], [0.0, 1.0]]},
        },
        "initial.covariance",
        "not symmetric",
    ),
    ({"initial": {**TREND["initial"], "diffuse": [True, False]}}, "initial", "diffuse"),
    ({"learn": {"parameters": ["R"]}}, "initial", "comes from columns"),
    ({"control": [*TREND["control"], "unused"]}, "control", "does not use it: unused"),
    (
        {"filter": "rls", "process": None, "observation": None, "control": ["a"]},
        "initial.mean",
        "not a number",
    ),
]


@pytest.mark.parametrize(("changes", "field", "problem"), WRONG)
def test_an_error_names_the_field(changes, field, problem):
    with pytest.raises(kalman.ModelError) as error:
        kalman.build({**TREND, **changes})
    assert error.value.field.startswith(field) and problem in error.value.problem


MIXTURES: dict[str, tuple[dict[str, Any], dict[str, Any], list[float]]] = {
    "gaussian_mixture": (
        {
            "weights": ["w0", "w1"],
            "means": [["m0", 0.0], [3.0, "m1"]],
            "covariances": [[["v0", 0.0], [0.0, 2.0]], [[9.0, "c1"], ["c1", 1.0]]],
            "batch": 2,
        },
        {
            "weights": [0.25, 0.75],
            "means": [[-1.0, 0.0], [3.0, 2.0]],
            "covariances": [[[4.0, 0.0], [0.0, 2.0]], [[9.0, 0.5], [0.5, 1.0]]],
            "batch": 2,
        },
        [0.25, 0.75, -1.0, 2.0, 4.0, 0.5],
    ),
    "poisson_mixture": ({"rates": ["r0", 9.0]}, {"rates": [3.0, 9.0]}, [3.0]),
    "bernoulli_mixture": (
        {"probabilities": ["p0", "p1"], "weights": ["w0", 0.4]},
        {"probabilities": [0.2, 0.9], "weights": [0.6, 0.4]},
        [0.2, 0.9, 0.6],
    ),
    "categorical_mixture": (
        {
            "categories": [2, 3],
            "probabilities": [["p0", "p1", "p2", 0.3, "p3"], [0.6, 0.4, 0.2, 0.2, 0.6]],
            "weights": ["w0", 0.4],
        },
        {
            "categories": [2, 3],
            "probabilities": [[0.1, 0.9, 0.5, 0.3, 0.2], [0.6, 0.4, 0.2, 0.2, 0.6]],
            "weights": [0.6, 0.4],
        },
        [0.1, 0.9, 0.5, 0.2, 0.6],
    ),
}


@pytest.mark.parametrize("more", [{}, {"warm_up": 3}, {"warm_up": 3, "batch": 2}], ids=str)
@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixture_starts_as_its_first_row_says(kind, more):
    written, numbers, values = MIXTURES[kind]
    written, numbers = written | more, numbers | more
    names = {"gaussian_mixture": ["w0", "w1", "m0", "m1", "v0", "c1"], "poisson_mixture": ["r0"]}
    names["categorical_mixture"] = ["p0", "p1", "p2", "p3", "w0"]
    control = names.get(kind, ["p0", "p1", "w0"])
    m = 2 if kind in ("gaussian_mixture", "categorical_mixture") else 1
    base = {"filter": kind, "measurement": ["a", "b"][:m]}
    model = kalman.build({**base, "control": control, "mixture": written})
    number = kalman.build({**base, "mixture": numbers})
    rng = np.random.default_rng(3)
    y = rng.normal(size=(m, 12)) if kind == "gaussian_mixture" else rng.integers(0, 2, (m, 12)).astype(float)
    u = np.full((len(values), 12), 7.0)
    u[:, [0, 6]] = np.array(values)[:, None]
    rows = kalman.SortedRows(np.repeat([0, 1], 6), np.tile(np.arange(6), 2) * SECOND, y, u)
    found = kalman.run(model, kalman.initial_states(model, 2), rows, UNIT)
    expected = kalman.run(number, kalman.initial_states(number, 2), rows._replace(u=u[:0]), UNIT)
    np.testing.assert_array_equal(found[1].mean, expected[1].mean)
    np.testing.assert_array_equal(found[0].values, expected[0].values)
    wrong = {0: -1.0}
    if "w0" in control:
        wrong[control.index("w0")] = 0.55  # weights whose sum is not 1
    for place, value in wrong.items():
        bad = u.copy()
        bad[place, 6] = value
        out = kalman.run(model, kalman.initial_states(model, 2), rows._replace(u=bad), UNIT)[1]
        assert kalman.FLAGS[out.flag[6]] == "not_psd" and not out.flag[:6].any()
        assert all(np.isnan(a[..., 6]).all() for a in (out.log_likelihood, out.nis, *out.extra.values()))


NO_START: dict[str, tuple[dict[str, Any], dict[str, float], list[dict[str, float]]]] = {
    "gaussian_mixture": (
        {"weights": ["w0", "w1"], "means": [["m0", 0.0], [3.0, 1.0]],
         "covariances": [[["v0", 0.0], [0.0, "v1"]], [[9.0, "c1"], ["c1", 1.0]]]},
        {"w0": 0.25, "w1": 0.75, "m0": -1.0, "v0": 4.0, "v1": 2.0, "c1": 0.5},
        [{"v0": 0.0}, {"v1": 0.0}, {"v1": -1.0}, {"c1": 3.1}, {"c1": -3.1}, {"m0": np.inf}],
    ),
    "poisson_mixture": (
        {"weights": ["w0", "w1"], "rates": ["r0", 9.0]},
        {"w0": 0.25, "w1": 0.75, "r0": 3.0},
        [{"r0": 0.0}, {"r0": -1.0}, {"r0": np.inf}],
    ),
    "bernoulli_mixture": (
        {"weights": ["w0", "w1"], "probabilities": ["p0", "p1"]},
        {"w0": 0.25, "w1": 0.75, "p0": 0.2, "p1": 0.9},
        [{"p0": 0.0}, {"p1": 1.0}, {"p0": -0.1}, {"p1": 1.1}],
    ),
    "categorical_mixture": (
        {"weights": ["w0", "w1"], "categories": [2, 3],
         "probabilities": [["p0", 0.9, 0.5, 0.3, 0.2], [0.6, 0.4, 0.2, "p1", "p2"]]},
        {"w0": 0.25, "w1": 0.75, "p0": 0.1, "p1": 0.2, "p2": 0.6},
        [{"p0": 0.2}, {"p1": 0.1}, {"p1": -0.1, "p2": 0.9}, {"p1": 0.0, "p2": 0.8}, {"p0": 0.1 + 1.1e-6}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", NO_START)
def test_a_mixture_starts_from_no_column_that_breaks_one_rule(kind):
    """Each rule is broken alone, all others hold; what misses a sum of 1 by less than a millionth is brought there."""
    written, good, bad = NO_START[kind]
    m = 2 if kind in ("gaussian_mixture", "categorical_mixture") else 1
    base = {"filter": kind, "measurement": ["a", "b"][:m], "control": list(good)}
    start = request({**base, "mixture": written}).own_start
    assert start is not None
    bad = [
        *bad, {"w0": 0.3}, {"w1": 0.7}, {"w0": -0.25, "w1": 1.25}, {"w0": 0.0, "w1": 1.0}, {"w1": np.nan},
        {"w0": 0.25 + 1.1e-6}, {"w0": 0.25 - 1.1e-6},
    ]  # fmt: skip
    fair = [{}, {"w0": 0.25 + 0.9e-6}, {"w0": 0.25 - 0.9e-6}]
    fair += [{"p0": 0.1 + 0.9e-6}, {"p1": 0.2 - 0.9e-6}] if kind == "categorical_mixture" else []
    u = np.array([list({**good, **one}.values()) for one in [*fair, *bad]]).T
    flat, wrong = start.resolve_start(u)
    assert wrong.tolist() == [False] * len(fair) + [True] * len(bad)
    np.testing.assert_allclose(flat[:2, : len(fair)].sum(axis=0), 1.0, rtol=1e-15)
    if kind == "categorical_mixture":
        for part in ([2, 3], [4, 5, 6], [7, 8], [9, 10, 11]):
            np.testing.assert_allclose(flat[part, : len(fair)].sum(axis=0), 1.0, rtol=1e-15)


def test_a_mixture_that_cannot_start_from_columns():
    base = {"filter": "poisson_mixture", "measurement": ["a"], "control": ["r0"]}
    rates = {"mixture": {"rates": ["r0", 9.0]}}
    for changes, problem in (
        ({**rates, "learn": {"parameters": ["rates"]}}, "come from columns"),
        ({"mixture": {"rates": ["other", 9.0]}}, "not a control column"),
        ({"mixture": {"rates": [3.0, 9.0]}}, "does not use it: r0"),
        ({"mixture": {"components": 3, "rates": ["r0", 9.0]}}, "not one for each component"),
    ):
        with pytest.raises(kalman.ModelError) as error:
            kalman.build({**base, **changes})
        assert problem in error.value.problem
