"""Search the maximum for many keys at once by scoring with quasi-Newton corrections; variances can become zero.

Each key has separate steps, and finished keys leave the search, so that a key's result does not depend on other keys. A
step is a scoring step, which takes the information as curvature, corrected by the gradient changes of the key's last
steps. If scoring leads a variance below zero, the search tries a variance of zero. The variance stays zero if the
log-likelihood is no smaller there and the slope of the log-likelihood by the variance is not positive (the conditions
of Karush, Kuhn and Tucker).

References: Harvey (1989), section 4.5, for scoring; Nocedal and Wright (2006), chapter 16, for active sets.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kalman.learning.keys.directions import compute_direction, dot
from kalman.types import Array

MOST = 60
"""Maximum number of steps of one search."""
TOLERANCE = 1e-8
"""Expected gain in log-likelihood per measured value at or below which a search stops."""
PAIRS = 3
"""Number of recent steps whose gradient changes correct the information."""
SHORTEST = 1e-5
"""A search gives up when it would take less than this share of a step."""
LOST = 1e-4
"""Expected gain in log-likelihood below which a search that cannot take a step is done: rounding hides the gain."""
FAR, HIGHEST = 4.0, 8.0
"""A longer step than FAR of a variance's logarithm becomes a step of the variance, at most HIGHEST in the logarithm."""
REFUSED = 4
"""Number of steps after zero was refused for a variance before zero is tried again."""


class KeyPoints(NamedTuple):
    """Evaluations of J keys: value (J,), gradient (p, J), information (p, p, J).

    Derivatives are by theta, or by the variance itself where the variance is zero.
    """

    value: Array
    gradient: Array
    information: Array


Objective = Callable[[Array, np.ndarray, np.ndarray], KeyPoints]
"""(theta (p, J), zero (p, J) bool, which (J,) ascending) -> the points of the keys `which`."""


class Box(NamedTuple):
    """Lower and upper bound (p, K) of theta.

    limit: (p,) the largest step. alone: (p,) mask of variances that can be zero.
    power: (p,) such that a variance is exp(power * theta).
    """

    low: Array
    high: Array
    limit: Array
    alone: np.ndarray
    power: np.ndarray

    def take(self, which: np.ndarray) -> "Box":
        """Return the box of some keys."""
        return self._replace(low=self.low[:, which], high=self.high[:, which])


class SearchEnds(NamedTuple):
    """The ends of the searches of K keys.

    theta (p, K), zero (p, K) mask of variances of zero, point at theta
    rise (K,) expected gain in log-likelihood of a further step; done (K,) whether the search ended at a maximum
    """

    theta: Array
    zero: np.ndarray
    point: KeyPoints
    rise: Array
    done: np.ndarray

    def take(self, which: np.ndarray) -> "SearchEnds":
        """Return the ends of some keys."""
        point = KeyPoints(*(a[..., which] for a in self.point))
        return SearchEnds(
            self.theta[:, which], self.zero[:, which], point, self.rise[which], self.done[which]
        )

    def put(self, which: np.ndarray, other: "SearchEnds", better: np.ndarray) -> None:
        """Replace the ends of the keys `which` by the ends `other` where the mask `better` is true, in place."""
        at = which[better]
        for own, new in zip(
            (self.theta, self.zero, *self.point, self.rise, self.done),
            (other.theta, other.zero, *other.point, other.rise, other.done),
            strict=True,
        ):
            own[..., at] = new[..., better]


class _Memory(NamedTuple):
    """The course of the search of each of K keys.

    steps, changes (PAIRS, p, K) last steps and gradient changes; used (PAIRS, K) mask of the pairs in use
    length (K,) share of a step to take; refused (p, K) number of steps before zero is tried
    """

    steps: Array
    changes: Array
    used: np.ndarray
    length: Array
    refused: np.ndarray

    def forget(self, which: np.ndarray) -> None:
        """Discard the pairs of some keys."""
        self.used[:, which] = False

    def remember(self, which: np.ndarray, step: Array, change: Array) -> None:
        """Add a pair of step and gradient change for the keys whose value curves downwards along the step."""
        bend = dot(step, change)
        size = np.sqrt(dot(step, step) * dot(change, change))
        good = bend > 1e-6 * size
        at = which[good]
        for array, new in ((self.steps, step), (self.changes, change)):
            array[:-1, :, at] = array[1:, :, at]
            array[-1][:, at] = new[:, good]
        self.used[:-1, at] = self.used[1:, at]
        self.used[-1, at] = True


