"""Measured angles: a track through the cut of its bearings gives the estimates of the same track away from it."""

import numpy as np
import pytest

import kalman
from kalman.evaluation.diagnostics import innovations
from kalman.evaluation.forecast import forecast
from kalman.models.angles import turn_angle
from kalman.models.functions import Call, FunctionObservation
from kalman.models.named import Named
from tests.kalman.support.nonlinear import velocity_noise
from tests.kalman.support.oracles import UNIT, run_one

HERE = "tests.kalman.filters.test_angles"
NONLINEAR = "tests.kalman.support.nonlinear"
FORMS = [
    ("extended", "covariance"),
    ("extended", "square_root"),
    ("extended", "information"),
    *((kind, form) for kind in ("unscented", "cubature") for form in ("covariance", "square_root")),
]


def in_degrees(x):
    return np.array([np.hypot(x[0], x[2]), np.rad2deg(np.arctan2(x[2], x[0]))])


def slope(x):
    square = x[0] ** 2 + x[2] ** 2
    r, none = np.sqrt(square), np.zeros_like(square)
    return np.array([[x[0] / r, none, x[2] / r, none], [-x[2] / square, none, x[0] / square, none]])


def heading(x):
    """The angle itself, as a compass has it."""
    return np.arctan2(np.sin(x[0]), np.cos(x[0]))


def tracked(kind, form, side, wrap, **changes):
    """A target seen from the origin, on its left (side -1, at the cut) or on its right."""
    observation = {"h": f"{NONLINEAR}:range_and_bearing", "R": [[0.25, 0.002], [0.002, 0.0009]]}
    return {
        "filter": kind,
        "form": form,
        "states": ["x", "vx", "y", "vy"],
        "measurement": ["range", "bearing"],
        "process": {"kind": "function", "f": f"{NONLINEAR}:velocity", "q": f"{NONLINEAR}:velocity_noise"},
        "observation": observation | ({"wrap": wrap} if wrap else {}) | changes,
        "initial": {
            "mean": (side * np.array([60.0, 0.0, -3.0, 0.5])).tolist(),
            "covariance": np.diag([400.0, 1.0, 400.0, 1.0]).tolist(),
        },
    }


def track(length=80, seed=5):
    """The true places on the right side (n, N), and range and bearing from there (N, 2), some missing."""
    rng = np.random.default_rng(seed)
    x, places = np.array([60.0, 0.0, -3.0, 0.5]), []
    for _ in range(length):
        x = np.array([x[0] + x[1], 0.9 * x[1] - 0.05 * (x[0] - 60.0), x[2] + x[3], x[3] - 0.05 * x[2]])
        x = x + rng.multivariate_normal(np.zeros(4), velocity_noise(np.ones(1))[:, :, 0])
        places.append(x)
    places = np.array(places).T
    y = np.array([np.hypot(places[0], places[2]), np.arctan2(places[2], places[0])])
    y = y + np.array([[0.5], [0.03]]) * rng.normal(size=y.shape)
    y[:, 7] = np.nan
    y[1, 20] = np.nan
    return places, y.T


def turned(y):
    """The same readings from a track that is turned by half a turn."""
    return np.column_stack([y[:, 0], np.arctan2(-np.sin(y[:, 1]), -np.cos(y[:, 1]))])


def same(a, b, sign=1.0, rtol=1e-9):
    for name in ("flag", "log_likelihood", "nis", "covariance"):
        np.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=rtol, atol=1e-9, err_msg=name)
    np.testing.assert_allclose(a.mean, sign * b.mean, rtol=rtol, atol=1e-9)


@pytest.mark.parametrize(("kind", "form"), FORMS)
def test_a_track_through_the_cut(kind, form):
    """Bearings that jump between pi and -pi, given and by differences, against those of the track turned away."""
    _, y = track()
    assert np.nanmax(np.abs(np.diff(turned(y)[:, 1]))) > 6.0, "the track does not meet the cut"
    assert np.nanmax(np.abs(y[:, 1])) < 2.0, "the reference meets it too"
    _, reference = run_one(tracked(kind, form, 1.0, None), y)
    _, cut = run_one(tracked(kind, form, -1.0, {"bearing": "radians"}), turned(y))
    assert not reference.flag.any()
    same(cut, reference, -1.0)
    if kind == "extended":
        _, given = run_one(
            tracked(kind, form, -1.0, {"bearing": "radians"}, jacobian=f"{HERE}:slope"), turned(y)
        )
        same(given, reference, -1.0, 1e-7)
    _, lost = run_one(tracked(kind, form, -1.0, None), turned(y))
    assert not np.allclose(lost.mean, -reference.mean, atol=1.0), "the cut makes no difference"


