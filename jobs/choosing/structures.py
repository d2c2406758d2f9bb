"""The structures that `init` tries. Each one models one measurement; several are composed into one model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jobs.choosing.rhythm import Rhythm, Season
from jobs.core.times import UNIT_US

LEVEL = "level"
ROBUST = " robust"
"""The suffix of the name of a structure with robust updates."""
STUDENT_T: dict[str, Any] = {"student_t": {"degrees": 4.0}}
HUBER: dict[str, Any] = {"huber": {"threshold": 1.345}}


class ProcessPart(NamedTuple):
    """A part of a process: name within the model, definition, states, row of H for these states, learned numbers.

    powers: for each learned number, the power of the measurement's unit in it: 2 for a variance, 0 for a rate.
    """

    name: str
    process: dict[str, Any]
    states: tuple[str, ...]
    observes: tuple[float, ...]
    learned: tuple[str, ...]
    powers: tuple[int, ...]


class CandidateStructure(NamedTuple):
    """A structure for one measurement: its name, its meaning, its parts."""

    name: str
    meaning: str
    parts: tuple[ProcessPart, ...]


def list_structures(rhythm: Rhythm, season: Season | None) -> list[CandidateStructure]:
    """Return the structures to try, the simplest first, for measurements of standard size 1.

    With the start values of the variances, about half of a step is noise and half is movement.
    """
    step = rhythm.step_in_units
    level = ProcessPart(
        "level", {"kind": "random_walk", "variance": 0.5 / step}, ("level",), (1.0,), ("variance",), (2,)
    )
    variances = {"level_variance": 0.4 / step, "slope_variance": 1e-3 / step**3}
    trend = ProcessPart(
        "trend",
        {"kind": "local_linear_trend", **variances},
        ("level", "slope"),
        (1.0, 0.0),
        ("level_variance", "slope_variance"),
        (2, 2),
    )
    damped = ProcessPart(
        "trend",
        {"kind": "damped_trend", **variances, "damping": 0.1 / step},
        ("level", "slope"),
        (1.0, 0.0),
        ("level_variance", "slope_variance", "damping"),
        (2, 2, 0),
    )
    found = [
        CandidateStructure(LEVEL, "a level that wanders", (level,)),
        CandidateStructure("trend", "a level with a slope, both wander", (trend,)),
        CandidateStructure("damped", "a level with a slope that fades", (damped,)),
    ]
    if season is None:
        return found
    return [
        *found,
        CandidateStructure(
            "season", f"a level and {season.name}'s season", (level, _build_season(season, rhythm))
        ),
        CandidateStructure(
            "trend season", f"a trend and {season.name}'s season", (trend, _build_season(season, rhythm))
        ),
    ]


def _build_season(season: Season, rhythm: Rhythm) -> ProcessPart:
    """Return the part of a process with the waves of a season."""
    process = {
        "kind": "seasonal_trigonometric",
        "period": float(f"{season.period / UNIT_US[rhythm.unit]:.8g}"),
        "harmonics": season.harmonics,
        "variance": 1e-4 / rhythm.step_in_units,
    }
    letters = "abcdefgh"[: season.harmonics]
    states = tuple(f"{part}_{letter}" for letter in letters for part in ("wave", "turn"))
    return ProcessPart("season", process, states, (1.0, 0.0) * season.harmonics, ("variance",), (2,))


class Composed(NamedTuple):
    """A model of several measurements, as the fields of a definition.

    powers: for each learned number of the process, the measurement whose unit the number has, and the unit's power.
    """

    states: list[str]
    process: dict[str, Any]
    H: list[list[float]]
    R: list[list[float]]
    learned: list[str]
    powers: list[tuple[int, int]]


def compose(measurements: Sequence[str], chosen: Sequence[CandidateStructure]) -> Composed:
    """Compose one structure per measurement into one model."""
    alone = len(measurements) == 1
    states: list[str] = []
    parts: list[dict[str, Any]] = []
    learned: list[str] = []
    powers: list[tuple[int, int]] = []
    rows: list[list[float]] = [[] for _ in measurements]
    whole = alone and len(chosen[0].parts) == 1
    for m, (measurement, structure) in enumerate(zip(measurements, chosen, strict=True)):
        for part in structure.parts:
            prefix = "" if alone else f"{measurement}_"
            name = f"{prefix}{part.name}"
            states += [f"{prefix}{state}" for state in part.states]
            parts.append({"name": name, **part.process})
            learned += [one if whole else f"{name}.{one}" for one in part.learned]
            powers += [(m, power) for power in part.powers]
            for other, row in enumerate(rows):
                row += part.observes if other == m else (0.0,) * len(part.observes)
    process = dict(chosen[0].parts[0].process) if whole else {"kind": "sum", "parts": parts}
    R = [[0.5 if i == j else 0.0 for j in range(len(rows))] for i in range(len(rows))]
    return Composed(states, process, rows, R, [*learned, "R"], powers)


def build_definition(
    composed: Composed, measurements: Sequence[str], robust: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the definition for `kalman.build`, with parameters that are learned per key."""
    observation: dict[str, Any] = {"R": composed.R}
    if len(measurements) > 1:  # for one measurement H follows from the process
        observation["H"] = composed.H
    return {
        "filter": "linear",
        "states": list(composed.states),
        "measurement": list(measurements),
        "process": composed.process,
        "observation": observation,
        "initial": {"diffuse": True},
        "learn": {"parameters": list(composed.learned), "scope": "key"},
        **({} if robust is None else {"robust": robust}),
    }
