"""IMM and MMAE against textbook filters, Hamilton's filter, the laws of mixtures, and modes that fail."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from scipy.special import logsumexp
from statsmodels.tsa.regime_switching.markov_regression import MarkovRegression

import kalman
from kalman import flags
from tests.kalman.support import laws
from tests.kalman.support.models import random_definition, random_rows, same
from tests.kalman.support.oracles import UNIT, corrected, full, run_one, transition_of
from tests.kalman.support.series import FEDFUNDS

FLOOR = 1e-12
NONLINEAR = "tests.kalman.support.nonlinear"


def random_modes(rng, kind, count, n, m, c) -> dict[str, Any]:
    """Modes of one kind with noises and matrices of their own."""
    all_of = [random_definition(rng, kind, n, m, c) for _ in range(count)]
    transition = rng.dirichlet(np.ones(count) * 2, count)
    return {
        **{name: all_of[0][name] for name in ("states", "measurement", "control")},
        "filter": "imm",
        "modes": [{name: one[name] for name in ("process", "observation")} for one in all_of],
        "transition": transition.tolist(),
        "initial": {**all_of[0]["initial"], "mode_probabilities": rng.dirichlet(np.ones(count)).tolist()},
    }


class Truth(NamedTuple):
    means: np.ndarray
    covariances: np.ndarray
    log_likelihoods: np.ndarray
    nis: np.ndarray
    probabilities: np.ndarray


def combined(w, means, covariances):
    m = sum(a * b for a, b in zip(w, means, strict=True))
    P = sum(a * (C + np.outer(b - m, b - m)) for a, b, C in zip(w, means, covariances, strict=True))
    return m, P


def textbook(definition, y, dt, u) -> Truth:
    """One key, one row after another, by the equations of the book; MMAE where there is no transition."""
    modes, M = definition["modes"], len(definition["modes"])
    transition = np.array(definition.get("transition") or np.eye(M))
    window = (definition.get("mmae") or {}).get("window")
    start = np.array(definition["initial"].get("mode_probabilities") or [1 / M] * M)
    mu, history = start, []
    m: list[Any] = [np.array(definition["initial"]["mean"], float)] * M
    P: list[Any] = [np.array(definition["initial"]["covariance"], float)] * M
    rows = []
    for k in range(len(y)):
        c = mu
        if k:
            c = transition.T @ mu
            share = transition * mu[:, None] / c
            mixed = [combined(share[:, j], m, P) for j in range(M)]
            m, P = [a for a, _ in mixed], [a for _, a in mixed]
        seen = ~np.isnan(y[k])
        scores, predicted, variances = np.zeros(M), [], []
        for j, mode in enumerate(modes):
            if k:
                F, Q, offset = transition_of(mode["process"], dt[k])
                B = np.array(mode["process"].get("B") or np.zeros((len(F), u.shape[1])))
                m[j], P[j] = F @ m[j] + B @ u[k] + offset, F @ P[j] @ F.T + Q
            H, R = (np.array(mode["observation"][name]) for name in "HR")
            row = corrected(m[j], P[j], H, R, y[k])
            predicted.append(y[k, seen] - row.innovation), variances.append(row.spread)
            m[j], P[j], scores[j] = row.mean, row.covariance, row.score
        expected, S = combined(c, predicted, variances)
        nis = (y[k, seen] - expected) @ np.linalg.inv(S) @ (y[k, seen] - expected) if seen.any() else np.nan
        joint = np.log(c) + scores
        score = logsumexp(joint) if seen.any() else 0.0
        if window:
            history = ([*history, scores] if seen.any() else history)[-window:]
            joint = np.log(start) + np.sum(history, axis=0)
        mu = np.maximum(np.exp(joint - logsumexp(joint)), FLOOR)
        mu = mu / mu.sum()
        rows.append((*combined(mu, m, P), score, nis, mu))
    return Truth(*(np.array(a) for a in zip(*rows, strict=True)))


def compare(definition, rows, keys):
    model = kalman.build(definition)
    _, outputs = kalman.run(model, kalman.initial_states(model, keys), rows, UNIT)
    assert not outputs.flag.any()
    for key in np.unique(rows.key):
        here = rows.key == key
        dt = np.diff(rows.time[here], prepend=0) / UNIT
        truth = textbook(definition, rows.y[:, here].T, dt, rows.u[:, here].T)
        close: Any = {"rtol": 1e-10, "atol": 1e-10}
        np.testing.assert_allclose(outputs.mean[:, here].T, truth.means, **close)
        np.testing.assert_allclose(full(outputs.covariance[:, here]), truth.covariances, **close)
        np.testing.assert_allclose(outputs.log_likelihood[here], truth.log_likelihoods, **close)
        np.testing.assert_allclose(outputs.nis[here], truth.nis, **close)
        shown = outputs.extra["mode_probabilities"][:, here].T
        np.testing.assert_allclose(shown, truth.probabilities, **close)


@pytest.mark.parametrize("kind", ["explicit", "local_linear_trend", "sum"])
@pytest.mark.parametrize("count", [2, 3])
def test_imm_is_that_of_the_textbook(kind, count):
    """Bar-Shalom, Li and Kirubarajan (2001), section 11.6.6; missing components, irregular times, control."""
    for seed in range(2):
        rng = np.random.default_rng([seed, count])
        m, c = int(rng.integers(1, 4)), 1 if kind == "explicit" else 0
        definition = random_modes(rng, kind, count, 2, m, c)
        compare(definition, random_rows(rng, definition, 5, 12), 5)


@pytest.mark.parametrize("window", [None, 1, 4])
def test_mmae_is_that_of_the_textbook(window):
    for seed in range(2):
        rng = np.random.default_rng([seed, 5])
        definition = random_modes(rng, "local_linear_trend", 3, 2, 2, 0)
        del definition["transition"]
        definition |= {"filter": "mmae", "mmae": {"window": window}}
        compare(definition, random_rows(rng, definition, 5, 12), 5)


def identical(rng, **sections):
    one = random_definition(rng, "sum", 3, 2)
    mode = {name: one[name] for name in ("process", "observation")}
    definition = {
        **{name: one[name] for name in ("states", "measurement", "control", "initial")},
        "modes": [mode, mode, mode],
        **sections,
    }
    return one, definition


@pytest.mark.parametrize("kind", ["imm", "mmae"])
def test_identical_modes_are_one_filter(kind):
    rng = np.random.default_rng(1)
    transition = rng.dirichlet(np.ones(3), 3).tolist()
    sections = {"filter": "imm", "transition": transition} if kind == "imm" else {"filter": "mmae"}
    one, definition = identical(rng, **sections)
    rows = random_rows(rng, one, 20, 10)
    found = []
    for each in (one, definition):
        model = kalman.build(each)
        found.append(kalman.run(model, kalman.initial_states(model, 20), rows, UNIT)[1])
    for a, b in zip(found[1][:4], found[0][:4], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)
    if kind == "mmae":
        np.testing.assert_allclose(found[1].extra["mode_probabilities"], 1 / 3, rtol=1e-12)


def test_a_mode_may_leave_things_to_the_model_around_it():
    rng = np.random.default_rng(2)
    definition = random_modes(rng, "explicit", 2, 2, 1, 0)
    definition["modes"][1]["observation"] = definition["modes"][0]["observation"]
    short = {**definition, "observation": definition["modes"][0]["observation"]}
    short["modes"] = [{"process": mode["process"]} for mode in definition["modes"]]
    assert kalman.build(short) == kalman.build(definition)


def test_an_imm_that_never_switches_is_an_mmae():
    """Its probabilities are the softmax of each mode's summed log-likelihoods."""
    rng = np.random.default_rng(3)
    definition = random_modes(rng, "local_linear_trend", 3, 2, 1, 0)
    definition["transition"] = np.eye(3).tolist()
    y = rng.normal(size=(6, 1)) * 2
    y[2] = np.nan
    states, outputs = run_one(definition, y)
    other, said = run_one({**definition, "filter": "mmae", "transition": None}, y)
    same(outputs.extra["mode_probabilities"], said.extra["mode_probabilities"])
    same(states.values, other.values)
    totals = np.array([0.0] * 3)
    for j, mode in enumerate(definition["modes"]):
        single = {**definition, **mode, "filter": "linear"}
        single["initial"] = {name: definition["initial"][name] for name in ("mean", "covariance")}
        totals[j] = run_one(single, y)[0].log_likelihood[0]
    joint = np.log(definition["initial"]["mode_probabilities"]) + totals
    softmax = np.exp(joint - logsumexp(joint))
    np.testing.assert_allclose(outputs.extra["mode_probabilities"][:, -1], softmax, rtol=1e-9)
    assert states.log_likelihood[0] == pytest.approx(logsumexp(joint), rel=1e-11)


