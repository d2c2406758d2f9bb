"""Robust updates against textbook filters, their Gaussian limits, bounds on an outlier's influence."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from scipy.stats import chi2, multivariate_t, norm

import kalman
from kalman import flags
from kalman.filters.robust import updates
from kalman.filters.update import update
from kalman.smoothers.smooth import smooth
from tests.kalman.support import laws
from tests.kalman.support.models import random_definition, random_rows, same
from tests.kalman.support.oracles import UNIT, begun, corrected, full, run_one, transition_of

OPTIONS: dict[str, dict[str, Any]] = {
    "gate": {"gate": {"probability": 0.9}},
    "limited gate": {"gate": {"threshold": 2.0, "limit": 1}},
    "student_t": {"student_t": {"degrees": 3.5}},
    "huber": {"huber": {"threshold": 1.345}},
    "fading": {"fading": 1.05},
    "gate, huber and fading": {"gate": {"probability": 0.99}, "huber": {"threshold": 1.0}, "fading": 1.02},
}


class Truth(NamedTuple):
    mean: np.ndarray
    covariance: np.ndarray
    log_likelihood: float
    nis: float
    flag: int


def huber_density(v, S, k):
    """The independent scalars v = L z, Var z = D: Huber's least favourable density of each."""
    L = np.linalg.cholesky(S)
    e = np.linalg.solve(L, v)
    normal = 1 / (norm.cdf(k) - norm.cdf(-k) + 2 * norm.pdf(k) / k) / np.sqrt(2 * np.pi)
    loss = np.where(np.abs(e) <= k, e**2 / 2, k * np.abs(e) - k**2 / 2)
    return float(np.sum(np.log(normal) - loss) - np.log(np.diag(L)).sum())


def textbook(definition, y, dt, u):
    """One key, in the state's own space: reweight, update from the prior again, look at the residuals."""
    options = definition["robust"]
    H0 = np.array(definition["observation"]["H"], float)
    R0, B, x, P = begun(definition, u.shape[1])
    gate, run, truth, applied, waited = options.get("gate"), 0, [], 0, 0.0
    for k in range(len(y)):
        waited += dt[k]
        x0, P0 = x, P
        if applied:
            F, Q, c = transition_of(definition["process"], waited)
            x, P = F @ x + B @ u[k] + c, options.get("fading", 1.0) ** 2 * F @ P @ F.T + Q
        seen = ~np.isnan(y[k])
        count = int(seen.sum())
        H, R, z = H0[seen], R0[np.ix_(seen, seen)], y[k, seen]
        v, S = z - H @ x, H @ P @ H.T + R
        nis = float(v @ np.linalg.solve(S, v)) if count else np.nan
        if gate and count:
            limit = gate["threshold"] if "threshold" in gate else chi2.ppf(gate["probability"], count)
            if nis > limit and run < gate.get("limit", np.inf):
                run, x, P = run + 1, x0, P0
                truth.append(Truth(x, P, np.nan, nis, flags.GATED))
                continue
            run = 0
        applied, waited = applied + 1, 0.0
        score = -0.5 * (nis + np.linalg.slogdet(2 * np.pi * S)[1]) if count else 0.0
        if "student_t" in options and count:
            nu, precision = options["student_t"]["degrees"], 1.0
            for _ in range(10):
                m, V = corrected(x, P, H, R / precision, z)[:2]
                size = np.trace(np.linalg.inv(R) @ (np.outer(z - H @ m, z - H @ m) + H @ V @ H.T))
                precision = (nu + count) / (nu + size)
            score = multivariate_t.logpdf(v, np.zeros(count), S, df=nu)  # type: ignore[arg-type]
            R = R / precision
        elif "huber" in options and count:
            threshold, deviation = options["huber"]["threshold"], np.sqrt(np.diag(R))
            needed = np.abs(v) * deviation / threshold - np.diag(H @ P @ H.T)
            w = np.diag(R) / np.maximum(np.diag(R), needed)
            for _ in range(10 if len(H0) > 1 else 0):
                m = corrected(x, P, H, R / np.sqrt(np.outer(w, w)), z).mean
                w = np.minimum(1, threshold / np.abs((z - H @ m) / deviation))
            score = huber_density(v, S, threshold)
            R = R / np.sqrt(np.outer(w, w))
        x, P = corrected(x, P, H, R, z)[:2]
        truth.append(Truth(x, P, score, nis, 0))
    return truth


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", ["explicit", "sum"])
def test_textbook_over_random_models(name, kind):
    """Correlated noise, missing components, outliers, irregular times, control; m 1-3."""
    flagged = 0
    for seed in range(3):
        rng = np.random.default_rng([seed, 3])
        controls = 1 if kind == "explicit" else 0
        definition = random_definition(rng, kind, 3, int(rng.integers(1, 4)), controls)
        definition["robust"] = OPTIONS[name]
        rows = random_rows(rng, definition, 6, 12)
        rows = rows._replace(y=rows.y * rng.choice([1, 1, 1, 6], rows.y.shape))
        model = kalman.build(definition)
        _, outputs = kalman.run(model, kalman.initial_states(model, 6), rows, UNIT)
        for key in np.unique(rows.key):
            here = rows.key == key
            dt = np.diff(rows.time[here], prepend=rows.time[here][0]) / UNIT
            truth = textbook(definition, rows.y[:, here].T, dt, rows.u[:, here].T)
            means, covariances, scores, nis, codes = (np.array(a) for a in zip(*truth, strict=True))
            close: Any = {"rtol": 1e-10, "atol": 1e-10}
            np.testing.assert_array_equal(outputs.flag[here], codes)
            np.testing.assert_allclose(outputs.mean[:, here].T, means, **close)
            np.testing.assert_allclose(full(outputs.covariance[:, here]), covariances, **close)
            np.testing.assert_allclose(outputs.log_likelihood[here], scores, **close)
            np.testing.assert_allclose(outputs.nis[here], nis, **close)
            flagged += codes.any()
    assert bool(flagged) == ("gate" in name)


