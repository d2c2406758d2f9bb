"""The structures that are tried: each for one measurement, put together for several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jobs.choosing.rhythm import Rhythm
from jobs.choosing.seasons import Season
from jobs.core.times import UNIT_US

LEVEL = "level"
ROBUST = " robust"
"""What the name of a structure with robust updates ends with."""
STUDENT_T: dict[str, Any] = {"student_t": {"degrees": 4.0}}
HUBER: dict[str, Any] = {"huber": {"threshold": 1.345}}
TELLS_APART = 1e5
"""Condition of the first rows from which on a diffuse start loses more than half of a number's digits."""
WIDE = 10.0
"""Spreads of the measurements that a wave's start may be off by, as a standard deviation."""


class Part(NamedTuple):
    """A process structure: name within the model, definition, its states, H's row for them, what is learned of it.

    powers: how each learned number grows with the measurement's unit: 2 for a variance, 0 for a rate
    is_proper: its states start near zero with a wide variance, not diffuse
    """

    name: str
    process: dict[str, Any]
    states: tuple[str, ...]
    observes: tuple[float, ...]
    learned: tuple[str, ...]
    powers: tuple[int, ...]
    is_proper: bool = False


class Structure(NamedTuple):
    """A structure for one measurement: its name, what it says, its parts."""

    name: str
    meaning: str
    parts: tuple[Part, ...]


def structures(rhythm: Rhythm, season: Season | None) -> list[Structure]:
    """Return the structures to try, the simplest first, for measurements of standard size one.

    Variances begin where a step of a series of that size is half noise, half movement.
    """
    step = rhythm.step_in_units
    level = Part(
        "level", {"kind": "random_walk", "variance": 0.5 / step}, ("level",), (1.0,), ("variance",), (2,)
    )
    variances = {"level_variance": 0.4 / step, "slope_variance": 1e-3 / step**3}
    trend = Part(
        "trend",
        {"kind": "local_linear_trend", **variances},
        ("level", "slope"),
        (1.0, 0.0),
        ("level_variance", "slope_variance"),
        (2, 2),
    )
    damped = Part(
        "trend",
        {"kind": "damped_trend", **variances, "damping": 0.1 / step},
        ("level", "slope"),
        (1.0, 0.0),
        ("level_variance", "slope_variance", "damping"),
        (2, 2, 0),
    )
    found = [
        Structure(LEVEL, "a level that wanders", (level,)),
        Structure("trend", "a level with a slope, both wander", (trend,)),
        Structure("damped", "a level with a slope that fades", (damped,)),
    ]
    if season is None:
        return found
    return [
        *found,
        Structure("season", f"a level and {season.name}'s season", (level, _waves(season, rhythm, 1))),
        Structure("trend season", f"a trend and {season.name}'s season", (trend, _waves(season, rhythm, 2))),
    ]


def _waves(season: Season, rhythm: Rhythm, beside: int) -> Part:
    """Return the waves of a season beside a level (1 state) or a trend (2)."""
    process = {
        "kind": "seasonal_trigonometric",
        "period": float(f"{season.period / UNIT_US[rhythm.unit]:.8g}"),
        "harmonics": season.harmonics,
        "variance": 1e-4 / rhythm.step_in_units,
    }
    letters = "abcdefgh"[: season.harmonics]
    states = tuple(f"{part}_{letter}" for letter in letters for part in ("wave", "turn"))
    is_proper = _condition(season, rhythm, beside) > TELLS_APART
    return Part("season", process, states, (1.0, 0.0) * season.harmonics, ("variance",), (2,), is_proper)


def _condition(season: Season, rhythm: Rhythm, beside: int) -> float:
    """Return the condition number of the states as seen by as many first rows as there are states.

    A diffuse start solves for the states from these rows alone. The first days of a year hardly tell its waves from a
    level: the solution is then so wide that a covariance cannot hold both it and what later rows know.
    """
    t = np.arange(beside + 2 * season.harmonics)
    angle = 2.0 * np.pi * rhythm.step / season.period * t
    waves = [wave(j * angle) for j in range(1, season.harmonics + 1) for wave in (np.cos, np.sin)]
    return float(np.linalg.cond(np.array([t**k for k in range(beside)] + waves, dtype=float)))


class Composed(NamedTuple):
    """A model of several measurements: the fields of a definition.

    powers: for each learned number of the process, which measurement's unit it has, and to which power
    initial: the start of a key
    """

    states: list[str]
    process: dict[str, Any]
    H: list[list[float]]
    R: list[list[float]]
    learned: list[str]
    powers: list[tuple[int, int]]
    initial: dict[str, Any]


def compose(
    measurements: Sequence[str], chosen: Sequence[Structure], spreads: Sequence[float] = ()
) -> Composed:
    """Put a structure for each measurement side by side.

    Args:
        measurements: their names.
        chosen: a structure for each.
        spreads: how far the values of each are from their median; by default 1.
    """
    alone = len(measurements) == 1
    states: list[str] = []
    parts: list[dict[str, Any]] = []
    learned: list[str] = []
    powers: list[tuple[int, int]] = []
    wide: list[float | None] = []
    rows: list[list[float]] = [[] for _ in measurements]
    whole = alone and len(chosen[0].parts) == 1
    for m, (measurement, structure) in enumerate(zip(measurements, chosen, strict=True)):
        for part in structure.parts:
            prefix = "" if alone else f"{measurement}_"
            name = f"{prefix}{part.name}"
            states += [f"{prefix}{state}" for state in part.states]
            spread = spreads[m] if len(spreads) else 1.0
            wide += [(WIDE * spread) ** 2 if part.is_proper else None] * len(part.states)
            parts.append({"name": name, **part.process})
            learned += [one if whole else f"{name}.{one}" for one in part.learned]
            powers += [(m, power) for power in part.powers]
            for other, row in enumerate(rows):
                row += part.observes if other == m else (0.0,) * len(part.observes)
    process = dict(chosen[0].parts[0].process) if whole else {"kind": "sum", "parts": parts}
    R = [[0.5 if i == j else 0.0 for j in range(len(rows))] for i in range(len(rows))]
    return Composed(states, process, rows, R, [*learned, "R"], powers, _initial(wide))


def _initial(wide: Sequence[float | None]) -> dict[str, Any]:
    """Return the start for each state's variance; None: diffuse."""
    if all(one is None for one in wide):
        return {"diffuse": True}
    variances = [0.0 if one is None else float(f"{one:.3g}") for one in wide]
    diffuse = [one is None for one in wide]
    return {"diffuse": diffuse, "mean": [0.0] * len(wide), "covariance": np.diag(variances).tolist()}


def definition(
    composed: Composed, measurements: Sequence[str], robust: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the definition that `kalman.build` takes, each key with parameters of its own."""
    observation: dict[str, Any] = {"R": composed.R}
    if len(measurements) > 1:  # of one measurement the structures know H
        observation["H"] = composed.H
    return {
        "filter": "linear",
        "states": list(composed.states),
        "measurement": list(measurements),
        "process": composed.process,
        "observation": observation,
        "initial": composed.initial,
        "learn": {"parameters": list(composed.learned), "scope": "key"},
        **({} if robust is None else {"robust": robust}),
    }