def hamilton(stay, leave, means, variance):
    steady = leave / (1 - stay + leave)
    return {
        "filter": "imm",
        "states": ["one"],
        "measurement": ["y"],
        "process": {"kind": "explicit", "F": [[1.0]], "Q": [[0.0]]},
        "modes": [{"observation": {"H": [[mean]], "R": [[variance]]}} for mean in means],
        "transition": [[stay, 1 - stay], [leave, 1 - leave]],
        "initial": {
            "mean": [1.0],
            "covariance": [[0.0]],
            "mode_probabilities": [steady, 1 - steady],
        },
    }


def test_with_a_state_that_is_known_it_is_hamiltons_filter():
    """The federal funds rate, two means: Stata 14, manual of mswitch, example 1: log-likelihood -508.63592."""
    stay, leave, low, high, variance = 0.9820939, 0.0503587, 3.70877, 9.556793, 2.107562**2
    states, outputs = run_one(hamilton(stay, leave, (low, high), variance), FEDFUNDS)
    assert states.log_likelihood[0] == pytest.approx(-508.63592, abs=5e-6)
    theirs = MarkovRegression(np.array(FEDFUNDS), k_regimes=2).filter([stay, leave, low, high, variance])
    assert states.log_likelihood[0] == pytest.approx(theirs.llf, rel=1e-10)
    np.testing.assert_allclose(
        outputs.extra["mode_probabilities"].T, theirs.filtered_marginal_probabilities, rtol=1e-8, atol=2e-12
    )