@pytest.mark.parametrize(
    ("options", "close"),
    [
        ({"student_t": {"degrees": 1e14}}, 1e-9),
        ({"huber": {"threshold": 1e9}}, 1e-12),
        ({"gate": {"threshold": 1e300}}, 0.0),
        ({"fading": 1.0}, 0.0),
    ],
)
def test_the_limit_is_the_plain_filter(options, close):
    rng = np.random.default_rng(5)
    definition = random_definition(rng, "sum", 3, 3)
    rows = random_rows(rng, definition, 40, 10)
    plain, limit = kalman.build(definition), kalman.build({**definition, "robust": options})
    _, expected = kalman.run(plain, kalman.initial_states(plain, 40), rows, UNIT)
    _, outputs = kalman.run(limit, kalman.initial_states(limit, 40), rows, UNIT)
    for a, b in zip(outputs[:4], expected[:4], strict=True):
        np.testing.assert_allclose(a, b, rtol=close, atol=close)
    for weights in outputs.extra.values():
        np.testing.assert_allclose(weights[~np.isnan(rows.y)], 1.0, rtol=1e-12)
        assert np.isnan(weights[np.isnan(rows.y)]).all()


def level(**sections):
    return {
        "states": ["a"],
        "measurement": ["y"],
        "process": {"kind": "random_walk", "variance": 1.0},
        "observation": {"H": [[1.0]], "R": [[4.0]]},
        "initial": {"mean": [0.0], "covariance": [[9.0]]},
        **sections,
    }


@pytest.mark.parametrize("options", [{"student_t": {"degrees": 4}}, {"huber": {"threshold": 1.345}}])
def test_the_influence_of_an_outlier_is_bounded(options):
    far = [1.0, 10.0, 100.0, 1e4, 1e8, 1e100]
    shift = np.array([run_one(level(robust=options), [y])[1].mean[0, 0] for y in far])
    assert not any(run_one(level(robust=options), [y])[1].flag[0] for y in far)
    if "huber" in options:
        bound = 9.0 * 1.345 / np.sqrt(4.0)  # P h k / sqrt R
        np.testing.assert_allclose(shift[2:], bound, rtol=1e-12)
        assert (shift <= bound * (1 + 1e-12)).all()
    else:
        assert shift.max() < 8.0 and shift[-1] < 1e-90  # what is far enough says nothing any more
        assert run_one(level(robust=options), [1e100])[1].covariance[0, 0] == pytest.approx(9.0)


def test_huber_is_the_m_estimate_of_location():
    """24 determinations of copper in flour: 3.206724 at k = 1.5 (Venables and Ripley 2002, section 5.5)."""
    chem = [2.9, 3.1, 3.4, 3.4, 3.7, 3.7, 2.8, 2.5, 2.4, 2.4, 2.7, 2.2, 5.28, 3.37, 3.03, 3.03, 28.95, 3.77]
    chem += [3.4, 2.2, 3.5, 3.6, 3.7, 3.7]
    scale = 0.526323
    y = [np.array([a]) for a in chem]
    H = [[1.0]] * len(y)
    R = [scale**2 if i == j else 0.0 for i in range(len(y)) for j in range(i + 1)]
    m, P = [np.array([3.0])], [np.array([1e6])]
    mean, C = updates.predict_measurement(m, P, H)
    v = [a - b for a, b in zip(y, mean, strict=True)]
    present = [None] * len(y)
    w = updates.compute_weights(updates.Huber(1.5, 25), v, C, R, present)
    updated = update(m, P, None, H, updates.weigh_noise(R, w), y, present)
    assert float(np.asarray(updated.m[0])[0]) == pytest.approx(3.206724, abs=1e-5)


