"""A model's own functions: found by name, checked when the model is built, pickled as their name."""

import copy
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

import kalman
from kalman.models.differences import compute_slope
from kalman.models.functions import _choose_check_points
from kalman.models.named import Named, find
from tests.kalman.support.oracles import run_one

MODULE = """
import numpy as np
import {helper}
counter = [0.0]
def move(x, dt, u): return np.array([x[0] + dt * x[1], x[1]])
def move_slope(x, dt, u):
    one, zero = np.ones(x.shape[1]), np.zeros(x.shape[1])
    return np.array([[one, dt], [zero, one]])
def wrong_slope(x, dt, u): return move_slope(x, dt, u) * 1.001
def nan_slope(x, dt, u): return move_slope(x, dt, u) * np.nan
def flat_slope(x, dt, u): return np.eye(2)
def see(x): return x[:1] * {factor}
def see_plain(x): return x[0] * {factor}
def see_two(x): return x
def see_text(x): return np.full((1, x.shape[1]), "a")
def see_log(x): return np.log(x[:1] - 5.0)
def bent(*arguments):
    (x,) = arguments
    return x[:1] ** 2 + x[1:]
def bent_slope(x): return np.array([[2.0 * x[0], 1.0 + 0.0 * x[1]]])
def bent_slope_of_any(*arguments): return bent_slope(*arguments)
def see_mean(x): return x[:1] - x[:1].mean()
def see_raises(x): raise KeyError("range")
def see_kept(x):
    x[0] += 1.0
    return x[:1] * 1.0
def noise(dt): return np.array([[dt, 0 * dt], [0 * dt, dt]])
def asymmetric(dt): return np.array([[dt, 0 * dt], [dt, dt]])
def negative(dt): return -noise(dt)
constant = 3.0
"""
GOOD = {
    "filter": "unscented",
    "states": ["a", "b"],
    "measurement": ["y"],
    "process": {"kind": "function", "f": "moves:move", "Q": [[1, 0], [0, 1]]},
    "observation": {"h": "moves:see", "R": [[1.0]]},
    "initial": {"mean": [0.0, 0.0], "covariance": [[1.0, 0.0], [0.0, 1.0]]},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with a module `moves` that is on no path, and a module beside it that it imports."""
    monkeypatch.chdir(tmp_path)
    return written(tmp_path / "specs", "1.0")


def written(place: Path, factor: str, helper: str = "beside_moves") -> str:
    place.mkdir()
    (place / "moves.py").write_text(MODULE.format(helper=helper, factor=factor))
    (place / f"{helper}.py").write_text("")
    return str(place)


WRONG = [
    ("process.f", "moves", "does not name a function"),
    ("process.f", 3, "does not name a function"),
    ("process.f", "os system:x", "does not name a function"),
    ("process.f", "no_such_module:move", "there is no module no_such_module"),
    ("process.f", "moves:jump", "has no function jump"),
    ("process.f", "moves:constant", "has no function constant"),
    ("process.f", None, "is missing"),
    ("process.Q", None, "is missing"),
    ("process.Q", [[1.0]], "2 x 2"),
    ("process.Qq", [[1.0]], "not known"),
    ("process.f", "moves:see", "takes (x), and is called with (x, dt), (x, dt, u) or (x, dt, u, w)"),
    ("observation.h", "moves:see_two", "gives shape (2, 3) for 3 keys where (1, 3) is needed"),
    ("observation.h", "moves:see_text", "not numbers"),
    ("observation.h", "moves:see_log", "not finite at the initial mean"),
    ("observation.h", "moves:see_mean", "differs from that of each"),
    ("observation.h", "moves:see_raises", "fails at the initial mean with KeyError"),
    ("observation.h", "moves:see_kept", "changes its arguments"),
    ("observation.R", None, "is not a matrix"),
    ("observation.H", [[1.0, 0.0]], "beside H"),
    ("process.jacobian", "moves:wrong_slope", "by differences"),
    ("process.jacobian", "moves:nan_slope", "not finite"),
    ("process.jacobian", "moves:flat_slope", "gives shape (2, 2)"),
    ("process.q", "moves:noise", "beside q"),
    ("filter", "linear", "takes no function"),
    ("learn", {"parameters": ["variance"], "scope": "key"}, "no parameter 'variance'"),
    ("initial", {"diffuse": True}, "needs a distribution"),
    ("form", "roots", "not a form"),
    ("form", "information", "has no information form"),
    ("unscented", {"alpha": 0.0}, "above zero"),
    ("unscented", {"kappa": -2.0}, "no spread"),
    ("unscented", {"gamma": 1.0}, "not known"),
    ("states", ["a", "b", "c"], ""),
]


@pytest.mark.parametrize(("path", "value", "problem"), WRONG)
def test_an_error_names_the_field(folder, path, value, problem):
    definition = {**copy.deepcopy(GOOD), "folder": folder}
    *parents, last = path.split(".")
    place = definition
    for parent in parents:
        place = place[parent]
    place[last] = value
    with pytest.raises(kalman.ModelError) as error:
        kalman.build(definition)
    assert problem in error.value.problem and error.value.remedy
    assert error.value.field.split(".")[0].split("[")[0] in {path.split(".")[0], "process", "initial"}


@pytest.mark.parametrize(
    ("path", "problem"), [("moves:asymmetric", "symmetric"), ("moves:negative", "below zero")]
)
def test_noise_that_is_no_covariance(folder, path, problem):
    process = {"kind": "function", "f": "moves:move", "q": path}
    with pytest.raises(kalman.ModelError, match=problem):
        kalman.build({**GOOD, "folder": folder, "process": process})


@pytest.mark.parametrize("kind", ["linear", "extended", "cubature"])
def test_points_are_for_the_unscented_filter_alone(kind):
    definition = {**GOOD, "process": {"kind": "random_walk", "variance": 1.0}, "observation": {"R": [[1.0]]}}
    definition = {**definition, "states": ["a"], "initial": {"mean": [0.0], "covariance": [[1.0]]}}
    kalman.build({**definition, "filter": kind})
    with pytest.raises(kalman.ModelError, match="has no such points"):
        kalman.build({**definition, "filter": kind, "unscented": {"alpha": 1.0}})


@pytest.mark.parametrize("form", ["square_root", "information"])
def test_forms_of_the_linear_filter_that_need_more(form):
    linear = {
        "states": ["a"],
        "measurement": ["y"],
        "process": {"kind": "random_walk", "variance": 1.0},
        "observation": {"R": [[0.0]]},
        "initial": {"diffuse": True},
        "form": form,
    }
    with pytest.raises(kalman.ModelError, match="needs a covariance to start from"):
        kalman.build(linear)
    proper = {**linear, "initial": {"mean": [0.0], "covariance": [[1.0]]}}
    if form == "information":
        with pytest.raises(kalman.ModelError, match="singular"):
            kalman.build(proper)
    else:
        kalman.build(proper)


def test_a_module_beside_the_spec_leaves_no_trace(folder):
    path = list(sys.path)
    model = kalman.build({**GOOD, "folder": folder})
    assert sys.path == path and "moves" not in sys.modules
    assert model.step(model.initial(2), rows(2))[1].flag.tolist() == [0, 0]


def rows(keys):
    return kalman.Rows(np.ones(keys), np.zeros(keys, bool), np.ones((1, keys)), np.empty((0, keys)))


def test_two_folders_may_have_modules_of_one_name(folder, tmp_path):
    other = written(tmp_path / "other", "3.0", "other_beside")
    one, two = Named("moves:see", folder), Named("moves:see", other)
    assert one(np.ones((2, 1)))[0, 0] == 1.0 and two(np.ones((2, 1)))[0, 0] == 3.0
    assert find("moves:see_plain", other)(np.ones((2, 1)))[0] == 3.0


def test_a_module_in_a_folder_and_on_the_path(tmp_path, monkeypatch):
    place = written(tmp_path / "here", "2.0")
    assert find("moves:see", place)(np.ones((2, 1)))[0, 0] == 2.0
    monkeypatch.chdir(place)
    with pytest.raises(kalman.ModelError, match=r"there is no module moves \(looked on the Python path\)"):
        find("moves:see")  # a current folder that is not on the path
    monkeypatch.syspath_prepend(written(tmp_path / "path", "4.0"))
    try:
        assert find("moves:see", place)(np.ones((2, 1)))[0, 0] == 4.0, "the Python path comes first"
        monkeypatch.syspath_prepend(written(tmp_path / "before", "5.0"))
        assert find("moves:see", place)(np.ones((2, 1)))[0, 0] == 5.0, "not the one imported from elsewhere"
    finally:
        for name in ("moves", "beside_moves"):
            sys.modules.pop(name, None)


def test_a_change_of_the_file_is_seen(folder):
    assert find("moves:see", folder)(np.ones((2, 1)))[0, 0] == 1.0
    file = Path(folder) / "moves.py"
    file.write_text(MODULE.format(helper="beside_moves", factor="7.0"))
    assert find("moves:see", folder)(np.ones((2, 1)))[0, 0] == 7.0


def test_a_module_that_does_not_import_says_why(folder):
    (Path(folder) / "moves.py").write_text("import nothing_like_it")
    with pytest.raises(kalman.ModelError, match="needs nothing_like_it"):
        find("moves:see", folder)
    (Path(folder) / "moves.py").write_text("1 / 0")
    with pytest.raises(kalman.ModelError, match="ZeroDivisionError"):
        find("moves:see", folder)


def test_only_names_are_pickled(folder):
    model = kalman.build({**GOOD, "folder": folder})
    after, _ = model.step(model.initial(3), rows(3))
    pickled = pickle.dumps(model)
    assert b"moves:move" in pickled and b"see_plain" not in pickled and len(pickled) < 3000
    again = pickle.loads(pickled)
    np.testing.assert_array_equal(again.step(again.initial(3), rows(3))[0], after)
    assert again == model and hash(again) == hash(model)


def test_one_measurement_may_come_without_its_axis(folder):
    for kind in ("extended", "unscented", "cubature"):
        plain, row = (
            run_one(
                {**GOOD, "filter": kind, "folder": folder, "observation": {"h": h, "R": [[1.0]]}}, [1.0, 2.0]
            )
            for h in ("moves:see_plain", "moves:see")
        )
        np.testing.assert_array_equal(plain[1].mean, row[1].mean)


def test_jacobians_by_differences():
    """Against derivatives that are known, at scales from tiny to huge, and beside a large offset."""
    with np.errstate(all="ignore"):
        for scale in (1e-9, 1e-3, 1.0, 1e3):
            x = np.array([[0.3, -1.1, 2.0], [0.0, 1.0, -0.4]]) * scale

            def function(x, scale=scale):
                return np.array(
                    [np.sin(x[0] / scale) * x[1], np.exp(x[1] / scale), x[0] * x[1] / scale + 10.0 * scale]
                )

            J = compute_slope(
                lambda points, which: function(points), x, np.full((2, 3), 0.1 * scale), 3
            ).value
            a, b = x / scale
            expected = np.array([[np.cos(a) * b, np.sin(a)], [0 * a, np.exp(b) / scale], [b, a]])
            size = np.abs(expected).max(axis=(1, 2))[:, None, None]
            assert (np.abs(J - expected) <= 1e-9 * size).all()
        at_zero = compute_slope(lambda x, which: 3.0 * x, np.zeros((1, 1)), np.zeros((1, 1)), 1).value
        assert at_zero[0, 0, 0] == pytest.approx(3.0, rel=1e-14)


@pytest.mark.parametrize("kind", ["extended", "unscented"])
def test_numbers_beside_functions_may_come_from_columns(folder, kind):
    """Q, R and offset of each row: a row with these columns is as a model in which the numbers are written."""
    values = [(0.5, 2.0, -1.0), (3.0, 0.25, 4.0)]

    def filtered(q, r, offset, control, u):
        definition = {
            **GOOD,
            "folder": folder,
            "filter": kind,
            "control": control,
            "process": {"kind": "function", "f": "moves:move", "Q": [[q, 0], [0, 1]], "offset": [0, offset]},
            "observation": {"h": "moves:see", "R": [[r]], "offset": [offset]},
        }
        model = kalman.build(definition)
        rows = kalman.SortedRows(
            np.zeros(4, np.int64), np.arange(4) * 10**6, np.array([[1.0, 3.0, 2.0, 7.0]]), np.asarray(u)
        )
        return kalman.run(model, kalman.initial_states(model, 1), rows, 1e6)[1]

    for one in values:
        found = filtered("q", "r", "c", ["q", "r", "c"], np.repeat(np.array(one)[:, None], 4, axis=1))
        expected = filtered(*one, [], np.empty((0, 4)))
        assert not found.flag.any()
        np.testing.assert_array_equal(found.mean, expected.mean)
        np.testing.assert_array_equal(found.covariance, expected.covariance)
        np.testing.assert_array_equal(found.log_likelihood, expected.log_likelihood)


def test_an_observation_of_any_arguments_is_called_with_the_state_alone(folder):
    known, unknown = (
        run_one(
            {
                **GOOD,
                "filter": "extended",
                "folder": folder,
                "observation": {"h": "moves:bent", "jacobian": f"moves:{jacobian}", "R": [[1.0]]},
            },
            [1.0, 2.0, 0.5],
        )[1]
        for jacobian in ("bent_slope", "bent_slope_of_any")
    )
    np.testing.assert_array_equal(unknown.mean, known.mean)


def test_functions_are_checked_at_three_places_near_the_start():
    """Within a fifth of a deviation, or of the mean or 1 where a deviation is large, at other shares of each state."""
    mean, spread = (0.0, 5.0, -300.0, 2.0, 0.0), (1.0, 1e-3, 1e9, 0.0, 50.0)
    places, sigma = _choose_check_points(mean, spread)
    np.testing.assert_array_equal(places[:, 0], mean)
    np.testing.assert_array_equal(sigma, np.repeat(np.array(spread)[:, None], 3, axis=1))
    size = np.array([1.0, 1e-3, 300.0, 0.0, 1.0])
    shares = (places - places[:, :1])[size > 0.0, 1:] / size[size > 0.0, None]
    assert (np.abs(shares) < 0.2).all() and len(np.unique(shares.round(6))) == shares.size
    np.testing.assert_array_equal(places[3], 2.0)
