"""Robust and adaptive updates of extended, unscented and cubature filters, and of the linear one's other forms."""

from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2, multivariate_t

import kalman
from kalman import flags
from kalman.smoothers.smooth import smooth
from tests.kalman.filters.test_robust import huber_density
from tests.kalman.support import laws
from tests.kalman.support.models import random_definition, random_rows, same
from tests.kalman.support.nonlinear import bent, bent_slope, moved, random_nonlinear, seen, seen_slope
from tests.kalman.support.oracles import UNIT, full

HERE = "tests.kalman.support.nonlinear"
KINDS = ["extended", "unscented", "cubature"]
OPTIONS: dict[str, dict[str, Any]] = {
    "gate": {"robust": {"gate": {"probability": 0.9}}},
    "limited gate and fading": {"robust": {"gate": {"threshold": 2.0, "limit": 1}, "fading": 1.05}},
    "student_t": {"robust": {"student_t": {"degrees": 3.5}}},
    "huber": {"robust": {"huber": {"threshold": 1.345}, "fading": 1.02}},
    "adaptive": {"adaptive": {"R": 0.05, "Q": 0.1}},
    "all": {
        "robust": {"gate": {"probability": 0.999}, "huber": {"threshold": 1.0}},
        "adaptive": {"Q": 0.1, "R": 0.02},
    },
}


def textbook(definition, y, dt, u):
    """One key: the joint Gaussian of state, noise-free measurement and noise, written out."""
    robust, rates = definition.get("robust", {}), definition.get("adaptive", {})
    kind, m = definition["filter"], y.shape[1]
    rule = definition.get("unscented", {})
    Q, R_all = (np.array(definition[a][b], float) for a, b in (("process", "Q"), ("observation", "R")))
    x, P = (np.array(definition["initial"][name], float) for name in ("mean", "covariance"))
    gate, run, waited, begun = robust.get("gate"), 0, 0.0, False
    truth = []
    for k in range(len(y)):
        before, waited = (x, P), waited + dt[k]
        if begun:
            at, push = np.array([waited]), u[k][:, None]
            x, P, _ = moved(
                kind,
                rule,
                x,
                P,
                lambda p, at=at, push=push: bent(
                    p, np.repeat(at, p.shape[1]), np.repeat(push, p.shape[1], axis=1)
                ),
                lambda p, at=at, push=push: bent_slope(p, at, push),
            )
            P = robust.get("fading", 1.0) ** 2 * P + Q
        has = ~np.isnan(y[k])
        count = int(has.sum())
        z, C0, cross = moved(kind, rule, x, P, lambda p: seen(p, m), lambda p: seen_slope(p, m))
        v, C, cross, R = (y[k] - z)[has], C0[np.ix_(has, has)], cross[:, has], R_all[np.ix_(has, has)]
        nis = float(v @ np.linalg.solve(C + R, v)) if count else np.nan
        if gate and count:
            limit = gate["threshold"] if "threshold" in gate else chi2.ppf(gate["probability"], count)
            if nis > limit and run < gate.get("limit", np.inf):
                run += 1
                x, P = before
                truth.append((x, P, np.nan, nis, flags.GATED))
                continue
            run = 0
        score = -0.5 * (nis + np.linalg.slogdet(2 * np.pi * (C + R))[1]) if count else 0.0
        w = np.ones(count)
        if "student_t" in robust and count:
            nu, precision = robust["student_t"]["degrees"], 1.0
            for _ in range(10):
                gain = R / precision @ np.linalg.inv(C + R / precision)
                e, E = gain @ v, R / precision - gain @ R / precision
                precision = (nu + count) / (nu + np.trace(np.linalg.inv(R) @ (np.outer(e, e) + E)))
            score = multivariate_t.logpdf(v, np.zeros(count), C + R, df=nu)  # type: ignore[arg-type]
            w = np.full(count, precision)
        elif "huber" in robust and count:
            threshold, deviation = robust["huber"]["threshold"], np.sqrt(np.diag(R))
            w = np.diag(R) / np.maximum(np.diag(R), np.abs(v) * deviation / threshold - np.diag(C))
            for _ in range(10 if m > 1 else 0):
                weighed = R / np.sqrt(np.outer(w, w))
                e = weighed @ np.linalg.solve(C + weighed, v)
                w = np.minimum(1, threshold / np.abs(e / deviation))
            score = huber_density(v, C + R, threshold)
        weighed = R / np.sqrt(np.outer(w, w))
        inverse = np.linalg.inv(C + weighed)
        if rates:
            H = np.linalg.solve(P, cross).T
            gain = Q @ H.T @ inverse
            Q_now = np.outer(gain @ v, gain @ v) + Q - gain @ H @ Q
            some = np.eye(m)[has]
            full_w = np.ones(m)
            full_w[has] = w
            spread = R_all / np.sqrt(np.outer(full_w, full_w))
            gain = spread @ some.T @ inverse
            R_now = np.outer(gain @ v, gain @ v) + spread - gain @ some @ spread
            if begun:
                Q = Q + rates["Q"] * (Q_now - Q)
            R_all = R_all + rates["R"] * (R_now * np.sqrt(np.outer(full_w, full_w)) - R_all)
        begun, waited = True, 0.0
        x, P = x + cross @ inverse @ v, P - cross @ inverse @ cross.T
        truth.append((x, P, score, nis, 0))
    return [np.array(a) for a in zip(*truth, strict=True)], Q, R_all