def walk(**sections):
    return {
        "filter": "imm",
        "states": ["a"],
        "measurement": ["y"],
        "modes": [
            {"name": "slow", "process": {"kind": "random_walk", "variance": 0.01}},
            {"name": "fast", "process": {"kind": "random_walk", "variance": 4.0}},
        ],
        "observation": {"R": [[1.0]]},
        "transition": [[0.95, 0.05], [0.1, 0.9]],
        "initial": {"mean": [0.0], "covariance": [[9.0]]},
        **sections,
    }


def test_a_missing_row_only_mixes_and_predicts():
    definition = walk()
    states, outputs = run_one(definition, [0.3, np.nan, np.nan, 0.2])
    assert outputs.log_likelihood[[1, 2]].tolist() == [0.0, 0.0] and np.isnan(outputs.nis[[1, 2]]).all()
    probabilities = outputs.extra["mode_probabilities"]
    expected = np.array(definition["transition"]).T @ probabilities[:, 0]
    np.testing.assert_allclose(probabilities[:, 1], expected, rtol=1e-12)
    np.testing.assert_allclose(probabilities[:, 0], [0.5, 0.5], rtol=1e-12)  # a first row is not mixed
    assert outputs.covariance[0, 1] > outputs.covariance[0, 0]


def test_outliers_leave_probabilities():
    """Weights as exp of summed likelihoods are 0 / 0 here."""
    for kind in ("imm", "mmae"):
        definition = walk(filter=kind) | ({"transition": None} if kind == "mmae" else {})
        _, outputs = run_one(definition, [0.0, 1e6, -1e9, 1e100, 1.0])
        probabilities = outputs.extra["mode_probabilities"]
        assert not outputs.flag.any() and np.isfinite(outputs.log_likelihood).all()
        np.testing.assert_allclose(probabilities.sum(axis=0), 1.0, rtol=1e-12)
        assert probabilities.min() >= 0.9e-12