@pytest.mark.parametrize("kind", ["extended", "unscented", "cubature"])
@pytest.mark.parametrize("robust", [{"student_t": {"degrees": 5.0}}, {"gate": {"probability": 0.999}}])
def test_robust_updates(kind, robust):
    _, y = track(60)
    y[30, 1] += 1.0
    _, reference = run_one({**tracked(kind, "covariance", 1.0, None), "robust": robust}, y)
    cut = {**tracked(kind, "covariance", -1.0, {"bearing": "radians"}), "robust": robust}
    same(run_one(cut, turned(y))[1], reference, -1.0)


def test_degrees_and_a_number_are_periods():
    _, y = track(40)
    y = turned(y)
    degrees = np.column_stack([y[:, 0], np.rad2deg(y[:, 1]) % 360.0])  # a compass that counts from 0 to 360
    R = (np.array([[0.25, 0.002], [0.002, 0.0009]]) * np.outer([1, 180 / np.pi], [1, 180 / np.pi])).tolist()
    results = [
        run_one(tracked("unscented", None, -1.0, {"bearing": w}, h=f"{HERE}:in_degrees", R=R), degrees)[1]
        for w in ("degrees", 360.0)
    ]
    _, radians = run_one(tracked("unscented", None, -1.0, {"bearing": "radians"}), y)
    for one in results:
        np.testing.assert_allclose(one.mean, radians.mean, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(one.covariance, radians.covariance, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["extended", "unscented", "cubature"])
@pytest.mark.parametrize("h", [True, False])
def test_many_turns_of_a_compass(kind, h):
    """An angle and its rate, ten turns: the linear filter of the angle that was not cut."""
    rng = np.random.default_rng(8)
    angle = 0.7 * np.arange(90) + np.cumsum(rng.normal(0.0, 0.02, 90))
    y = angle + 0.1 * rng.normal(size=90)
    linear = {
        "states": ["angle", "rate"],
        "measurement": ["heading"],
        "process": {"kind": "constant_velocity", "acceleration_variance": 0.01},
        "observation": {"H": [[1.0, 0.0]], "R": [[0.01]]},
        "initial": {"mean": [0.0, 0.7], "covariance": [[0.04, 0.0], [0.0, 0.01]]},
    }
    _, reference = run_one(linear, y)
    seen = {"h": f"{HERE}:heading"} if h else {"H": [[1.0, 0.0]]}
    observation = {"R": [[0.01]], "wrap": {"heading": "radians"}, **seen}
    cut = np.arctan2(np.sin(y), np.cos(y))
    _, outputs = run_one({**linear, "filter": kind, "observation": observation}, cut)
    same(outputs, reference)


@pytest.mark.parametrize("kind", ["extended", "unscented", "cubature"])
@pytest.mark.parametrize("form", ["covariance", "square_root"])
def test_an_angle_that_is_hardly_known(kind, form):
    """Two standard deviations are more than half a turn; the points reach over the cut on the far side."""
    start = {"mean": [3.0], "covariance": [[1.7**2]]}
    linear = {
        "states": ["angle"],
        "measurement": ["heading"],
        "process": {"kind": "random_walk", "variance": 0.01},
        "observation": {"H": [[1.0]], "R": [[0.3]]},
        "initial": start,
    }
    _, reference = run_one(linear, [3.6, 3.5, 3.4])
    observation = {"h": f"{HERE}:heading", "R": [[0.3]], "wrap": {"heading": "radians"}}
    found = {**linear, "filter": kind, "form": form, "observation": observation}
    if kind == "unscented":
        found["unscented"] = {"kappa": 1.0}  # points sqrt(2) deviations out
    _, outputs = run_one(found, np.array([3.6, 3.5, 3.4]) - 2.0 * np.pi)
    same(outputs, reference)


def test_differences_on_the_cut_itself():
    """The bearing of a place exactly to the left is pi, a little below it is -pi."""
    found = FunctionObservation(
        2, 4, Call(Named(f"{NONLINEAR}:range_and_bearing"), 1), None, (0.0, 2.0 * np.pi)
    )
    x = np.array([[-60.0, -60.0], [0.0, 0.0], [0.0, -0.0], [0.0, 0.0]])
    spread = np.full((4, 2), 3.0)
    no_inputs = np.zeros((0, x.shape[1]))
    np.testing.assert_allclose(found.slope(x, no_inputs, spread), slope(x), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("kind", ["imm", "mmae"])
def test_modes_through_the_cut(kind):
    """Two noises of one track: mixture, probabilities and the mixture's NIS, forecasts and innovations."""
    _, y = track(60)
    calm = {"kind": "function", "f": f"{NONLINEAR}:velocity", "q": f"{NONLINEAR}:velocity_noise"}
    wild = {**calm, "noise_scale": 20.0}

    def modes(side, wrap):
        shared = {
            name: value
            for name, value in tracked("unscented", None, side, wrap).items()
            if name not in ("process", "form")
        }
        found = {
            **shared,
            "filter": kind,
            "modes": [{"filter": "unscented", "process": calm}, {"filter": "extended", "process": wild}],
        }
        return found | ({"transition": [[0.9, 0.1], [0.2, 0.8]]} if kind == "imm" else {})

    results = []
    for side, readings, wrap in ((1.0, y, None), (-1.0, turned(y), {"bearing": "radians"})):
        model = kalman.build(modes(side, wrap))
        rows = kalman.SortedRows(
            np.zeros(len(y), np.int64), np.arange(len(y)) * 1_000_000, readings.T, np.empty((0, len(y)))
        )
        states, outputs, normalised = innovations(model, kalman.initial_states(model, 1), rows, UNIT)
        results.append((outputs, normalised, forecast(model, states, np.ones((3, 1)))))
    (reference, white, ahead), (cut, cut_white, cut_ahead) = results
    assert not reference.flag.any()
    same(cut, reference, -1.0, 1e-7)
    chances = "mode_probabilities"
    np.testing.assert_allclose(cut.extra[chances], reference.extra[chances], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(cut_white, white, rtol=1e-6, atol=1e-7)
    a, b = cut_ahead.measurement_mean, ahead.measurement_mean
    np.testing.assert_allclose(a[0], b[0], rtol=1e-7)
    np.testing.assert_allclose(np.cos(a[1]), -np.cos(b[1]), atol=1e-8)
    np.testing.assert_allclose(
        cut_ahead.measurement_covariance, ahead.measurement_covariance, rtol=1e-6, atol=1e-8
    )


def test_the_interval_is_open_below_and_closed_above():
    found = [
        float(turn_angle(np.float64(a), np.float64(0.0), 2.0)) for a in (-1.0, 1.0, 0.999, -0.999, 3.0, -3.5)
    ]
    assert found == [1.0, 1.0, 0.999, -0.999, 1.0, 0.5]
    assert float(turn_angle(np.float64(725.0), np.float64(-10.0), 360.0)) == 5.0
    assert np.isnan(turn_angle(np.float64(np.nan), np.float64(0.0), 2.0))


@pytest.mark.parametrize(
    ("kind", "wrap", "problem"),
    [
        ("extended", {"course": "radians"}, "is not a measured component"),
        ("extended", {"bearing": "turns"}, "is no period"),
        ("cubature", {"bearing": 0.0}, "above zero"),
        ("unscented", {"bearing": True}, ""),
        ("unscented", ["bearing"], "names no measured component"),
        ("unscented", {}, "names no measured component"),
    ],
)
def test_an_error_names_the_component(kind, wrap, problem):
    definition = tracked(kind, None, 1.0, None)
    definition["observation"]["wrap"] = wrap
    with pytest.raises(kalman.ModelError) as error:
        kalman.build(definition)
    assert problem in error.value.problem and error.value.field.startswith("observation.wrap")


@pytest.mark.parametrize("form", ["covariance", "square_root"])
def test_the_linear_filter_says_which_one_to_take(form):
    definition = {
        "form": form,
        "states": ["a"],
        "measurement": ["y"],
        "process": {"kind": "random_walk", "variance": 1.0},
        "observation": {"R": [[1.0]], "wrap": {"y": "degrees"}},
        "initial": {"mean": [0.0], "covariance": [[1.0]]},
    }
    with pytest.raises(kalman.ModelError, match="choose filter: extended"):
        kalman.build(definition)
    kalman.build({**definition, "filter": "extended"})


def test_modes_share_their_angles():
    definition = tracked("extended", None, 1.0, {"bearing": "radians"})
    observation, process = definition["observation"], definition.pop("process")
    other = {**observation, "wrap": {"bearing": "degrees"}}
    modes = [{"filter": "extended", "process": process, "observation": a} for a in (observation, other)]
    shared = {name: definition[name] for name in ("states", "measurement", "initial")}
    with pytest.raises(kalman.ModelError, match=r"modes\[1\].observation.wrap"):
        kalman.build({**shared, "filter": "mmae", "modes": modes})