@pytest.mark.parametrize("form", ["covariance", "square_root", "information"])
@pytest.mark.parametrize("kind", [*KINDS, "scaled"])
@pytest.mark.parametrize("name", OPTIONS)
def test_textbook_over_random_models(kind, form, name):
    """Correlated noise, missing components, outliers, irregular times, control."""
    if form == "information" and kind != "extended":
        return
    rng = np.random.default_rng([len(kind), len(form), len(name)])
    rule = {"unscented": {"alpha": 0.6, "beta": 2.0, "kappa": 0.5}} if kind == "scaled" else {}
    kind = "unscented" if rule else kind
    m = int(rng.integers(1, 4))
    definition = {**random_nonlinear(rng, kind, 3, m, 1), "form": form, **rule, **OPTIONS[name]}
    rows = random_rows(rng, definition, 5, 12)
    rows = rows._replace(y=rows.y * rng.choice([1, 1, 1, 4], rows.y.shape))
    model = kalman.build(definition)
    states, outputs = kalman.run(model, kalman.initial_states(model, 5), rows, UNIT)
    for key in np.unique(rows.key):
        here = rows.key == key
        dt = np.diff(rows.time[here], prepend=rows.time[here][0]) / UNIT
        truth, Q, R = textbook(definition, rows.y[:, here].T, dt, rows.u[:, here].T)
        means, covariances, scores, nis, codes = truth
        close: Any = {"rtol": 1e-9, "atol": 1e-10}
        np.testing.assert_array_equal(outputs.flag[here], codes)
        np.testing.assert_allclose(outputs.mean[:, here].T, means, **close)
        np.testing.assert_allclose(full(outputs.covariance[:, here]), covariances, **close)
        np.testing.assert_allclose(outputs.log_likelihood[here], scores, **close)
        np.testing.assert_allclose(outputs.nis[here], nis, **close)
        if "adaptive" in definition:
            own = states.values[model.places["parameters"], key]  # type: ignore[attr-defined]
            expected = [a for X in (Q, R) for i, row in enumerate(X.tolist()) for a in row[: i + 1]]
            np.testing.assert_allclose(own, expected, **close)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", ["linear square_root", "linear information", *KINDS])
