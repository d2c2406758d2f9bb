"""Arithmetic on single matrix entries; an entry is a float that all keys share, or an array (K,).

The floats 0.0 and 1.0 belong to the model's structure, and operations with them are left out. A result may be the same
object as an operand, so neither these functions nor their callers change entries in place.
"""

from collections.abc import Sequence

import numpy as np

from kalman.types import Entry

Vector = Sequence[Entry]
Matrix = Sequence[Sequence[Entry]]


def is_zero(a: Entry) -> bool:
    """Return whether an entry is a structural zero, which is zero for every key."""
    return type(a) is float and a == 0.0


def times(a: Entry, b: Entry) -> Entry:
    """Return a * b."""
    if type(a) is float:
        if a == 1.0:
            return b
        if a == 0.0:
            return 0.0
    if type(b) is float:
        if b == 1.0:
            return a
        if b == 0.0:
            return 0.0
    return a * b


def plus(a: Entry, b: Entry) -> Entry:
    """Return a + b."""
    if type(a) is float and a == 0.0:
        return b
    if type(b) is float and b == 0.0:
        return a
    return a + b


def minus(a: Entry, b: Entry) -> Entry:
    """Return a - b."""
    if type(b) is float and b == 0.0:
        return a
    if type(a) is float and a == 0.0:
        return -b
    return a - b


def squared(a: Entry) -> Entry:
    """Return a * a."""
    return a**2 if isinstance(a, float) else times(a, a)


def over(a: Entry, b: Entry) -> Entry:
    """Return a / b, which is 0 if a is a structural zero."""
    return 0.0 if is_zero(a) else np.divide(a, b)


def dot(a: Vector, b: Vector) -> Entry:
    """Return the sum of a_i * b_i, added from the first to the last term.

    This is the innermost function of every step. To halve the time of a call over few keys, it treats the zeros and
    ones of `a` without calling `times` and `plus`.
    """
    total: Entry = 0.0
    empty = True
    for x, y in zip(a, b, strict=True):
        if type(x) is float:
            if x == 0.0:
                continue
            term = y if x == 1.0 else times(x, y)
        else:
            term = times(x, y)
        total = term if empty else plus(total, term)
        empty = False
    return total


def apply(matrix: Matrix, vector: Vector) -> list[Entry]:
    """Return matrix @ vector."""
    return [dot(row, vector) for row in matrix]
