"""The Fisher information of rows about a linear filter's parameters, for every key."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from kalman import flags
from kalman.filters.linear import LinearFilter, record_step
from kalman.filters.state_layout import BLOCK
from kalman.filters.update import mask_present
from kalman.linalg.program import Program, Tape
from kalman.run import SortedRows, build_rounds
from kalman.types import Array, Rows


def compute_fisher_information(
    model: LinearFilter,
    rows: SortedRows,
    keys: int,
    unit: float,
    starts: Sequence[Array],
    steps: Array,
) -> Array:
    """Return the information (p(p+1)/2, keys), packed, about p variables, summed over each key's rows.

    starts: the initial states (size, keys) at theta, then with one variable at a time moved by its step.
    steps: (p,) step of each variable.

    Each innovation v ~ N(0, S) adds dv dv' / S + dS dS' / (2 S^2), with differences in place of derivatives. The
    expectation of this term is Fisher's information, and the term is never negative. Flagged rows and diffuse
    components add nothing.

    References: Engle and Watson (1981); Harvey (1989), section 3.4.5.
    """
    plan = build_rounds(rows.key)
    time, y, u = rows.time[plan.order], rows.y[:, plan.order], rows.u[:, plan.order]
    here, copies = len(plan.keys), len(starts)
    values = np.stack([start[:, plan.keys] for start in starts], axis=1)
    event_time, begun = np.zeros(here, np.int64), np.zeros(here, bool)
    i, j = np.tril_indices(copies - 1)
    total = np.zeros((len(i), here))
    for part in plan.slices():
        k = part.stop - part.start
        first = ~begun[:k]
        dt = np.where(first, 0, time[part] - event_time[:k]) / unit
        row = Rows(dt, first, y[:, part], u[:, part])
        before = values[:, :, :k].reshape(len(values), -1)
        _, step = model.step(values[:, 0, :k], row)
        good = step.flag == flags.WELL
        after, v, S = (a.reshape(-1, copies, k) for a in _step_rows(model, before, row.repeated(copies)))
        with np.errstate(all="ignore"):
            dv = (v[:, 1:] - v[:, :1]) / (steps[:, None] * np.sqrt(S[:, :1]))
            dS = (S[:, 1:] - S[:, :1]) / (steps[:, None] * S[:, :1] * np.sqrt(2.0))
            added = (dv[:, i] * dv[:, j] + dS[:, i] * dS[:, j]).sum(axis=0)
        total[:, :k] += np.where(good, added, 0.0)
        values[:, :, :k] = np.where(good, after, values[:, :, :k])
        event_time[:k] = np.where(good, time[part], event_time[:k])
        begun[:k] |= good
    result = np.zeros((len(i), keys))
    result[:, plan.keys] = total
    return result


def _step_rows(model: LinearFilter, state: Array, rows: Rows) -> tuple[Array, Array, Array]:
    """Return the state after the rows, and v and S (m, K) of each component; 0 and 1 if missing."""
    size, m = len(state), model.measurements
    result = np.empty((size + 2 * m, state.shape[1]))
    for start in range(0, state.shape[1], BLOCK):
        here = slice(start, min(start + BLOCK, state.shape[1]))
        part = Rows(rows.dt[here], rows.first[here], rows.y[:, here], rows.u[:, here])
        presents, first = mask_present(part.y), part.mask_first_rows()
        case = first if isinstance(first, bool) else None
        program = _build_program(model, presents[0] is not None, case, model.is_diffuse(state[:, here]))
        masks = [a for a in (first, *presents) if isinstance(a, np.ndarray)]
        buffers = np.empty((program.buffers, here.stop - here.start))
        with np.errstate(all="ignore"):  # flagged rows can fail, and the caller leaves them out
            program([*state[:, here], part.dt, *part.u, *part.y, *masks], buffers, result[:, here])
    return result[:size], result[size : size + m], result[size + m :]


@lru_cache(maxsize=64)
def _build_program(model: LinearFilter, missing: bool, first: bool | None, diffuse: bool) -> Program:
    """Return one step with its innovations as a program; the cases are those of `linear.build_step_program`."""
    step = record_step(model, Tape(), missing, first, diffuse)
    v, S = [], []
    for scalar in step.updated.scalars:
        innovation, variance = scalar.weighing.v, scalar.weighing.S
        for absent in (None if scalar.present is None else ~scalar.present, scalar.weighing.diffuse):
            if absent is not None:
                innovation, variance = np.where(absent, 0.0, innovation), np.where(absent, 1.0, variance)
        v.append(innovation)
        S.append(variance)
    return Program(step.tape, [*step.inputs, *step.masks], [*step.after(model), *v, *S])