def test_the_floor_lets_a_mode_come_back():
    definition = walk(filter="mmae", transition=None, mmae={"floor": 1e-4})
    rng = np.random.default_rng(4)
    quiet, wild = np.zeros(300), np.cumsum(rng.normal(size=20) * 6)
    _, outputs = run_one(definition, np.concatenate([quiet, wild]))
    fast = outputs.extra["mode_probabilities"][1]
    assert fast[299] == pytest.approx(1e-4, rel=1e-3) and fast[-1] > 0.99
    _, outputs = run_one({**definition, "mmae": {"floor": 1e-300}}, np.concatenate([quiet, wild[:3]]))
    assert outputs.extra["mode_probabilities"][1, -1] < 1e-4


def test_a_mode_that_fails_is_floored_and_starts_again_from_the_others():
    """A mode without any noise cannot weigh a second measurement at the same time."""
    noiseless = {
        "process": {"kind": "random_walk", "variance": 1.0},
        "observation": {"H": [[1.0]], "R": [[0.0]]},
    }
    good = {"process": {"kind": "random_walk", "variance": 1.0}, "observation": {"H": [[1.0]], "R": [[1.0]]}}
    for kind in ("imm", "mmae"):
        definition = walk(modes=[noiseless, good], filter=kind)
        if kind == "mmae":
            definition["transition"] = None
        else:
            definition["transition"] = [[1.0, 0.0], [0.0, 1.0]]
        states, outputs = run_one(definition, [0.5, 0.7, 0.9], [0.0, 0.0, 1.0])
        assert not outputs.flag.any()
        np.testing.assert_allclose(outputs.extra["mode_probabilities"][:, 1], [1e-12, 1.0], rtol=1e-9)
        model = kalman.build(definition)
        after, _ = run_one(definition, [0.5, 0.7], [0.0, 0.0])
        places = model.places  # type: ignore[attr-defined]
        for field in ("mean", "covariance"):
            same(after.values[places[f"mode_0.{field}"]], after.values[places[f"mode_1.{field}"]])
        alone = {**definition, **good, "filter": "linear"}
        _, single = run_one({**alone, "modes": None}, [0.5, 0.7], [0.0, 0.0])
        np.testing.assert_allclose(outputs.mean[:, 1], single.mean[:, 1], rtol=1e-12)
        np.testing.assert_allclose(outputs.nis[1], single.nis[1], rtol=1e-12)
        assert outputs.extra["mode_probabilities"][0, 2] < 1e-6 and states.count[0] == 3
    both = walk(modes=[noiseless, noiseless])
    states, outputs = run_one(both, [0.5, 0.7, 0.9], [0.0, 0.0, 1.0])
    assert outputs.flag.tolist() == [0, flags.SINGULAR_INNOVATION, 0]
    assert states.count[0] == 2


def test_modes_that_nothing_leads_to_or_that_start_impossible():
    definition = walk(transition=[[0.0, 1.0], [0.0, 1.0]])
    definition["initial"]["mode_probabilities"] = [1.0, 0.0]
    _, outputs = run_one(definition, [0.5, 0.7, 0.9])
    probabilities = outputs.extra["mode_probabilities"]
    np.testing.assert_allclose(probabilities[:, 0], [1.0, 1e-12], rtol=1e-9)
    np.testing.assert_allclose(probabilities[:, 1:], [[1e-12] * 2, [1.0] * 2], rtol=1e-6)
    assert not outputs.flag.any()