def test_on_a_linear_model_it_is_the_linear_filter(kind, name):
    """A structure of several variances; the non-linear kinds see it through a function."""
    rng = np.random.default_rng([4, len(name)])
    linear = {
        "states": ["x", "vx", "y", "vy"],
        "measurement": ["px", "py"],
        "control": [],
        "process": {"kind": "constant_velocity", "acceleration_variance": 0.05, "dimensions": 2},
        "observation": {"R": [[1.0, 0.3], [0.3, 0.5]], "H": [[1.0, 0, 0, 0], [0, 0, 1.0, 0]]},
        "initial": {"mean": [1, 0.5, -2, 0], "covariance": np.diag([4.0, 1, 4, 1]).tolist()},
        **OPTIONS[name],
    }
    rows = random_rows(rng, linear, 20, 12)
    rows = rows._replace(y=rows.y * rng.choice([1, 1, 1, 4], rows.y.shape))
    if kind in KINDS:
        observation = {"R": linear["observation"]["R"], "h": f"{HERE}:positions"}
        other = {**linear, "filter": kind, "observation": observation}
    else:
        other = {**linear, "form": kind.split()[1]}
    results = []
    for definition in (linear, other):
        model = kalman.build(definition)
        results.append(kalman.run(model, kalman.initial_states(model, 20), rows, UNIT)[1])
    np.testing.assert_array_equal(results[0].flag, results[1].flag)
    close = 1e-7 if kind == "extended" else 1e-9  # its slope is by differences
    for a, b in zip(results[0][:4], results[1][:4], strict=True):
        np.testing.assert_allclose(a, b, rtol=close, atol=close)
    for field, values in results[0].extra.items():
        np.testing.assert_allclose(values, results[1].extra[field], rtol=close, atol=close)


@pytest.mark.parametrize("kind", KINDS)
def test_without_options_the_bits_are_those_of_the_plain_filter(kind):
    rng = np.random.default_rng(7)
    definition = random_nonlinear(rng, kind, 2, 2, 1)
    rows = random_rows(rng, definition, 10, 8)
    limit = {**definition, "robust": {"gate": {"threshold": 1e300}}}
    results = []
    for one in (definition, limit):
        model = kalman.build(one)
        results.append(kalman.run(model, kalman.initial_states(model, 10), rows, UNIT)[1])
    same(list(results[0][:6]), list(results[1][:6]))


@pytest.mark.parametrize("form", ["covariance", "square_root"])
@pytest.mark.parametrize("kind", KINDS)
def test_laws(kind, form):
    rng = np.random.default_rng([9, len(kind)])
    definition = {**random_nonlinear(rng, kind, 2, 2, 1), "form": form, **OPTIONS["all"]}
    rows = random_rows(rng, definition, 12, 8)
    model = kalman.build(definition)
    laws.splitting_and_permuting_keys_changes_no_bit(model, rows, 12, rng)
    laws.cutting_rows_changes_no_bit(model, rows, 12, rng)
    laws.snapshot_restores_every_bit(model, rows, 12)
    laws.a_bad_row_hurts_its_own_key_alone(model, rows, 12, np.inf, flags.NON_FINITE)


