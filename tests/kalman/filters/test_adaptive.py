"""Adaptive noise: the joint Gaussian of state and noises, the published form, convergence, PSD, missing data."""

from typing import Any

import numpy as np
import pytest

import kalman
from kalman.linalg.packing import unpack
from tests.kalman.support import laws
from tests.kalman.support.models import random_covariance, random_definition, random_rows, same
from tests.kalman.support.oracles import UNIT, begun, corrected, full, run_one, transition_of

KINDS = ["explicit", "local_linear_trend", "constant_velocity", "sum"]


def scaled_parts(process: dict[str, Any]):
    """Each variance of a named structure: (where it is, rank of its part of Q)."""
    kind = process["kind"]
    if kind == "sum":
        return [(part, name, rank) for part in process["parts"] for part, name, rank in scaled_parts(part)]
    names = {
        "random_walk": [("variance", 1)],
        "ornstein_uhlenbeck": [("variance", 1)],
        "local_linear_trend": [("level_variance", 1), ("slope_variance", 2)],
        "constant_velocity": [("acceleration_variance", 2 * process.get("dimensions", 1))],
    }[kind]
    return [(process, name, rank) for name, rank in names]


def textbook(definition, y, dt, u):
    """One key: moments of each noise given the row, from the joint Gaussian; parameters moved in place."""
    definition = {**definition, "process": _copied(definition["process"])}
    process, rates = definition["process"], definition["adaptive"]
    H = np.array(definition["observation"]["H"], float)
    R, B, x, P = begun(definition, u.shape[1])
    means, covariances, scores, parameters = [], [], [], []
    for k in range(len(y)):
        if k:
            F, Q, c = transition_of(process, dt[k])
            x, P = F @ x + B @ u[k] + c, F @ P @ F.T + Q
        seen = ~np.isnan(y[k])
        row = corrected(x, P, H, R, y[k])
        h, v, inverse = H[seen], row.innovation, np.linalg.inv(row.spread)

        def moment(X, seen_by, v=v, inverse=inverse):  # E[e e' | y] for a noise of covariance X
            gain = X @ seen_by.T @ inverse
            return np.outer(gain @ v, gain @ v) + X - gain @ seen_by @ X

        R_now = moment(R, np.eye(len(R))[seen])
        if rates.get("Q") and k:
            if process["kind"] == "explicit":
                process["Q"] = (np.array(process["Q"]) + rates["Q"] * (moment(Q, h) - Q)).tolist()
            moves = []
            for place, name, rank in [] if process["kind"] == "explicit" else scaled_parts(process):
                value = place[name]
                one = _only(process, place, name, dt[k])
                change = np.trace(np.linalg.pinv(one) @ (moment(one, h) - one)) / rank
                moves.append((place, name, value * (1 + rates["Q"] * change)))
            for place, name, value in moves:
                place[name] = value
        x, P = row.mean, row.covariance
        if rates.get("R"):
            R = R + rates["R"] * (R_now - R)
        means.append(x), covariances.append(P)
        scores.append(row.score)
        parameters.append((process, R))
    return np.array(means), np.array(covariances), np.array(scores), process, R


def _copied(process):
    return {**process, **({"parts": [dict(p) for p in process["parts"]]} if "parts" in process else {})}


def _only(process, place, name, dt):
    """Q made by one variance alone."""
    saved = [(p, n, p[n]) for p, n, _ in scaled_parts(process)]
    for p, n, _ in saved:
        p[n] = p[n] if p is place and n == name else 0.0
    Q = transition_of(process, dt)[1]
    for p, n, value in saved:
        p[n] = value
    return Q


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rates", [{"R": 0.05}, {"Q": 0.1}, {"R": 0.02, "Q": 0.07}])
def test_textbook_over_random_models(kind, rates):
    """Correlated noise, missing components, irregular times that repeat, control; m 1-3."""
    for seed in range(2):
        rng = np.random.default_rng([seed, 4])
        definition = random_definition(rng, kind, 3, int(rng.integers(1, 4)), 1 if kind == "explicit" else 0)
        definition["adaptive"] = rates
        rows = random_rows(rng, definition, 5, 12)
        model = kalman.build(definition)
        states, outputs = kalman.run(model, kalman.initial_states(model, 5), rows, UNIT)
        assert not outputs.flag.any()
        for key in np.unique(rows.key):
            here = rows.key == key
            dt = np.diff(rows.time[here], prepend=0) / UNIT
            means, covariances, scores, process, R = textbook(
                definition, rows.y[:, here].T, dt, rows.u[:, here].T
            )
            close: Any = {"rtol": 1e-10, "atol": 1e-10}
            np.testing.assert_allclose(outputs.mean[:, here].T, means, **close)
            np.testing.assert_allclose(full(outputs.covariance[:, here]), covariances, **close)
            np.testing.assert_allclose(outputs.log_likelihood[here], scores, **close)
            own = states.values[model.places["parameters"], key]  # type: ignore[attr-defined]
            expected = []
            if "Q" in rates and kind == "explicit":
                expected += [a for i, row in enumerate(process["Q"]) for a in row[: i + 1]]
            elif "Q" in rates:
                expected += [place[name] for place, name, _ in scaled_parts(process)]
            if "R" in rates:
                expected += [a for i, row in enumerate(R.tolist()) for a in row[: i + 1]]
            np.testing.assert_allclose(own, expected, **close)