def test_nis_is_the_number_of_components_on_average():
    """Whatever the modes: their mixture has the mean and covariance that the measurement has."""
    rng = np.random.default_rng(6)
    keys = 40_000
    definition = walk(
        modes=[
            {"observation": {"H": [[1.0]], "R": [[1.0]]}},
            {"observation": {"H": [[-2.0]], "R": [[25.0]]}},
        ],
        process={"kind": "random_walk", "variance": 1.0},
    )
    definition["initial"] = {"mean": [3.0], "covariance": [[2.0]], "mode_probabilities": [0.7, 0.3]}
    x = 3 + np.sqrt(2) * rng.normal(size=keys)
    first = rng.random(keys) < 0.7
    y = np.where(first, x + rng.normal(size=keys), -2 * x + 5 * rng.normal(size=keys))
    model = kalman.build(definition)
    rows = kalman.SortedRows(np.arange(keys), np.zeros(keys, np.int64), y[None], np.empty((0, keys)))
    _, outputs = kalman.run(model, kalman.initial_states(model, keys), rows, UNIT)
    assert outputs.nis.mean() == pytest.approx(1.0, abs=0.03)
    chance = outputs.extra["mode_probabilities"][0]  # calibrated: of those with 80 %, 80 % are in the mode
    some = (chance > 0.7) & (chance < 0.9)
    assert first[some].mean() == pytest.approx(chance[some].mean(), abs=0.02)


def test_a_control_may_be_one_modes_alone():
    definition = walk(control=["u"])
    definition["modes"][1] = {"process": {"kind": "explicit", "F": [[1.0]], "Q": [[1.0]], "B": [[2.0]]}}
    _, outputs = run_one(
        {**definition, "observation": {"H": [[1.0]], "R": [[1.0]]}}, [0.0, 10.0], u=[[5.0], [5.0]]
    )
    assert outputs.extra["mode_probabilities"][1, 1] > 0.99