def test_gates_are_the_quantiles_of_chi_square():
    """Bar-Shalom, Li and Kirubarajan (2001), section 1.4.17: 95 and 99 % for one and two components."""
    for probability, expected in ((0.95, (3.8415, 5.9915)), (0.99, (6.6349, 9.2103))):
        gate = updates.parse({"gate": {"probability": probability}}, 2).gate
        assert gate is not None
        np.testing.assert_allclose(np.array(gate.thresholds, float), expected, atol=5e-5)


def test_a_gated_row_is_counted_and_leaves_the_state():
    definition = level(robust={"gate": {"threshold": 9.0, "limit": 2}})
    y = [0.5, 400.0, 0.4, 400.0, 410.0, 405.0, np.nan]
    model = kalman.build(definition)
    assert dict(model.fields) == {"mean": (1,), "covariance": (1,), "gate": (2,)}
    states, outputs = run_one(definition, y)
    G = flags.GATED
    assert outputs.flag.tolist() == [0, G, 0, G, G, 0, 0] and kalman.FLAGS[G] == "gated"
    assert np.isnan(outputs.log_likelihood[[1, 3, 4]]).all() and (outputs.nis[[1, 3, 4]] > 9).all()
    same(outputs.mean[:, 1], outputs.mean[:, 0])
    assert outputs.mean[0, 5] > 100, "after two gated rows in a row the third is let in"
    assert states.values[2:, 0].tolist() == [3.0, 0.0] and states.count[0] == 4
    kept, said = run_one({**definition, "robust": None}, [0.5, 0.4], [0.0, 2.0])
    same(outputs.mean[:, [0, 2]], said.mean)
    same(outputs.log_likelihood[[0, 2]], said.log_likelihood)


def test_a_missing_row_neither_gates_nor_clears_the_run():
    definition = level(robust={"gate": {"threshold": 9.0, "limit": 2}})
    states, outputs = run_one(definition, [0.5, 400.0, np.nan, 400.0, 400.0])
    assert [bool(a) for a in outputs.flag] == [False, True, False, True, False]
    assert states.values[2:, 0].tolist() == [2.0, 0.0]


def test_an_enormous_outlier_is_gated_and_an_infinite_one_is_no_number():
    definition = level(robust={"gate": {"probability": 0.999}})
    states, outputs = run_one(definition, [0.5, 1e200, np.inf, 0.1])
    assert outputs.flag.tolist() == [0, flags.GATED, flags.NON_FINITE, 0]
    assert states.values[2, 0] == 1.0


def test_fading_forgets_exponentially():
    """A constant without process noise: the gain settles at 1 - 1 / alpha^2, exponential smoothing."""
    definition = level(robust={"fading": 1.1}, process={"kind": "explicit", "F": [[1.0]], "Q": [[0.0]]})
    y = np.random.default_rng(0).normal(size=300)
    _, outputs = run_one(definition, y)
    gain = 1 - 1 / 1.1**2
    assert outputs.covariance[0, -1] == pytest.approx(4.0 * gain, rel=1e-12)
    steps = (outputs.mean[0, 1:] - outputs.mean[0, :-1]) / (y[1:] - outputs.mean[0, :-1])
    assert steps[-1] == pytest.approx(gain, rel=1e-9)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_diffuse_start_is_that_of_the_plain_filter(name):
    """Nothing can be an outlier before there is an expectation."""
    rng = np.random.default_rng(8)
    definition = random_definition(rng, "explicit", 2, 1)
    definition["initial"] = {"diffuse": True}
    y = [[1e6], [np.nan], [-1e6]]
    _, plain = run_one(definition, y)
    _, outputs = run_one({**definition, "robust": {**OPTIONS[name], "fading": 1.0}}, y)
    same(outputs.mean, plain.mean)
    same(outputs.log_likelihood, plain.log_likelihood)
    same(outputs.nis, plain.nis)
    assert not outputs.flag.any()