def test_it_is_the_residual_based_estimate():
    """R' = (1 - b) R + b (e e' + H P H'), e and P after the update (Mohamed and Schwarz 1999, residual-based)."""
    rng = np.random.default_rng(1)
    definition = random_definition(rng, "explicit", 3, 2)
    H, R = (np.array(definition["observation"][name]) for name in "HR")
    states, outputs = run_one({**definition, "adaptive": {"R": 0.3}}, [[1.0, -2.0]])
    e = np.array([1.0, -2.0]) - H @ outputs.mean[:, 0]
    expected = 0.7 * R + 0.3 * (np.outer(e, e) + H @ full(outputs.covariance)[0] @ H.T)
    np.testing.assert_allclose(full(states.values[9:])[0], expected, rtol=1e-12)


def walk(R, Q, **sections):
    return {
        "states": ["a"],
        "measurement": ["y", "z"],
        "process": {"kind": "random_walk", "variance": Q},
        "observation": {"H": [[1.0], [1.0]], "R": R},
        "initial": {"mean": [0.0], "covariance": [[1.0]]},
        **sections,
    }


def simulated(rng, keys, length, Q, R, missing):
    x = np.cumsum(rng.normal(size=(keys, length)) * np.sqrt(Q), axis=1)
    y = x.ravel() + np.linalg.cholesky(R) @ rng.normal(size=(2, keys * length))
    y[rng.random(y.shape) < missing] = np.nan
    time = np.tile(np.arange(length) * 1_000_000, keys)
    return kalman.SortedRows(np.repeat(np.arange(keys), length), time, y, np.empty((0, keys * length)))


@pytest.mark.parametrize(("start", "missing"), [(0.2, 0.0), (8.0, 0.3)])
def test_R_converges_to_the_truth(start, missing):
    rng = np.random.default_rng(6)
    R = np.array([[2.0, 0.6], [0.6, 1.0]])
    rows = simulated(rng, 20, 2500, 0.5, R, missing)
    written = [[start, start / 4], [start / 4, start]]
    model = kalman.build(walk(written, 0.5, adaptive={"R": 0.02}))
    states, outputs = kalman.run(model, kalman.initial_states(model, 20), rows, UNIT)
    found = full(states.values[2:])
    np.testing.assert_allclose(found.mean(axis=0), R, rtol=0.05)
    late = outputs.nis.reshape(20, 2500)[:, 500:]
    measured = (~np.isnan(rows.y)).sum(axis=0).reshape(20, 2500)[:, 500:]
    assert np.nansum(late) / measured.sum() == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("start", [0.1, 3.0])
def test_the_process_noise_converges_to_the_truth(start):
    rng = np.random.default_rng(7)
    R = np.array([[0.3, 0.0], [0.0, 0.5]])
    rows = simulated(rng, 60, 600, 0.8, R, 0.2)
    model = kalman.build(walk(R.tolist(), start, adaptive={"Q": 0.02}))
    states, _ = kalman.run(model, kalman.initial_states(model, 60), rows, UNIT)
    assert states.values[2].mean() == pytest.approx(0.8, rel=0.1)


def test_covariances_stay_positive_semidefinite():
    rng = np.random.default_rng(9)
    for seed in range(4):
        definition = random_definition(rng, "explicit", 3, 3)
        definition["adaptive"] = {"R": 0.6, "Q": 0.6}
        definition["observation"]["R"] = (np.ones((3, 3)) + 1e-6 * np.eye(3)).tolist()
        rows = random_rows(rng, definition, 20, 30, missing=0.4)
        rows = rows._replace(y=rows.y * 10.0 ** rng.integers(-6, 6, rows.y.shape))
        model = kalman.build(definition)
        states, outputs = kalman.run(model, kalman.initial_states(model, 20), rows, UNIT)
        assert not outputs.flag.any(), seed
        for packed in (states.values[9:15], states.values[15:21]):
            for X in unpack(packed).T.reshape(-1, 3, 3):
                assert np.linalg.eigvalsh(X).min() >= -1e-14 * np.abs(X).max()


