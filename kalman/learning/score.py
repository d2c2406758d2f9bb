"""Log-likelihood and its exact gradient for every key: the filter forwards, its adjoint backwards."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from kalman import flags
from kalman.filters.linear import LinearFilter, record_step
from kalman.filters.state_layout import BLOCK
from kalman.filters.update import mask_present
from kalman.learning.adjoint import (
    Adjoint,
    differentiate_along,
    differentiate_transition,
    pull_back_prediction,
    pull_back_update,
)
from kalman.linalg.entries import Entry, times
from kalman.linalg.packing import packed_size
from kalman.linalg.program import Program, Tape
from kalman.models.columns import resolve
from kalman.models.learned_entries import parse_entry_name
from kalman.run import SortedRows, build_rounds
from kalman.types import Array, Rows


class LikelihoodScore(NamedTuple):
    """Log-likelihood (K,), its derivatives, and number of rows used (K,) of each of K keys, without flagged rows.

    The gradient (d, K) is by the packed entries of the parameters, then by the entries of F and H. Two more fields are
    the derivatives by the initial mean (n, K) and by the packed initial covariance.
    """

    log_likelihood: Array
    gradient: Array
    used: np.ndarray
    mean: Array
    covariance: Array


def score(
    model: LinearFilter,
    names: tuple[str, ...],
    rows: SortedRows,
    keys: int,
    unit: float,
    begun: Array | None = None,
    entries: tuple[tuple[str, int, int], ...] = (),
) -> LikelihoodScore:
    """Return the score of keys.

    names: the parameters to differentiate by, in the model's order. begun: the initial states (size, K),
    by default the model's. entries: "F" or "H", row and column of entries to differentiate by.
    """
    plan = build_rounds(rows.key)
    time, y, u = rows.time[plan.order], rows.y[:, plan.order], rows.u[:, plan.order]
    here = len(plan.keys)
    values = model.initial(here) if begun is None else begun[:, plan.keys]
    event_time, count, total = np.zeros(here, np.int64), np.zeros(here, np.int64), np.zeros(here)
    history: list[tuple[slice, Array, Rows, np.ndarray]] = []
    for part in plan.slices():
        prefix = slice(0, part.stop - part.start)
        first = count[prefix] == 0
        taken = Rows(
            np.where(first, 0, time[part] - event_time[prefix]) / unit, first, y[:, part], u[:, part]
        )
        before = values[:, prefix].copy()
        after, step = model.step(before, taken)
        good = step.flag == flags.WELL
        history.append((prefix, before, taken, good))
        values[:, prefix] = after
        event_time[prefix] = np.where(good, time[part], event_time[prefix])
        count[prefix] += good
        total[prefix] += np.where(good, step.log_likelihood, 0.0)
    gradient = np.zeros((_count_entries(model, names) + len(entries), here))
    # the adjoint: by mean, packed covariance and packed diffuse part
    n, p = model.places["mean"].stop, model.places["covariance"].stop
    depth = p + (p - n if model.diffuse else 0)
    adjoint = np.zeros((depth, here))
    with np.errstate(all="ignore"):  # only flagged rows can fail, and flagged rows are left out
        for prefix, before, taken, good in reversed(history):
            for begin in range(0, prefix.stop, BLOCK):
                block = slice(begin, min(begin + BLOCK, prefix.stop))
                part = Rows(taken.dt[block], taken.first[block], taken.y[:, block], taken.u[:, block])
                views = before[:, block], part, good[block], adjoint[:, block], gradient[:, block]
                _step_back(model, names, entries, *views)
    result = LikelihoodScore(
        np.zeros(keys),
        np.zeros((len(gradient), keys)),
        np.zeros(keys, np.int64),
        np.zeros((n, keys)),
        np.zeros((p - n, keys)),
    )
    result.log_likelihood[plan.keys] = total
    result.gradient[:, plan.keys] = gradient
    result.used[plan.keys] = count
    result.mean[:, plan.keys] = adjoint[:n]
    twice = [1.0 if i == j else 2.0 for i in range(n) for j in range(i + 1)]
    result.covariance[:, plan.keys] = adjoint[n:p] * np.array(twice)[:, None]
    return result


def _count_entries(model: LinearFilter, names: tuple[str, ...]) -> int:
    return sum(len(p.value) for p in model.parameters if p.name in names)


def _step_back(
    model: LinearFilter,
    names: tuple[str, ...],
    entries: tuple[tuple[str, int, int], ...],
    before: Array,
    rows: Rows,
    good: np.ndarray,
    adjoint: Array,
    gradient: Array,
) -> None:
    """Move the adjoint, in place, from after the rows to before them, and add to the gradient."""
    presents = mask_present(rows.y)
    first = rows.mask_first_rows()
    program = _build_program(
        model,
        names,
        entries,
        presents[0] is not None,
        first if isinstance(first, bool) else None,
        model.is_diffuse(before),
    )
    masks = [a for a in (first, *presents) if isinstance(a, np.ndarray)]
    results = np.empty((len(adjoint) + len(gradient), len(good)))
    buffers = np.empty((program.buffers, len(good)))
    program([*before, rows.dt, *rows.u, *rows.y, *adjoint, *masks], buffers, results)
    earlier, slopes = results[: len(adjoint)], results[len(adjoint) :]
    if good.all():
        adjoint[:] = earlier
        gradient += slopes
    else:
        adjoint[:] = np.where(good, earlier, adjoint)
        gradient += np.where(good, slopes, 0.0)


@lru_cache(maxsize=64)
def _build_program(
    model: LinearFilter,
    names: tuple[str, ...],
    entries: tuple[tuple[str, int, int], ...],
    missing: bool,
    first: bool | None,
    diffuse: bool,
) -> Program:
    """Return one step backwards as a program; the cases are those of `kalman.filters.linear.build_step_program`.

    Outputs: the adjoint by mean, packed covariance and packed diffuse part; then by the parameters.
    """
    tape = Tape()
    n = len(model.states)
    p = packed_size(n)
    adjoint = tape.symbols(n + p + (p if model.diffuse else 0))
    step = record_step(model, tape, missing, first, diffuse)
    parts, u = step.parts, step.u
    later = Adjoint(adjoint[:n], adjoint[n : n + p], adjoint[n + p :] if diffuse else None)
    here, by_R, by_H = pull_back_update(later, step.updated, step.seen.R)
    (scale,) = resolve([model.noise_scale], u)
    start = here
    by_F: list[list[Entry]] = [[0.0] * n for _ in range(n)]
    slopes: dict[str, list[Entry]] = {"R": [times(scale, a) for a in by_R]}
    seen = {
        name: found for name in names if (found := parse_entry_name(name)) is not None and found[0] == "H"
    }
    slopes |= {name: [by_H[i][j]] for name, (_, i, j) in seen.items()}
    if first is not True:
        moved = None if first is False else ~step.first
        transition = model.process.transition(step.dt, u, parts.values)
        start = pull_back_prediction(here, transition, moved)
        slope = differentiate_transition(here, parts.m, parts.P, parts.A, transition.F)
        by_F = slope[0] if moved is None else [[np.where(moved, a, 0.0) for a in row] for row in slope[0]]
        for name in names:
            if name not in slopes:
                steps = [
                    differentiate_along(slope, tangent)
                    for tangent in model.process.tangents(name, step.dt, u, parts.values)
                ]
                slopes[name] = steps if moved is None else [np.where(moved, a, 0.0) for a in steps]
    C = start.C if start.C is not None else adjoint[n + p :]
    flat = [
        slope
        for parameter in model.parameters
        if parameter.name in names
        for slope in slopes.get(parameter.name, [0.0] * len(parameter.value))
    ]
    flat += [{"F": by_F, "H": by_H}[letter][i][j] for letter, i, j in entries]
    return Program(tape, [*step.inputs, *adjoint, *step.masks], [*start.a, *start.B, *C, *flat])
