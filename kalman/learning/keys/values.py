"""Log-likelihood, gradient, information and innovations of many keys, each at its learned entries.

A step is recorded once (`kalman.learning.tangents`). For many rows it is compiled (`kalman.learning.keys.walks`); else
each round is a program of NumPy calls. Both give the same bits.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from kalman.learning.key_rows import RoundRows
from kalman.learning.keys.walks import find_innovations, sum_rows
from kalman.learning.tangents import LearnedEntries, record_innovations, record_sums
from kalman.linalg.packing import unpack_symmetric
from kalman.linalg.program import Program
from kalman.types import Array

WIDTH = 4096
"""Keys processed at once, so that their states stay in the processor's cache."""


class Values(NamedTuple):
    """For each of J keys: log-likelihood (J,), gradient (d, J) and information (d, d, J) by the learned entries."""

    log_likelihood: Array
    gradient: Array
    information: Array


def evaluate(of: LearnedEntries, rows: RoundRows, entries: Array) -> Values:
    """Return the values of the J keys of `rows` at their learned entries (d, J).

    If a key's filter breaks down, its log-likelihood is not finite.
    """
    d = of.slopes
    result = _sum_all_blocks(of, rows, entries)
    full = np.array(unpack_symmetric(list(result[2 + d :]))).reshape(d, d, rows.keys)
    return Values(result[0] - 0.5 * result[1], result[2 : 2 + d], full)


def compute_fits(of: LearnedEntries, rows: RoundRows, entries: Array) -> tuple[Array, Array]:
    """Return the log-likelihood of J keys without the term of v^2 / S, and the sum of v^2 / S, (J,) each."""
    result = _sum_all_blocks(of._replace(derived=False), rows, entries)
    return result[0], result[1]


def _sum_all_blocks(of: LearnedEntries, rows: RoundRows, entries: Array) -> Array:
    walked = sum_rows(of, rows, entries)
    if walked is not None:
        return walked
    result = np.zeros((of.sums, rows.keys))
    for begin in range(0, rows.keys, WIDTH):
        block = slice(begin, min(begin + WIDTH, rows.keys))
        result[:, block] = _sum_block(of, rows, block, np.ascontiguousarray(entries[:, block]))
    return result


def _sum_block(of: LearnedEntries, rows: RoundRows, block: slice, entries: Array) -> Array:
    """Return the sums (sums, k) of the k keys of a block."""
    k = entries.shape[1]
    diffuse = of.factor > 0
    start = of.model.initial(1)[: of.model.places["covariance"].stop + of.factor]
    state = np.zeros((sum(of.sizes(diffuse)) + of.sums, k))
    state[: len(start)] = start
    pair, programs = _Pair(state), dict[tuple[bool, bool, bool], tuple[Program, Array, list[Array]]]()
    own = list(entries)
    with np.errstate(all="ignore"):  # the search refuses a value that is not finite
        for first, dt, y, u, missing in rows.within(block):
            here = y.shape[1]
            if diffuse and not pair.state[_locate_factor(of)].any():
                diffuse, pair = False, _Pair(of.drop_diffuse_rows(pair.state))
            case = missing, first, diffuse
            if case not in programs:
                program = _build_program(of, *case)
                work = np.empty((program.buffers, k))
                programs[case] = program, work, list(work)
            program, work, buffers = programs[case]
            masks = list(~np.isnan(y)) if missing else []
            if here < k:
                pair.after[:, here:] = pair.state[:, here:]
                inputs = [*pair.state[:, :here], *entries[:, :here], dt, *u, *y, *masks]
                program(inputs, work[:, :here], pair.after[:, :here])
            else:
                program([*pair.rows, *own, dt, *u, *y, *masks], buffers, pair.later)
            pair = pair.swap_buffers()
    return pair.state[-of.sums :]


class _Pair:
    """The running state and a buffer for the next state; `rows` and `later` list the rows of the two arrays."""

    def __init__(self, state: Array, after: Array | None = None) -> None:
        self.state = state
        self.after = np.empty_like(state) if after is None else after
        self.rows, self.later = list(self.state), list(self.after)

    def swap_buffers(self) -> "_Pair":
        """Swap the two buffers and return the same object."""
        self.state, self.after = self.after, self.state
        self.rows, self.later = self.later, self.rows
        return self


def whiten_innovations(of: LearnedEntries, rows: RoundRows, entries: Array) -> Array:
    """Return innovation and variance of each independent component, (2 m, N) in turn, in the order of the rounds.

    Both are NaN where the component is missing. While the component is diffuse, the innovation is NaN and the variance
    is F_inf.
    """
    walked = find_innovations(of, rows, entries)
    if walked is not None:
        return walked
    start = of.model.initial(1)[: of.model.places["covariance"].stop + of.factor]
    settled = of.model.places["covariance"].stop
    m = of.model.measurements
    state = np.repeat(start, rows.keys, axis=1)
    result = np.empty((2 * m, rows.size))
    diffuse = of.factor > 0
    after = np.empty((len(start), rows.keys))
    taken = slice(0, rows.keys)
    with np.errstate(all="ignore"):
        for place, (first, dt, y, u, missing) in zip(rows.places(), rows.within(taken), strict=True):
            here = y.shape[1]
            diffuse = diffuse and bool(state[settled:].any())
            size = len(start) if diffuse else settled
            program = _build_innovation_program(of, missing, first, diffuse)
            work = np.empty((program.buffers, here))
            masks = list(~np.isnan(y)) if missing else []
            inputs = [*state[:size, :here], *entries[:, :here], dt, *u, *y, *masks]
            program(inputs, work, [*after[:size, :here], *result[:, place]])
            state[:size, :here] = after[:size, :here]
    return result


def _locate_factor(of: LearnedEntries) -> slice:
    stop = of.model.places["covariance"].stop
    return slice(stop, stop + of.factor)


@lru_cache(maxsize=64)
def _build_program(of: LearnedEntries, missing: bool, first: bool, diffuse: bool) -> Program:
    step = record_sums(of, missing, first, diffuse).step
    return Program(step, step.inputs, step.outputs)


@lru_cache(maxsize=64)
def _build_innovation_program(of: LearnedEntries, missing: bool, first: bool, diffuse: bool) -> Program:
    step = record_innovations(of, missing, first, diffuse)
    return Program(step, step.inputs, step.outputs)