def test_a_missing_component_leaves_its_entries():
    definition = walk([[2.0, 0.0], [0.0, 1.0]], 0.5, adaptive={"R": 0.1})
    states, _ = run_one(definition, [[3.0, np.nan]])
    one, cross, other = states.values[2:, 0]
    assert one != 2.0 and cross == 0.0 and other == 1.0
    states, _ = run_one(definition, [[np.nan, np.nan]])
    assert states.values[2:, 0].tolist() == [2.0, 0.0, 1.0]


def test_unpredicted_and_undetermined_rows_adapt_no_noise():
    definition = walk([[2.0, 0.0], [0.0, 1.0]], 0.5, adaptive={"R": 0.1, "Q": 0.1})
    states, _ = run_one(definition, [[3.0, 1.0]])
    assert states.values[2, 0] == 0.5, "no process noise comes before the first row"
    states, _ = run_one({**definition, "initial": {"diffuse": True}}, [[3.0, 1.0]])
    assert states.values[3:, 0].tolist() == [0.5, 2.0, 0.0, 1.0]


def test_adapting_under_heavy_tails_is_not_led_astray():
    rng = np.random.default_rng(10)
    rows = simulated(rng, 40, 400, 0.1, np.eye(2), 0.0)
    y = rows.y + (rng.random(rows.y.shape) < 0.05) * rng.normal(size=rows.y.shape) * 50
    found = {}
    for name, section in (("plain", None), ("huber", {"huber": {}}), ("t", {"student_t": {"degrees": 4}})):
        model = kalman.build(walk(np.eye(2).tolist(), 0.1, adaptive={"R": 0.02}, robust=section))
        states, _ = kalman.run(model, kalman.initial_states(model, 40), rows._replace(y=y), UNIT)
        found[name] = states.values[[2, 4]].mean()
    assert found["plain"] > 100 and found["huber"] < 12 and found["t"] < 4


def test_learned_parameters_are_where_adapting_begins():
    definition = walk([[2.0, 0.0], [0.0, 1.0]], 0.5, adaptive={"R": 0.1})
    definition["learn"] = {"parameters": ["variance", "R"], "scope": "key"}
    model = kalman.build(definition, {"variance": 0.7})
    assert dict(model.fields) == {"mean": (1,), "covariance": (1,), "parameters": (4,)}
    state = model.with_parameters(model.initial(2), np.arange(8.0).reshape(4, 2))
    same(state[2:], np.arange(8.0).reshape(4, 2))
    definition["learn"] = {"parameters": ["variance"], "scope": "key"}
    definition["adaptive"] = {"R": 0.1, "Q": 0.1}
    model = kalman.build(definition, {"variance": 0.7})
    state = model.with_parameters(model.initial(2), np.array([[5.0, 6.0]]))
    assert state[2:, 1].tolist() == [6.0, 2.0, 0.0, 1.0] and model.initial(1)[2, 0] == 0.7


@pytest.mark.parametrize("options", [{}, {"huber": {"threshold": 1.0}, "gate": {"probability": 0.999}}])
@pytest.mark.parametrize("kind", ["explicit", "sum"])
def test_company_cuts_and_snapshots_change_no_bit(kind, options):
    rng = np.random.default_rng(12)
    definition = random_definition(rng, kind, 2, 2)
    definition |= {"adaptive": {"R": 0.1, "Q": 0.1}, "robust": options or None}
    model = kalman.build(definition)
    rows = random_rows(rng, definition, 60, 8)
    laws.splitting_and_permuting_keys_changes_no_bit(model, rows, 60, rng)
    laws.cutting_rows_changes_no_bit(model, rows, 60, rng)
    laws.snapshot_restores_every_bit(model, rows, 60)
    laws.a_bad_row_hurts_its_own_key_alone(model, rows, 60, np.inf, kalman.FLAGS.index("non_finite"))


