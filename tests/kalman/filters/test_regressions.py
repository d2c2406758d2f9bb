"""RLS against least squares and certified numbers, LMS and NLMS against the textbook."""

import pickle

import numpy as np
import pytest
from scipy.stats import t as student
from statsmodels.datasets import longley

import kalman
from kalman import flags
from tests.kalman.support.models import same
from tests.kalman.support.oracles import UNIT, full


def definition(kind, regressors, intercept=True, **more):
    return {
        "filter": kind,
        "states": [*(["b0"] if intercept else []), *(f"b{i + 1}" for i in range(regressors))],
        "measurement": ["y"],
        "control": [f"x{i + 1}" for i in range(regressors)],
        **more,
    }


def rows_of(y, X, keys=1):
    y = np.atleast_2d(np.asarray(y, float))
    count = y.shape[1] // keys
    time = np.tile(np.arange(count) * 1_000_000, keys)
    return kalman.SortedRows(np.repeat(np.arange(keys), count), time, y, np.asarray(X, float).T.copy())


def run(given, rows, keys=1):
    model = kalman.build(given)
    states, outputs = kalman.run(model, kalman.initial_states(model, keys), rows, UNIT)
    return model, states, outputs


def test_longley():
    """NIST StRD, Longley: certified coefficients and standard deviations; covariance-form RLS gets none right."""
    data = longley.load_pandas()
    certified = [
        (-3482258.63459582, 890420.383607373),
        (15.0618722713733, 84.9149257747669),
        (-0.358191792925910e-01, 0.334910077722432e-01),
        (-2.02022980381683, 0.488399681651699),
        (-1.03322686717359, 0.214274163161675),
        (-0.511041056535807e-01, 0.226073200069370),
        (1829.15146461355, 455.478499142212),
    ]
    y, X = np.asarray(dict(data)["endog"], float), np.asarray(dict(data)["exog"], float)
    _, states, outputs = run(definition("rls", 6), rows_of(y, X))
    b, deviation = np.array(certified).T
    np.testing.assert_allclose(outputs.mean[:, -1], b, rtol=5e-12)
    np.testing.assert_allclose(np.sqrt(full(outputs.covariance)[-1].diagonal()), deviation, rtol=1e-11)
    assert states.values[-2, 0] / 9 == pytest.approx(304.854073561965**2, rel=1e-11)  # residual variance


@pytest.mark.parametrize("seed", range(6))
def test_every_row_is_weighted_least_squares(seed):
    """Coefficients, covariance, residual variance and likelihood from scratch at every row, with missing ones."""
    rng = np.random.default_rng(seed)
    forgetting = [1.0, 0.97][seed % 2]
    X, n = rng.normal(size=(40, 3)) * [1, 100, 0.01], 4
    y = X @ [1.0, 0.02, 300.0] + rng.normal(size=40)
    y[rng.random(40) < 0.2] = np.nan
    _, _, outputs = run(definition("rls", 3, rls={"forgetting": forgetting}), rows_of(y, X))
    A, seen = np.column_stack([np.ones(40), X]), ~np.isnan(y)
    squares = []  # of the recursive residuals, Brown, Durbin and Evans (1975)
    for k in range(40):
        here = np.flatnonzero(seen[: k + 1])
        weights = forgetting ** (len(here) - 1 - np.arange(len(here)))
        if not seen[k]:
            assert outputs.log_likelihood[k] == 0 and np.isnan(outputs.nis[k])
            continue
        if len(here) > n:
            before, old = here[:-1], weights[:-1]
            information = (A[before].T * old) @ A[before]
            b = np.linalg.solve(information, (A[before].T * old) @ y[before])
            share = 1 + A[k] @ np.linalg.solve(information, A[k])
            s2 = (
                sum(w * e for w, e in zip(old[n:], squares, strict=True)) / old[n:].sum() if squares else None
            )
            if s2 is not None:
                error = y[k] - A[k] @ b
                expected = student.logpdf(error, old[n:].sum(), scale=np.sqrt(s2 * share))
                assert outputs.log_likelihood[k] == pytest.approx(expected, rel=1e-9)
                assert outputs.nis[k] == pytest.approx(error**2 / (s2 * share), rel=1e-9)
            squares.append((y[k] - A[k] @ b) ** 2 / share)
            information = (A[here].T * weights) @ A[here]
            b = np.linalg.solve(information, (A[here].T * weights) @ y[here])
            np.testing.assert_allclose(outputs.mean[:, k], b, rtol=1e-9)
            s2 = sum(w * e for w, e in zip(weights[n:], squares, strict=True)) / weights[n:].sum()
            if forgetting == 1.0:
                assert s2 == pytest.approx(((y[here] - A[here] @ b) ** 2).sum() / (len(here) - n), rel=1e-8)
            np.testing.assert_allclose(
                full(outputs.covariance)[k], s2 * np.linalg.inv(information), rtol=1e-8, atol=1e-12
            )
        else:
            assert np.isinf(outputs.covariance[0, k]) and np.isnan(outputs.nis[k])


