"""Log-likelihood and its exact gradient for every key: the filter forwards, its adjoint backwards."""

from typing import NamedTuple

import numpy as np

from kalman import flags
from kalman.adjoint import Adjoint, along, before_prediction, before_update, transition_slope
from kalman.entries import Entry, plus
from kalman.linear import BLOCK, LinearFilter
from kalman.run import SortedRows, rounds
from kalman.types import Array, Rows
from kalman.update import presence, update


class Score(NamedTuple):
    """For each of K keys: log-likelihood (K,), its derivative by the packed entries of the parameters (d, K),
    and the number of rows it is of (K,). Flagged rows are left out of all three.
    """

    log_likelihood: Array
    gradient: Array
    used: np.ndarray


def score(
    model: LinearFilter,
    names: tuple[str, ...],
    rows: SortedRows,
    keys: int,
    unit: float,
    own: Array | None = None,
) -> Score:
    """Return the score of keys that start from the model's initial distribution.

    names: the parameters to differentiate by, in the model's order. own: each key's own parameters (p, K),
    when the model has such.
    """
    plan = rounds(rows.key)
    time, y, u = rows.time[plan.order], rows.y[:, plan.order], rows.u[:, plan.order]
    here = len(plan.keys)
    values = model.initial(here)
    if own is not None:
        values = model.with_parameters(values, own[:, plan.keys])
    event_time, count, total = np.zeros(here, np.int64), np.zeros(here, np.int64), np.zeros(here)
    history: list[tuple[slice, Array, Rows, np.ndarray]] = []
    for part in plan.slices():
        prefix = slice(0, part.stop - part.start)
        first = count[prefix] == 0
        taken = Rows(
            np.where(first, 0, time[part] - event_time[prefix]) / unit, first, y[:, part], u[:, part]
        )
        before = values[:, prefix].copy()
        after, said = model.step(before, taken)
        good = said.flag == flags.WELL
        history.append((prefix, before, taken, good))
        values[:, prefix] = after
        event_time[prefix] = np.where(good, time[part], event_time[prefix])
        count[prefix] += good
        total[prefix] += np.where(good, said.log_likelihood, 0.0)
    slots = _slots(model, names)
    gradient = np.zeros((sum(slots.values()), here))
    # the adjoint: by mean, packed covariance and packed diffuse part
    n, p = model.places["mean"].stop, model.places["covariance"].stop
    depth = p + (p - n if model.diffuse else 0)
    adjoint = np.zeros((depth, here))
    with np.errstate(all="ignore"):  # only flagged rows can go wrong, and they are left out
        for prefix, before, taken, good in reversed(history):
            for begin in range(0, prefix.stop, BLOCK):
                block = slice(begin, min(begin + BLOCK, prefix.stop))
                part = Rows(taken.dt[block], taken.first[block], taken.y[:, block], taken.u[:, block])
                slopes = _backwards(model, slots, before[:, block], part, adjoint[:, block], good[block])
                for row, slope in zip(gradient, slopes, strict=True):
                    row[block] += slope
    result = Score(np.zeros(keys), np.zeros((len(gradient), keys)), np.zeros(keys, np.int64))
    result.log_likelihood[plan.keys] = total
    result.gradient[:, plan.keys] = gradient
    result.used[plan.keys] = count
    return result


def _slots(model: LinearFilter, names: tuple[str, ...]) -> dict[str, int]:
    return {p.name: len(p.value) for p in model.parameters if p.name in names}


def _backwards(
    model: LinearFilter, slots: dict[str, int], before: Array, rows: Rows, adjoint: Array, good: np.ndarray
) -> list[Entry]:
    """Move the adjoint, in place, from after the rows to before them; return the derivatives by the parameters."""
    n, p = model.places["mean"].stop, model.places["covariance"].stop
    parts = model.split(list(before), model.is_diffuse(before))
    m, P, A, values = parts
    moved = ~rows.first
    prior = model.predicted(parts, rows.dt, list(rows.u), rows.first if moved.any() else True)
    updated = update(*prior[:3], model.H, values["R"], list(rows.y), presence(rows.y))
    later = Adjoint(list(adjoint[:n]), list(adjoint[n:p]), list(adjoint[p:]) if A is not None else None)
    here, by_R = before_update(later, updated, values["R"])
    start = here
    slopes: dict[str, list[Entry]] = {"R": by_R}
    if moved.any():
        everyone = bool(moved.all())
        transition = model.process.transition(rows.dt, list(rows.u), values)
        start = before_prediction(here, transition, None if everyone else moved)
        slope = transition_slope(here, m, P, A, transition.F)
        for name in slots:
            if name != "R":
                steps = [along(slope, tangent) for tangent in model.process.tangents(name, rows.dt, values)]
                slopes[name] = steps if everyone else [np.where(moved, a, 0.0) for a in steps]
    everything = [*start.a, *start.B, *(start.C or ())]
    for row, entry in zip(adjoint, everything, strict=False):
        row[:] = entry if good.all() else np.where(good, entry, row)
    flat = [slope for name, width in slots.items() for slope in slopes.get(name, [0.0] * width)]
    return [plus(0.0, slope) if good.all() else np.where(good, slope, 0.0) for slope in flat]