def search(objective: Objective, start: Array, box: Box, rows: Array, patience: int = 0) -> SearchEnds:
    """Search from start (p, K), with at most `MOST` steps.

    rows: (K,) number of measured values, by which the tolerance is multiplied.
    patience: number of steps before zero is tried.
    """
    zero = np.zeros(start.shape, bool)
    p, keys = start.shape
    point = objective(start, zero, np.arange(keys))
    found = SearchEnds(start.copy(), zero, point, np.full(keys, np.inf), np.zeros(keys, bool))
    memory = _Memory(
        np.zeros((PAIRS, p, keys)),
        np.zeros((PAIRS, p, keys)),
        np.zeros((PAIRS, keys), bool),
        np.ones(keys),
        np.full((p, keys), patience, np.int64),
    )
    active = np.flatnonzero(np.isfinite(point.value) & np.isfinite(point.gradient).all(axis=0))
    for _ in range(MOST):
        active = _step_keys(objective, found, memory, active, box, rows)
        if not len(active):
            break
    return found


class _Try(NamedTuple):
    """The next trial of J keys: theta and mask of variances of zero, (p, J) each.

    jumps: (J,) mask of keys with a variance that moves to or from zero.
    to_zero: (p, J) mask of variances that move to zero.
    """

    theta: Array
    zero: np.ndarray
    jumps: np.ndarray
    to_zero: np.ndarray


def _step_keys(
    objective: Objective, found: SearchEnds, memory: _Memory, active: np.ndarray, box: Box, rows: Array
) -> np.ndarray:
    """Move the active keys by one step in place, and return the keys that continue."""
    now, inside = found.take(active), box.take(active)
    held = now.zero | (now.theta <= inside.low) & (now.point.gradient < 0.0)
    held |= (now.theta >= inside.high) & (now.point.gradient > 0.0)
    step, rise = _compute_direction(now.point, held, memory, active)
    enough = TOLERANCE * rows[active]
    found.rise[active] = rise
    still = rise <= enough
    released = _release(now, still, enough)
    moving = np.flatnonzero(~still | released.any(axis=0))
    found.done[np.delete(active, moving)] = True
    active = active[moving]
    if not len(active):
        return active
    now, inside = now.take(moving), inside.take(moving)
    tried = _choose_trial(now, inside, memory, active, step[:, moving], held[:, moving], released[:, moving])
    ended = _judge_trial(objective, found, memory, active, now, tried, TOLERANCE * rows[active])
    return active[~ended]


def _choose_trial(
    now: SearchEnds,
    box: Box,
    memory: _Memory,
    active: np.ndarray,
    step: Array,
    held: np.ndarray,
    released: np.ndarray,
) -> _Try:
    """Return the next trial.

    A scoring step that makes a variance negative is a step below -1 of the variance's logarithm. The variance with the
    lowest such step is tried as zero, unless zero was refused lately; the other variances fall by the largest step. A
    long step upwards is replaced by the scoring step of the variance itself, which is a short step of its logarithm.
    """
    leaving = released.any(axis=0)
    size = box.power[:, None] * step
    lone = (
        box.alone[:, None] & ~now.zero & ~leaving & (memory.length[active] == 1.0)
    )  # after a refused step, all numbers move together
    below = lone & (size < -1.0) & (now.point.gradient < 0.0)
    above = lone & (size > FAR) & (now.point.gradient > 0.0)
    alone = below | above
    if alone.any():
        some = np.flatnonzero(alone.any(axis=0))
        others = step.copy()
        others[:, some], _ = _compute_direction(
            now.take(some).point, (held | alone)[:, some], memory, active[some]
        )
        up = np.minimum(np.log1p(np.where(above, size, 0.0)), HIGHEST) / np.maximum(box.power, 1.0)[:, None]
        step = np.where(below, -box.limit[:, None], np.where(above, up, others))
    furthest = np.arange(len(step))[:, None] == np.where(below, size, 0.0).argmin(axis=0)
    to_zero = below & furthest & (memory.refused[:, active] == 0)
    memory.refused[:, active] = np.maximum(memory.refused[:, active] - 1, 0)
    room = box.limit[:, None] / np.maximum(np.abs(step), 1e-300)
    share = np.minimum(1.0, room.min(axis=0, where=~alone, initial=np.inf)) * memory.length[active]
    theta = np.clip(now.theta + np.where(leaving, 0.0, step * share), box.low, box.high)
    zero = now.zero & ~released | to_zero
    theta = np.where(zero, box.low, _open_released(now, box, theta, released))
    return _Try(theta, zero, to_zero.any(axis=0) | leaving, to_zero)