@pytest.mark.parametrize("name", ["limited gate", "student_t", "huber", "gate, huber and fading"])
@pytest.mark.parametrize("diffuse", [False, True])
def test_company_cuts_and_snapshots_change_no_bit(name, diffuse):
    rng = np.random.default_rng(11)
    definition = random_definition(rng, "explicit", 2, 2, 1)
    definition["robust"] = OPTIONS[name]
    if diffuse:
        definition["initial"] = {"diffuse": True}
    model = kalman.build(definition)
    rows = random_rows(rng, definition, 60, 8)
    laws.splitting_and_permuting_keys_changes_no_bit(model, rows, 60, rng)
    laws.cutting_rows_changes_no_bit(model, rows, 60, rng)
    laws.snapshot_restores_every_bit(model, rows, 60)
    laws.a_bad_row_hurts_its_own_key_alone(model, rows, 60, np.inf, flags.NON_FINITE)


@pytest.mark.parametrize("options", [{"huber": {"threshold": 1e9}}, {"gate": {"threshold": 1e300}}])
def test_smoothing_is_that_of_the_plain_filter_in_the_limit(options):
    rng = np.random.default_rng(13)
    definition = random_definition(rng, "explicit", 2, 2, 1)
    rows = random_rows(rng, definition, 20, 8)
    found = []
    for section in (None, options):
        model = kalman.build({**definition, "robust": section})
        found.append(smooth(model, kalman.initial_states(model, 20), rows, UNIT)[2])
    np.testing.assert_allclose(found[1].mean, found[0].mean, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found[1].covariance, found[0].covariance, rtol=1e-9, atol=1e-9)


def test_smoothing_leaves_gated_rows_out():
    definition = level(robust={"gate": {"threshold": 9.0}})
    model, plain = kalman.build(definition), kalman.build(level())
    y = np.array([[0.5, 400.0, 0.4, -1.0]])
    time = np.arange(4) * 1_000_000
    rows = kalman.SortedRows(np.zeros(4, np.int64), time, y, np.empty((0, 4)))
    _, _, smoothed = smooth(model, kalman.initial_states(model, 1), rows, UNIT)
    rest = laws.keep(rows, [0, 2, 3])
    _, _, expected = smooth(plain, kalman.initial_states(plain, 1), rest, UNIT)
    np.testing.assert_allclose(smoothed.mean[:, [0, 2, 3]], expected.mean, rtol=1e-12)
    with pytest.raises(kalman.ModelError, match="diffuse start cannot be smoothed"):
        model = kalman.build({**definition, "initial": {"diffuse": True}})
        smooth(model, kalman.initial_states(model, 1), rows, UNIT)


WRONG = [
    ({"gate": {}}, "robust.gate", "a probability or a threshold"),
    ({"gate": {"probability": 1.0}}, "robust.gate.probability", "not below 1"),
    ({"gate": {"threshold": 9.0, "limit": 0}}, "robust.gate.limit", "whole number"),
    ({"student_t": {}}, "robust.student_t.degrees", "missing"),
    ({"gate": {"threshold": 0.0}}, "robust.gate.threshold", "above zero"),
    ({"gate": {"probability": 0.0}}, "robust.gate.probability", "above zero"),
    ({"gate": {"width": 1.0}}, "robust.gate.width", "not known"),
    ({"student_t": {"degrees": 0}}, "robust.student_t.degrees", "above zero"),
    ({"student_t": {"degrees": 4, "iterations": 0}}, "robust.student_t.iterations", "from 1 to 1000"),
    ({"student_t": {"degrees": 4, "threshold": 1}}, "robust.student_t.threshold", "not known"),
    ({"huber": {"iterations": 1001}}, "robust.huber.iterations", "from 1 to 1000"),
    ({"huber": {"degrees": 4}}, "robust.huber.degrees", "not known"),
    ({"huber": {}, "student_t": {"degrees": 4}}, "robust.huber", "student_t is given too"),
    ({"huber": {"threshold": -1}}, "robust.huber.threshold", "above zero"),
    ({"fading": 0.9}, "robust.fading", "below 1"),
    ({"gating": {}}, "robust.gating", "not known"),
]


@pytest.mark.parametrize(("options", "field", "problem"), WRONG)
def test_an_error_names_the_field(options, field, problem):
    with pytest.raises(kalman.ModelError, match=problem) as error:
        kalman.build(level(robust=options))
    assert error.value.field == field


def test_huber_needs_noise():
    with pytest.raises(kalman.ModelError, match="no outliers to weigh"):
        kalman.build(level(robust={"huber": {}}, observation={"H": [[1.0]], "R": [[0.0]]}))