def test_it_is_the_kalman_filter_of_coefficients_that_stay():
    rng = np.random.default_rng(1)
    X = rng.normal(size=(30, 2))
    y = X @ [1.0, -2.0] + rng.normal(size=30)
    linear = definition("linear", 2)
    linear["process"] = {"kind": "explicit", "F": np.eye(3).tolist(), "Q": np.zeros((3, 3)).tolist()}
    linear["observation"] = {"H": [[1.0, "x1", "x2"]], "R": [[1.0]]}
    for initial in (
        {"diffuse": True},
        {"mean": [1.0, 2.0, 3.0], "covariance": [[2.0, 0.5, 0.0], [0.5, 1.0, 0.2], [0.0, 0.2, 3.0]]},
        {
            "diffuse": [True, False, False],
            "mean": [0.0, 2.0, 3.0],
            "covariance": [[0.0, 0.0, 0.0], [0.0, 1.0, 0.2], [0.0, 0.2, 3.0]],
        },
    ):
        rows = rows_of(y, X)
        _, _, theirs = run(linear | {"initial": initial}, rows)
        _, states, mine = run(definition("rls", 2, initial=initial), rows)
        np.testing.assert_allclose(mine.mean[:, 4:], theirs.mean[:, 4:], rtol=1e-9)
        s2 = states.values[-2] / states.values[-1]
        np.testing.assert_allclose(mine.covariance[:, -1], s2 * theirs.covariance[:, -1], rtol=1e-9)


def test_delta_is_a_ridge():
    rng = np.random.default_rng(2)
    X, y = rng.normal(size=(10, 2)), rng.normal(size=10)
    _, _, outputs = run(definition("rls", 2, False, rls={"delta": 0.7}), rows_of(y, X))
    np.testing.assert_allclose(
        outputs.mean[:, -1], np.linalg.solve(X.T @ X + 0.7 * np.eye(2), X.T @ y), rtol=1e-10
    )