def _judge_trial(
    objective: Objective,
    found: SearchEnds,
    memory: _Memory,
    active: np.ndarray,
    now: SearchEnds,
    tried: _Try,
    enough: Array,
) -> np.ndarray:
    """Evaluate a trial and accept or refuse the trial, in place; return a mask (J,) of keys whose search ends."""
    new, rise = objective(tried.theta, tried.zero, active), found.rise[active]
    moved = np.where(tried.zero | now.zero, 0.0, tried.theta - now.theta)
    wanted = np.minimum(1e-4 * dot(moved, now.point.gradient), 0.1 * rise)
    gain = np.where(np.isfinite(new.value), new.value, -np.inf) - now.point.value
    better = gain >= np.where(tried.jumps, 0.0, wanted)
    better &= np.isfinite(new.gradient).all(axis=0)
    smooth = better & ~tried.jumps
    memory.forget(active[better & tried.jumps])
    change = np.where(tried.zero, 0.0, now.point.gradient - new.gradient)
    memory.remember(active[smooth], moved[:, smooth], change[:, smooth])
    at = active[better]
    found.theta[:, at], found.zero[:, at] = tried.theta[:, better], tried.zero[:, better]
    for own, fresh in zip(found.point, new, strict=True):
        own[..., at] = fresh[..., better]
    # after zero is refused, wait before the next try; after any other refusal, take a shorter step
    memory.refused[:, active] += np.where(tried.to_zero & ~better, REFUSED, 0)
    length = memory.length[active]
    shorter = ~better & ~tried.jumps
    length = np.where(better, np.minimum(1.0, 4.0 * length), np.where(shorter, 0.25 * length, length))
    stuck = (length < SHORTEST) | (~better & tried.jumps & ~tried.to_zero.any(axis=0))
    again = stuck & memory.used[:, active].any(axis=0)
    memory.forget(active[again])
    memory.length[active] = np.where(again, 1.0, length)
    ended = stuck & ~again
    found.done[active[ended]] = rise[ended] < LOST
    little = smooth & (gain <= enough) & (rise <= 10.0 * enough)
    found.done[active[little]] = True
    return ended | little


def _open_released(now: SearchEnds, box: Box, tried: Array, released: np.ndarray) -> Array:
    """Return theta in which each released variance has taken a scoring step from zero."""
    if not released.any():
        return tried
    diagonal = np.array([now.point.information[i, i] for i in range(len(tried))])
    with np.errstate(all="ignore"):
        variance = np.log(now.point.gradient / diagonal) / np.maximum(box.power, 1)[:, None]
    return np.where(
        released, np.clip(np.where(np.isfinite(variance), variance, box.low), box.low, box.high), tried
    )


def _release(now: SearchEnds, still: np.ndarray, enough: Array) -> np.ndarray:
    """Return a mask (p, J) of variances that leave zero: the most promising variance of each key that rests."""
    diagonal = np.array([now.point.information[i, i] for i in range(len(now.theta))])
    with np.errstate(all="ignore"):
        promise = np.where(now.zero & (now.point.gradient > 0.0), 0.5 * now.point.gradient**2 / diagonal, 0.0)
    best = promise.argmax(axis=0)
    first = np.arange(len(promise))[:, None] == best
    return first & still & (promise > enough)


def _compute_direction(
    point: KeyPoints, held: np.ndarray, memory: _Memory, active: np.ndarray
) -> tuple[Array, Array]:
    """Return the corrected scoring steps (p, J), zero for held numbers, and half the slope along each step (J,)."""
    pairs = memory.steps[..., active], memory.changes[..., active], memory.used[:, active]
    return compute_direction(point.gradient, point.information, held, pairs)