@pytest.mark.parametrize("kind", ["extended", "unscented", "cubature"])
def test_modes_of_other_kinds(kind):
    """On matrices every kind is the linear filter, in the mixture too."""
    rng = np.random.default_rng(8)
    definition = random_modes(rng, "sum", 3, 3, 2, 0)
    other = {**definition, "modes": [{**mode, "filter": kind} for mode in definition["modes"]]}
    other["modes"][0] = definition["modes"][0]  # kinds may be mixed
    rows = random_rows(rng, definition, 20, 8)
    found = []
    for each in (definition, other):
        model = kalman.build(each)
        found.append(kalman.run(model, kalman.initial_states(model, 20), rows, UNIT)[1])
    for a, b in zip(found[1][:4], found[0][:4], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", ["extended", "unscented", "cubature"])
def test_identical_modes_of_functions_are_one_filter(kind):
    definition = {
        "filter": kind,
        "states": ["a", "b"],
        "measurement": ["y"],
        "process": {"kind": "function", "f": f"{NONLINEAR}:bent", "Q": [[0.1, 0.0], [0.0, 0.2]]},
        "observation": {"h": f"{NONLINEAR}:seen_1", "R": [[0.5]]},
        "initial": {"mean": [0.3, -0.2], "covariance": [[1.0, 0.1], [0.1, 0.5]]},
    }
    mode = {name: definition[name] for name in ("filter", "process", "observation")}
    several = {**definition, "filter": "imm", "modes": [mode, mode], "transition": [[0.9, 0.1], [0.2, 0.8]]}
    y = np.random.default_rng(9).normal(size=8)
    y[3] = np.nan
    _, single = run_one(definition, y)
    _, outputs = run_one(several, y)
    for a, b in zip(outputs[:4], single[:4], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


def test_a_mode_without_a_covariance_is_refused():
    with pytest.raises(kalman.ModelError, match="must keep mean and covariance") as error:
        kalman.build(
            walk(modes=[{"process": {"kind": "random_walk", "variance": 1.0}, "form": "square_root"}])
        )
    assert error.value.field == "modes[0].filter"


def test_robust_modes():
    definition = walk(robust={"student_t": {"degrees": 4}})
    _, outputs = run_one(definition, [0.1, 0.0, 80.0, 0.0])
    assert abs(outputs.mean[0, 2]) < 5 and not outputs.flag.any()


@pytest.mark.parametrize("kind", ["imm", "mmae"])
def test_company_cuts_and_snapshots_change_no_bit(kind):
    rng = np.random.default_rng(7)
    definition = random_modes(rng, "explicit", 3, 2, 2, 1)
    if kind == "mmae":
        definition |= {"filter": "mmae", "transition": None, "mmae": {"window": 3}}
    definition["modes"][0]["observation"]["R"] = [[0.0, 0.0], [0.0, 0.0]]  # fails when a time repeats
    definition["modes"][0]["process"]["Q"] = [[0.0, 0.0], [0.0, 0.0]]
    model = kalman.build(definition)
    rows = random_rows(rng, definition, 60, 8)
    laws.splitting_and_permuting_keys_changes_no_bit(model, rows, 60, rng)
    laws.cutting_rows_changes_no_bit(model, rows, 60, rng)
    laws.snapshot_restores_every_bit(model, rows, 60)
    laws.a_bad_row_hurts_its_own_key_alone(model, rows, 60, np.inf, flags.NON_FINITE)


def test_layout():
    model = kalman.build(walk(filter="mmae", transition=None, mmae={"window": 5}))
    expected = {"mean": (1,), "covariance": (1,), "log_probabilities": (2,), "recent": (10,)}
    for name in ("slow", "fast"):
        expected |= {f"{name}.mean": (1,), f"{name}.covariance": (1,)}
    assert dict(model.fields) == expected and model.size == 18
    assert model.outputs == {"mode_probabilities": 2}
    mean, covariance = model.moments(model.initial(3))
    assert mean[:, 2].tolist() == [0.0] and covariance[:, 2].tolist() == [9.0]


WRONG = [
    ({"modes": None}, "modes", "not a list"),
    ({"modes": [{"observation": {"R": [[1.0]]}}]}, "modes[0].process.kind", "missing"),
    (
        {"modes": [{"process": {"kind": "random_walk", "variance": -1.0}}]},
        "modes[0].process.variance",
        "zero or",
    ),
    ({"modes": [{"filter": "imm"}]}, "modes[0].filter", "a single filter"),
    ({"modes": [{"states": ["b"]}]}, "modes[0].states", "share it"),
    ({"transition": None}, "transition", "missing"),
    ({"transition": [[0.9, 0.2], [0.1, 0.9]]}, "transition[0]", "not probabilities"),
    ({"transition": [[1.0]]}, "transition", "2 x 2"),
    ({"imm": {"floor": 0.6}}, "imm.floor", "no room"),
    ({"imm": {"window": 3}}, "imm.window", "not known"),
    ({"filter": "mmae"}, "transition", "stay as they are"),
    ({"filter": "mmae", "transition": None, "mmae": {"window": 0}}, "mmae.window", "whole number"),
    ({"initial": {"diffuse": True}}, "initial.diffuse", "cannot be told apart"),
    (
        {"initial": {"mean": [0.0], "covariance": [[1.0]], "mode_probabilities": [0.5, 0.4]}},
        "initial.mode_probabilities",
        "not probabilities",
    ),
    ({"modes": [{"storage": {"dtype": "float32"}}]}, "modes[0].storage", "share it"),
    ({"adaptive": {"R": 0.1}}, "adaptive", "fixed noise"),
    ({"robust": {"gate": {"threshold": 9.0}}}, "robust.gate", "gated mode"),
]


@pytest.mark.parametrize(("sections", "field", "problem"), WRONG)
def test_an_error_names_the_field(sections, field, problem):
    with pytest.raises(kalman.ModelError, match=problem) as error:
        kalman.build(walk(**sections))
    assert error.value.field == field