@pytest.mark.parametrize("kind", KINDS)
def test_one_absurd_measurement(kind):
    """Falling off with the plain filter, and not with a gate, Student-t or Huber noise."""
    rng = np.random.default_rng(3)
    definition = {
        "filter": kind,
        "states": ["x", "vx", "y", "vy"],
        "measurement": ["range", "bearing"],
        "process": {"kind": "constant_velocity", "acceleration_variance": 0.05, "dimensions": 2},
        "observation": {"h": f"{HERE}:range_and_bearing", "R": [[0.25, 0.0], [0.0, 0.0004]]},
        "initial": {"mean": [100.0, 0.0, 50.0, 1.0], "covariance": np.eye(4).tolist()},
    }
    plain = kalman.build(definition)
    path = np.array([np.full(20, 100.0), 50.0 + np.arange(20)])
    y = np.array([np.hypot(*path), np.arctan2(path[1], path[0])]) + rng.normal(size=(2, 20)) * [[0.5], [0.02]]
    time = np.arange(20) * 1_000_000
    rows = kalman.SortedRows(np.zeros(20, np.int64), time, y, np.empty((0, 20)))
    bad = rows.y.copy()
    bad[0, 10] = 1e6
    shift = {}
    for name in ("plain", "gate", "student_t", "huber"):
        model = plain if name == "plain" else kalman.build({**definition, **OPTIONS[name]})
        good, outputs = (
            kalman.run(model, kalman.initial_states(model, 1), rows._replace(y=y), UNIT)[1].mean[:, 10]
            for y in (rows.y, bad)
        )
        shift[name] = np.abs(outputs - good).max()
    assert shift["plain"] > 1e3
    assert max(shift[name] for name in ("gate", "student_t", "huber")) < 10.0


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_smoothed_and_may_be_a_mode(kind):
    rng = np.random.default_rng(8)
    definition = random_nonlinear(rng, kind, 2, 2, 0)
    rows = random_rows(rng, definition, 4, 9)
    model = kalman.build({**definition, **OPTIONS["student_t"]})
    _, outputs, smoothed = smooth(model, kalman.initial_states(model, 4), rows, UNIT)
    last = np.append(np.flatnonzero(np.diff(rows.key)), len(rows.key) - 1)
    same(smoothed.mean[:, last], outputs.mean[:, last])
    assert np.isfinite(smoothed.covariance).all()
    mode = {name: definition[name] for name in ("process", "observation")} | {"filter": kind}
    shared = {name: definition[name] for name in ("states", "measurement", "control", "initial")}
    imm = kalman.build(
        {
            **shared,
            "filter": "mmae",
            "modes": [{**mode, **OPTIONS["student_t"]}, {**mode, **OPTIONS["student_t"]}],
        }
    )
    _, both = kalman.run(imm, kalman.initial_states(imm, 4), rows, UNIT)
    np.testing.assert_allclose(both.mean, outputs.mean, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (
            {
                "adaptive": {"Q": 0.1},
                "process": {"kind": "function", "f": f"{HERE}:bent", "q": f"{HERE}:bent_noise"},
            },
            "adaptive.Q",
        ),
        (
            {"robust": {"huber": {}}, "observation": {"h": f"{HERE}:seen_2", "R": [[0.0, 0.0], [0.0, 1.0]]}},
            "observation.R[0][0]",
        ),
        ({"robust": {"fading": 0.5}}, "robust.fading"),
        ({"adaptive": {"R": 2.0}}, "adaptive.R"),
    ],
)
def test_an_invalid_model_is_refused(change, field):
    definition = {**random_nonlinear(np.random.default_rng(1), "unscented", 2, 2, 0), **change}
    with pytest.raises(kalman.ModelError) as error:
        kalman.build(definition)
    assert error.value.field == field


def test_own_noise_that_is_learned_and_one_that_is_adapted():
    """Another form of the linear filter keeps what each key learned beside what moves."""
    rng = np.random.default_rng(2)
    definition = random_definition(rng, "explicit", 2, 2)
    definition |= {"learn": {"parameters": ["Q"], "scope": "key"}, "adaptive": {"R": 0.1}}
    rows = random_rows(rng, definition, 6, 9)
    results = []
    for form in ("covariance", "square_root"):
        model = kalman.build({**definition, "form": form})
        states = kalman.initial_states(model, 6)
        own = np.outer([1.0, 0.2, 2.0], np.linspace(0.5, 2.0, 6))
        states = states._replace(values=model.with_parameters(states.values, own))
        results.append(kalman.run(model, states, rows, UNIT))
    np.testing.assert_allclose(results[0][1].mean, results[1][1].mean, rtol=1e-9, atol=1e-10)
    assert (results[0][0].values[-6:-3] == own).all() and (results[1][0].values[-6:-3] == own).all()
