"""The exact diffuse start where a measurement hardly sees a state: what counts as seen, and what as rounding."""

from typing import Any

import numpy as np
import pytest

import kalman
from kalman.smoothers.smooth import smooth
from tests.kalman.support.oracles import UNIT, full, run_one

TINY = 2.0**-40  # 9.1e-13, and exact


def still(H: Any, **sections: Any) -> dict[str, Any]:
    """Two states that do not move, both diffuse."""
    return {
        "states": ["a", "b"],
        "measurement": [f"y{i}" for i in range(len(H))],
        "process": {"kind": "explicit", "F": [[1, 0], [0, 1]], "Q": [[0, 0], [0, 0]]},
        "observation": {"H": H, "R": np.eye(len(H)).tolist()},
        "initial": {"diffuse": True},
        **sections,
    }


def trend(scale: float, **sections: Any) -> dict[str, Any]:
    """A trend in units of 1 / scale."""
    Q = [[0.5 / scale**2, 0], [0, 0.01 / scale**2]]
    return still([[scale, 0]]) | {
        "process": {"kind": "explicit", "F": [[1, 1], [0, 1]], "Q": Q},
        **sections,
    }


def rows_of(y: Any) -> kalman.SortedRows:
    y = np.asarray(y, float).reshape(len(y), -1)
    time = np.arange(len(y)) * int(UNIT)
    return kalman.SortedRows(np.zeros(len(y), np.int64), time, y.T.copy(), np.empty((0, len(y))))


def smoothed(definition: dict[str, Any], y: Any) -> tuple[np.ndarray, np.ndarray]:
    model = kalman.build(definition)
    _, _, found = smooth(model, kalman.initial_states(model, 1), rows_of(y), UNIT)
    return found.mean, full(found.covariance)


def test_a_state_in_tiny_units_is_determined_as_in_others():
    """H of 1e-12: the unit of a state is nobody's measure of what a row sees."""
    y = [3.0, np.nan, 4.5, 5.0, 7.0, 6.0]
    found = []
    for scale in (1.0, TINY):
        definition = trend(scale)
        _, outputs = run_one(definition, y)
        assert np.isfinite(full(outputs.covariance)[2:]).all()
        means, V = smoothed(definition, y)
        _, lagged = run_one({**definition, "smoothing": {"lag": 2}}, y)
        model = kalman.build(definition)
        states, _ = kalman.run(model, kalman.initial_states(model, 1), rows_of(y), UNIT)
        mean, spread = model.measured(states.values, np.empty((0, 1)))  # type: ignore[attr-defined]
        found.append(
            [
                outputs.mean * scale,
                full(outputs.covariance) * scale**2,
                outputs.log_likelihood - np.log(scale) * np.array([-1, 0, -1, 0, 0, 0]),
                means * scale,
                V * scale**2,
                lagged.extra["lagged_mean"] * scale,
                lagged.extra["lagged_covariance"] * scale**2,
                mean,
                spread,
            ]
        )
    for ordinary, tiny in zip(*found, strict=True):
        np.testing.assert_allclose(tiny, ordinary, rtol=1e-12)


def test_nothing_is_known_in_tiny_units_either():
    """Before any measurement the forecast is infinite, and so is what no row ever measures."""
    model = kalman.build(trend(TINY))
    states = kalman.initial_states(model, 1)
    _, spread = model.measured(states.values, np.empty((0, 1)))  # type: ignore[attr-defined]
    assert np.isinf(spread[0, 0])
    slight = still(
        [[1.0, 0.0]], process={"kind": "explicit", "F": [[1, 0], [TINY, 0]], "Q": [[0, 0], [0, 0]]}
    )
    _, V = smoothed(slight, [np.nan, np.nan, np.nan])
    assert np.isinf(V[1, 1, 1])


@pytest.mark.parametrize(("share", "seen"), [(1e-3, True), (1.5e-9, True), (7e-10, False), (0.0, False)])
def test_a_component_determines_what_it_sees_a_billionth_of(share, seen):
    """The second component sees the direction that the first leaves by `share` of all that it could see."""
    H = [[1.0, 1.0], [1.0, 1.0 - 2.0 * share]]
    states, outputs = run_one(still(H), [[3.0, 3.0]])
    assert np.isfinite(outputs.covariance[:, 0]).all() == seen
    # a forecast of the second component, after the first alone
    definition = still(H)
    model = kalman.build(definition)
    states, _ = kalman.run(model, kalman.initial_states(model, 1), rows_of([[3.0, np.nan]]), UNIT)
    _, spread = model.measured(states.values, np.empty((0, 1)))  # type: ignore[attr-defined]
    assert np.isinf(spread[2, 0]) == seen and np.isfinite(spread[0, 0])


@pytest.mark.parametrize(("share", "open_"), [(1e-2, True), (1.5e-13, True), (7e-14, False), (0.0, False)])
def test_a_state_that_a_row_determines_but_for_rounding(share, open_):
    """Of a + share b the row tells a, until b moves it by less than rounding does."""
    _, outputs = run_one(still([[1.0, share]]), [[3.0]])
    assert np.isinf(outputs.covariance[0, 0]) == open_
    assert np.isinf(outputs.covariance[2, 0])


@pytest.mark.parametrize(("share", "open_"), [(1e-2, True), (1.5e-6, True), (7e-7, False), (0.0, False)])
def test_a_state_that_later_rows_determine_but_for_rounding(share, open_):
    _, V = smoothed(still([[1.0, share]]), [[np.nan], [3.0]])
    assert np.isinf(V[0, 0, 0]) == open_
    assert np.isinf(V[0, 1, 1])
    if not open_:
        assert V[0, 0, 0] == pytest.approx(1.0, rel=1e-6)


def test_no_row_is_gated_while_something_is_diffuse():
    """`sharp` is known from the start and its component far off; only once `wide` is determined is the row left out."""
    definition = still([[1.0, 0.0], [0.0, 1.0]])
    definition["initial"] = {"diffuse": [True, False], "mean": [0, 0], "covariance": [[0, 0], [0, 1]]}
    definition["robust"] = {"gate": {"probability": 0.99}}
    far = [np.nan, 50.0]
    states, outputs = run_one(definition, [far, [1.0, np.nan], far, [1.0, 300.0]])
    assert outputs.nis[0] > 1000.0
    assert [kalman.FLAGS[code] for code in outputs.flag[2:]] == ["gated", "gated"]
    assert outputs.flag[:2].tolist() == [0, 0]
