"""The models of the benchmark of filters, as spec definitions and as the functions that the peers need."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray

Array = NDArray[Any]

TREND = Path(__file__).parents[1] / "models" / "trend.yaml"
STEP, DRAG, RANGE = 0.1, 0.02, 30.0
POINTS = {"alpha": 1.0, "beta": 0.0, "kappa": 1.0}
"""Sigma points whose weights are positive for four states, the same for both libraries."""


class Model(NamedTuple):
    """A spec definition and the matrices written in it, for libraries that take them."""

    definition: dict[str, Any]
    F: Array
    Q: Array
    H: Array
    R: Array
    mean: Array
    covariance: Array


def linear(dimensions: int) -> Model:
    """Return a position and velocity in some dimensions, the positions measured."""
    block = np.array([[1.0, STEP], [0.0, 1.0]])
    noise = np.array([[STEP**3 / 3, STEP**2 / 2], [STEP**2 / 2, STEP]])
    eye = np.eye(dimensions)
    n = 2 * dimensions
    matrices = (
        np.kron(eye, block),
        np.kron(eye, noise),
        np.kron(eye, [[1.0, 0.0]]),
        0.5 * eye,
        np.zeros(n),
        np.diag([10.0, 1.0] * dimensions),
    )
    return Model(_definition("linear", *matrices), *matrices)


def build_trend() -> Model:
    """Build the model of `benchmarks/models/trend.yaml`, with the matrices for rows one unit of time apart."""
    definition = yaml.safe_load(TREND.read_text())
    process, initial = definition["process"], definition["initial"]
    level, slope = process["level_variance"], process["slope_variance"]
    observation = definition["observation"]
    return Model(
        definition,
        np.array([[1.0, 1.0], [0.0, 1.0]]),
        np.array([[level + slope / 3, slope / 2], [slope / 2, slope]]),
        np.array(observation["H"]),
        np.array(observation["R"]),
        np.array(initial["mean"]),
        np.array(initial["covariance"]),
    )


def tracked(kind: str) -> Model:
    """Return a model of a body in the plane, slowed by the square of its speed; distance and height are measured. kind:
    `extended` or `unscented`. F and H are empty: `move` and `seen` replace them.
    """
    model = linear(2)
    mean, covariance = np.array([0.0, 3.0, 0.0, 1.0]), np.diag([1.0, 0.25] * 2)
    definition = _definition(kind, model.F, model.Q, model.H, np.diag([0.5, 0.1]), mean, covariance)
    definition["process"] = {
        "kind": "function",
        "f": f"{__name__}:move",
        "jacobian": f"{__name__}:move_slope",
        "Q": model.Q.tolist(),
    }
    definition["observation"] = {
        "h": f"{__name__}:seen",
        "jacobian": f"{__name__}:seen_slope",
        "R": [[0.5, 0.0], [0.0, 0.1]],
    }
    if kind == "unscented":
        definition["unscented"] = POINTS
    none = np.empty((0, 0))
    return Model(definition, none, model.Q, none, np.diag([0.5, 0.1]), mean, covariance)


def switching() -> tuple[Model, list[Array], Array, Array]:
    """Return a body that is quiet or manoeuvres: the model, each mode's Q, transition, probabilities at the start."""
    model = linear(1)
    noises = [0.01 * model.Q, 5.0 * model.Q]
    transition, start = np.array([[0.97, 0.03], [0.1, 0.9]]), np.array([0.9, 0.1])
    definition = model.definition | {"filter": "imm", "transition": transition.tolist()}
    definition["modes"] = [
        {"process": {"kind": "explicit", "F": model.F.tolist(), "Q": Q.tolist()}} for Q in noises
    ]
    definition["initial"] = definition["initial"] | {"mode_probabilities": start.tolist()}
    del definition["process"]
    return model._replace(definition=definition), noises, transition, start


def _definition(
    kind: str, F: Array, Q: Array, H: Array, R: Array, mean: Array, covariance: Array
) -> dict[str, Any]:
    return {
        "filter": kind,
        "states": [f"x{i}" for i in range(len(F))],
        "measurement": [f"y{i}" for i in range(len(H))],
        "process": {"kind": "explicit", "F": F.tolist(), "Q": Q.tolist()},
        "observation": {"H": H.tolist(), "R": R.tolist()},
        "initial": {"mean": mean.tolist(), "covariance": covariance.tolist()},
    }


def move(x: Array, dt: Any = None, u: Any = None) -> Array:
    """Return the state (4, K) or (4,) a step later."""
    speed = np.sqrt(x[1] * x[1] + x[3] * x[3])
    kept = 1.0 - STEP * DRAG * speed
    return np.array([x[0] + STEP * x[1], kept * x[1], x[2] + STEP * x[3], kept * x[3]])


def move_slope(x: Array, dt: Any = None, u: Any = None) -> Array:
    """Return the derivative of `move` (4, 4, K) or (4, 4)."""
    speed = np.sqrt(x[1] * x[1] + x[3] * x[3])
    kept, lost = 1.0 - STEP * DRAG * speed, STEP * DRAG / speed
    J = np.zeros((4, *x.shape))
    J[0, 0] = J[2, 2] = 1.0
    J[0, 1] = J[2, 3] = STEP
    J[1, 1], J[3, 3] = kept - lost * x[1] * x[1], kept - lost * x[3] * x[3]
    J[1, 3] = J[3, 1] = -lost * x[1] * x[3]
    return J


def seen(x: Array) -> Array:
    """Return the distance from a station below the start, and the height (2, K) or (2,)."""
    return np.array([np.sqrt(x[0] * x[0] + (x[2] + RANGE) * (x[2] + RANGE)), x[2]])


def seen_slope(x: Array) -> Array:
    """Return the derivative of `seen` (2, 4, K) or (2, 4)."""
    distance = np.sqrt(x[0] * x[0] + (x[2] + RANGE) * (x[2] + RANGE))
    J = np.zeros((2, *x.shape))
    J[0, 0], J[0, 2], J[1, 2] = x[0] / distance, (x[2] + RANGE) / distance, 1.0
    return J
