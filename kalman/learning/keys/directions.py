"""Directions of the searches of many keys: scoring steps with quasi-Newton corrections.

Formulas are written on entries and recorded once (`kalman.linalg.program`) where a key has few free numbers.

References: Goodnight (1979), A tutorial on the SWEEP operator; Nocedal and Wright (2006), section 7.2.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from kalman.linalg.elementwise import Elementwise
from kalman.linalg.program import Recorded, Tape
from kalman.types import Array

RIDGE = 1e-7
"""Relative increase of the information's diagonal, so that the information can be inverted."""
SWEPT = 8
"""Largest size p of information matrices that are inverted for all keys together."""

Square = list[list[Any]]


def compute_direction(
    gradient: Array, information: Array, held: np.ndarray, pairs: tuple[Array, Array, np.ndarray]
) -> tuple[Array, Array]:
    """Return the corrected scoring steps (p, J), zero for held numbers, and half the slope along each step (J,).

    Args:
        gradient: (p, J).
        information: (p, p, J).
        held: (p, J) mask of numbers that do not move.
        pairs: last steps and gradient changes (pairs, p, J), and a mask (pairs, J) of those in use.
    """
    p, keys = gradient.shape
    steps, changes, used = pairs
    if p <= SWEPT:
        count = len(used)
        rows = (a.reshape(-1, keys) for a in (information, gradient, held, steps, changes, used))
        found = _record_direction(p, count)([one for several in rows for one in several])
        return found[:p], found[p]
    H = [list(row) for row in invert_information(information, held)]
    s, y = ([list(one) for one in several] for several in (steps, changes))
    step, rise = _find_step(H, list(gradient), list(held), s, y, list(used))
    return np.array(step), rise


@lru_cache(maxsize=16)
def _record_direction(p: int, count: int) -> Elementwise:
    """Return the function of p free numbers with so many pairs, as `compute_direction` calls it."""
    tape = Tape()
    information = [tape.symbols(p) for _ in range(p)]
    gradient, held = tape.symbols(p), tape.symbols(p, boolean=True)
    steps, changes = ([tape.symbols(p) for _ in range(count)] for _ in range(2))
    used = tape.symbols(count, boolean=True)
    H = _invert_entries(information, held)
    step, rise = _find_step(H, gradient, held, steps, changes, used)
    rows = (*information, gradient, held, *steps, *changes, used)
    return Elementwise(Recorded(tape.operations, [a for row in rows for a in row], [*step, rise]))


def _find_step(
    H: Square,
    gradient: list[Any],
    held: list[Any],
    steps: list[list[Any]],
    changes: list[list[Any]],
    used: list[Any],
) -> tuple[list[Any], Any]:
    """Return the step and half the slope along it; H: inverse information."""
    g = [np.where(at, 0.0, a) for at, a in zip(held, gradient, strict=True)]
    for s, y, use in zip(steps, changes, used, strict=True):
        s, y = ([np.where(at, 0.0, a) for at, a in zip(held, one, strict=True)] for one in (s, y))
        corrected = _correct_inverse(H, s, y)
        H = [
            [np.where(use, new, old) for new, old in zip(*rows, strict=True)]
            for rows in zip(corrected, H, strict=True)
        ]
    step = [np.where(at, 0.0, dot(row, g)) for at, row in zip(held, H, strict=True)]
    return step, 0.5 * dot(g, step)


def invert_information(information: Array, held: np.ndarray) -> Array:
    """Return the inverses of information matrices (p, p, J) over the numbers where the mask `held` (p, J) is false."""
    if len(held) <= SWEPT:
        return np.array(_invert_entries([list(row) for row in information], list(held)))
    unit, scale = _scale_information([list(row) for row in information], list(held))
    found = np.moveaxis(np.linalg.inv(np.moveaxis(np.array(unit), -1, 0)), 0, -1)
    return found / (np.array(scale)[:, None] * np.array(scale)[None, :])


def _invert_entries(information: Square, held: list[Any]) -> Square:
    unit, scale = _scale_information(information, held)
    found, p = _sweep_matrix(unit), len(held)
    return [[found[i][j] / (scale[i] * scale[j]) for j in range(p)] for i in range(p)]


def _scale_information(information: Square, held: list[Any]) -> tuple[Square, list[Any]]:
    """Return information with a unit diagonal, zero beside the diagonal for held numbers, and the scale of each."""
    p = len(held)
    J = [[np.where(held[i] | held[j], 0.0, information[i][j]) for j in range(p)] for i in range(p)]
    known = [J[i][i] > 0.0 for i in range(p)]
    scale = [np.sqrt(np.where(known[i], J[i][i], 1.0)) for i in range(p)]
    unit = [[J[i][j] / (scale[i] * scale[j]) for j in range(p)] for i in range(p)]
    for i in range(p):
        unit[i][i] = np.where(known[i], 1.0 + RIDGE, 1.0)
    sound: Any = None
    for one in (a for row in unit for a in row):
        sound = np.isfinite(one) if sound is None else sound & np.isfinite(one)
    return [[np.where(sound, unit[i][j], float(i == j)) for j in range(p)] for i in range(p)], scale


def _sweep_matrix(matrix: Square) -> Square:
    """Return the inverse of a symmetric matrix with positive pivots by sweeping row after row."""
    p = len(matrix)
    a = [list(row) for row in matrix]
    for k in range(p):
        row, pivot = list(a[k]), a[k][k]
        share = [one / pivot for one in row]
        for i in range(p):
            for j in range(i + 1):
                if i != k and j != k:
                    a[i][j] = a[j][i] = a[i][j] - share[i] * row[j]
        for j in range(p):
            a[k][j] = a[j][k] = share[j]
        a[k][k] = -1.0 / pivot
    return [[-one for one in row] for row in a]


def _correct_inverse(H: Square, s: list[Any], y: list[Any]) -> Square:
    """Return H after the BFGS correction by a step s and a gradient change y.

    H stays the same for keys whose step has no positive curvature s'y.
    """
    sy = dot(s, y)
    use = sy > 1e-300
    sy = np.where(use, sy, 1.0)
    Hy = [dot(row, y) for row in H]
    weight = np.where(use, (1.0 + dot(y, Hy) / sy) / sy, 0.0)
    some = np.where(use, 1.0, 0.0)
    s, Hy = [a * some for a in s], [a / sy for a in Hy]
    result = [list(row) for row in H]
    for i in range(len(s)):
        for j in range(i + 1):
            result[i][j] = result[j][i] = H[i][j] + (weight * s[i] * s[j] - (s[i] * Hy[j] + Hy[i] * s[j]))
    return result


def dot(a: Sequence[Any] | Array, b: Sequence[Any] | Array) -> Any:
    """Return the inner products (J,) of the columns of two arrays (p, J), with terms added in a fixed order."""
    total = a[0] * b[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        total = total + x * y
    return total