@pytest.mark.parametrize("robust", [None, {"student_t": {"degrees": 4}}, {"huber": {"threshold": 1.0}}])
def test_entries_from_columns(robust):
    """H and the noise's scales from a column that is always 4 are those numbers; what is adapted is unscaled."""
    rng = np.random.default_rng(15)
    definition = random_definition(rng, "explicit", 2, 2)
    definition |= {"adaptive": {"R": 0.1, "Q": 0.1}, "robust": robust}
    rows = random_rows(rng, definition, 20, 8)
    H = np.array(definition["observation"]["H"])
    H[1, 0] = 4.0

    def found(control, scale, entry, factor):
        H_written = [[H[0, 0], H[0, 1]], [entry, H[1, 1]]]
        R, Q = (np.array(definition[a][b]) for a, b in (("observation", "R"), ("process", "Q")))
        process = {**definition["process"], "Q": (Q * factor).tolist(), **scale}
        observation = {"H": H_written, "R": (R * factor).tolist(), **scale}
        model = kalman.build(
            {**definition, "control": control, "process": process, "observation": observation}
        )
        u = np.full((len(control), len(rows.key)), 4.0)
        states, outputs = kalman.run(model, kalman.initial_states(model, 20), rows._replace(u=u), UNIT)
        assert not outputs.flag.any()
        return outputs, states.values[5:]

    plain, adapted = found([], {}, 4.0, 4.0)
    for case in ((["s"], {"noise_scale": "s"}, "s", 1.0), ([], {"noise_scale": 4.0}, 4.0, 1.0)):
        outputs, own = found(*case)
        np.testing.assert_allclose(outputs.mean, plain.mean, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(outputs.log_likelihood, plain.log_likelihood, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(own * 4.0, adapted, rtol=1e-10, atol=1e-12)


def test_a_row_without_noise_or_with_impossible_noise():
    definition = walk([[2.0, 0.0], [0.0, 1.0]], 0.5, adaptive={"R": 0.1}, control=["s"])
    definition["observation"]["noise_scale"] = "s"
    states, outputs = run_one(definition, [[1.0, 1.0], [1.0, np.nan], [1.0, 1.0]], u=[[1.0], [0.0], [-1.0]])
    assert outputs.flag.tolist() == [0, 0, kalman.FLAGS.index("not_psd")]
    one, _ = run_one(definition, [[1.0, 1.0]], u=[[1.0]])
    same(states.values[2:], one.values[2:])


WRONG = [
    ({"adaptive": {}}, "adaptive", "names nothing"),
    ({"adaptive": {"R": 1.0}}, "adaptive.R", "not below 1"),
    ({"adaptive": {"Q": -0.1}}, "adaptive.Q", "above zero"),
    ({"adaptive": {"P": 0.1}}, "adaptive.P", "not known"),
]


@pytest.mark.parametrize(("sections", "field", "problem"), WRONG)
def test_an_error_names_the_field(sections, field, problem):
    with pytest.raises(kalman.ModelError, match=problem) as error:
        kalman.build(walk([[2.0, 0.0], [0.0, 1.0]], 0.5, **sections))
    assert error.value.field == field


def test_zeros_that_cannot_be_kept_are_refused():
    rng = np.random.default_rng(2)
    definition = random_definition(rng, "explicit", 2, 3)
    definition["adaptive"] = {"R": 0.1}
    for R, good in (
        ([[2, 1, 0], [1, 2, 1], [0, 1, 2]], False),
        ([[2, 1, 0], [1, 2, 0], [0, 0, 2]], True),
        (random_covariance(rng, 3), True),
    ):
        definition["observation"]["R"] = R
        if good:
            states, _ = run_one(definition, rng.normal(size=(5, 3)))
            assert (states.values[5:, 0] == 0).tolist() == [b == 0 for b in np.array(R)[np.tril_indices(3)]]
        else:
            with pytest.raises(kalman.ModelError, match="do not separate it into blocks"):
                kalman.build(definition)


def test_a_state_without_a_variance_is_filtered() -> None:
    definition = {
        "measurement": ["y"],
        "states": ["a", "b"],
        "process": {"kind": "explicit", "F": [[0.0, 0.0], [0.0, 0.0]], "Q": [[0.0, 0.0], [0.0, 0.0]]},
        "observation": {"H": [[1.0, 0.0]], "R": [[2.0]]},
        "initial": {"mean": [0.0, 0.0], "covariance": [[1.0, 0.0], [0.0, 1.0]]},
        "adaptive": {"R": 0.1, "Q": 0.1},
    }
    states, outputs = run_one(definition, [1.0, 0.5, -0.5])
    assert not outputs.mean[:, 1:].any() and not outputs.covariance[:, 1:].any()
    assert np.isfinite(states.values).all()