def test_undetermined_coefficients_have_infinite_variances():
    """A regressor that repeats another, and one that is always zero, leave the others as they are."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=20) * 1e3
    y = 2 * x + 5 + rng.normal(size=20)
    X = np.column_stack([x, np.zeros(20), 3 * x + 1])
    _, _, outputs = run(definition("rls", 3), rows_of(y, X))
    assert not outputs.flag.any()
    last = full(outputs.covariance)[-1]
    assert np.isinf(last.diagonal()).tolist() == [True, True, True, True]
    # what the data do determine is predicted as by the smaller regression, and judged as by it
    _, _, small = run(definition("rls", 1), rows_of(y, x[:, None]))
    np.testing.assert_allclose(outputs.log_likelihood, small.log_likelihood, rtol=1e-7)
    _, _, partly = run(definition("rls", 2), rows_of(y, X[:, :2]))
    assert np.isinf(full(partly.covariance)[-1].diagonal()).tolist() == [False, False, True]
    np.testing.assert_allclose(partly.mean[:2, -1], small.mean[:, -1], rtol=1e-10)


def test_several_measurements_of_the_same_coefficients():
    rng = np.random.default_rng(4)
    X, y = rng.normal(size=(12, 4)), rng.normal(size=(2, 12))
    y[0, 3] = y[1, 7] = np.nan
    given = definition("rls", 4, False)
    given |= {"states": ["a", "b"], "measurement": ["y", "z"]}
    given["observation"] = {"H": [["x1", "x2"], ["x3", "x4"]], "offset": [1.0, -1.0]}
    _, _, outputs = run(given, rows_of(y, X))
    A, values = np.concatenate([X[:, :2], X[:, 2:]]), np.concatenate([y[0] - 1, y[1] + 1])
    seen = ~np.isnan(values)
    np.testing.assert_allclose(outputs.mean[:, -1], np.linalg.lstsq(A[seen], values[seen])[0], rtol=1e-10)


def test_lms_and_nlms_are_the_textbooks():
    """Haykin (2014), equations 6.3 and 7.14."""
    rng = np.random.default_rng(5)
    X = rng.normal(size=(60, 2))
    y = X @ [1.0, -2.0] + 0.1 * rng.normal(size=60)
    y[[4, 9]] = np.nan
    for kind, options in (("lms", {"step": 0.05}), ("nlms", {"step": 0.5, "epsilon": 1e-3})):
        given = definition(kind, 2, initial={"mean": [0.5, 0.0, 1.0]}) | {kind: options}
        given["observation"] = {"R": [[0.04]]}
        _, _, outputs = run(given, rows_of(y, X))
        w = np.array([0.5, 0.0, 1.0])
        for k in range(60):
            h = np.array([1.0, *X[k]])
            e = y[k] - h @ w
            if not np.isnan(e):
                w = w + options["step"] * h * e / (1.0 if kind == "lms" else 1e-3 + h @ h)
                assert outputs.log_likelihood[k] == pytest.approx(
                    -0.5 * (np.log(2 * np.pi * 0.04) + e * e / 0.04), rel=1e-10
                )
                assert outputs.nis[k] == pytest.approx(e * e / 0.04, rel=1e-10)
            else:
                assert outputs.log_likelihood[k] == 0 and np.isnan(outputs.nis[k])
            np.testing.assert_allclose(outputs.mean[:, k], w, rtol=1e-10)
        assert np.isnan(outputs.covariance).all()
    # NLMS with step 1 and no epsilon: after its step the row fits exactly
    given = definition("nlms", 2, nlms={"step": 1.0, "epsilon": 0.0})
    _, _, outputs = run(given, rows_of(y[:4], X[:4]))
    np.testing.assert_allclose(outputs.mean[0] + (X[:4].T * outputs.mean[1:]).sum(0), y[:4], rtol=1e-12)


def test_lms_settles_at_the_misadjustment_of_the_theory():
    """Haykin (2014), section 6.4: for white input the excess error is mu n / (2 - mu (n + 2)) of the least one."""
    rng = np.random.default_rng(6)
    n, mu, keys, length = 4, 0.05, 2000, 400
    X = rng.normal(size=(keys * length, n))
    y = X @ [1.0, -2.0, 0.5, 3.0] + rng.normal(size=keys * length)
    given = definition("lms", n, False, lms={"step": mu})
    given["observation"] = {"R": [[1.0]]}
    _, _, outputs = run(given, rows_of(y, X, keys), keys)
    late = outputs.nis.reshape(keys, length)[:, 300:]
    assert late.mean() == pytest.approx(1 + mu * n / (2 - mu * (n + 2)), rel=0.01)


KINDS = {
    "rls": definition("rls", 2, rls={"forgetting": 0.9}),
    "lms": definition("lms", 2, lms={"step": 0.1}, observation={"R": [[1.0]]}),
    "nlms": definition("nlms", 2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_company_cuts_and_snapshots_change_no_bit(kind):
    rng = np.random.default_rng(7)
    keys, length = 50, 12
    y = np.where(rng.random(keys * length) < 0.2, np.nan, rng.normal(size=keys * length))
    rows = rows_of(y, rng.normal(size=(keys * length, 2)), keys)
    model, states, outputs = run(KINDS[kind], rows, keys)
    some = np.array([3, 17, 18, 49])
    mask = np.isin(rows.key, some)
    part = kalman.SortedRows(
        np.searchsorted(some, rows.key[mask]), rows.time[mask], rows.y[:, mask], rows.u[:, mask]
    )
    _, alone, _ = run(KINDS[kind], part, 4)
    same(alone.values, states.values[:, some])
    cut = kalman.initial_states(pickle.loads(pickle.dumps(model)), keys)
    place = np.arange(len(rows.key)) % length
    for low, high in ((0, 5), (5, 6), (6, length)):
        kept = (place >= low) & (place < high)
        piece = kalman.SortedRows(rows.key[kept], rows.time[kept], rows.y[:, kept], rows.u[:, kept])
        cut, said = kalman.run(model, cut, piece, UNIT)
        same(said.mean, outputs.mean[:, kept])
        same(said.log_likelihood, outputs.log_likelihood[kept])
        cut = cut._replace(values=model.restore(*model.snapshot(cut.values)))
    same(list(cut), list(states))


@pytest.mark.parametrize(
    ("kind", "bad", "code"),
    [*((kind, np.inf, flags.NON_FINITE) for kind in KINDS), ("lms", 1e200, flags.OVERFLOW)],
)
def test_a_bad_row_is_flagged_alone(kind, bad, code):
    rng = np.random.default_rng(8)
    rows = rows_of(rng.normal(size=40), rng.normal(size=(40, 2)), 4)
    rows.y[0, 15] = bad
    if code == flags.OVERFLOW:
        rows.u[:, 15] = bad
    _, states, outputs = run(KINDS[kind], rows, 4)
    assert np.flatnonzero(outputs.flag).tolist() == [15] and outputs.flag[15] == code
    kept = np.arange(40) != 15
    rest = kalman.SortedRows(rows.key[kept], rows.time[kept], rows.y[:, kept], rows.u[:, kept])
    _, expected, _ = run(KINDS[kind], rest, 4)
    same(list(states), list(expected))


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (definition("rls", 2, process={"kind": "random_walk", "variance": 1.0}), "process"),
        (definition("rls", 2, rls={"forgetting": 1.5}), "rls.forgetting"),
        (definition("rls", 2, rls={"forget": 1.0}), "rls.forget"),
        (definition("rls", 2, rls={"delta": 1.0}, initial={"diffuse": True}), "rls.delta"),
        (definition("rls", 2, initial={"mean": [0] * 3, "covariance": np.zeros((3, 3)).tolist()}), "initial"),
        (definition("rls", 2) | {"states": ["a"]}, "observation.H"),
        (definition("rls", 2, observation={"H": [[1.0, "x1", 0.0]]}), "control"),
        (definition("lms", 2), "lms.step"),
        (definition("nlms", 2, nlms={"step": 2.0}), "nlms.step"),
        (definition("lms", 2, lms={"step": 1.0}) | {"measurement": ["y", "z"]}, "observation.H"),
    ],
)
def test_an_error_names_the_field(given, field):
    with pytest.raises(kalman.ModelError) as error:
        kalman.build(given)
    assert error.value.field.startswith(field)


def test_an_exact_fit_has_no_variance():
    """A residual variance of zero is known; that of one row is not."""
    x = np.array([3.0, 4.0, 12.0])
    _, _, outputs = run(definition("rls", 1, False), rows_of(0.0 * x, x[:, None]))
    np.testing.assert_array_equal(outputs.mean[0], 0.0)
    assert outputs.covariance[0].tolist() == [np.inf, 0.0, 0.0]
