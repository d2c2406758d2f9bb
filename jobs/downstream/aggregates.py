"""Exact aggregates of the finite readings in a window, independent of how its rows are split into micro-batches.

Each portion of a window's readings becomes an accumulator, and accumulators are added exactly. Sums and sums of squares
are fixed-point integers with 32-bit digits that span all doubles (U. Kulisch, Computer Arithmetic and Validity, 2nd ed.
2013, chapter 8). For a quantile or a function, the accumulator has the readings themselves. The aggregate is computed
from exact integers and rounded once. The module does not use Spark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.core.errors import UserError, extract_first_line
from kalman.models.named import Named

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

DIGIT = 32
_MASK = np.int64((1 << DIGIT) - 1)
LOWEST = -1074
"""Exponent of two of the least positive double, which is the unit of sums; sums of squares have its square as unit."""
_HALF = 27


class WindowAggregate(NamedTuple):
    """An aggregate: its name, its kind, the level of a quantile, and the user's function for the kind `function`."""

    name: str
    kind: str
    level: float | None = None
    function: Named | None = None

    @property
    def needs_values(self) -> bool:
        """Return whether the aggregate needs the readings themselves, not only sums."""
        return self.kind in ("quantile", "function")


class ReadingMoments(NamedTuple):
    """Exact moments of a group's readings: count, least, greatest, and sum and sum of squares as integers."""

    count: int
    least: float
    greatest: float
    total: int
    squares: int


def accumulate(values: Floats, start: Ints, keep: bool) -> list[bytes]:
    """Return the accumulator of each group of readings.

    Args:
        values: (N,) finite readings; the readings of a group are adjacent.
        start: (G + 1,) group g has the readings start[g] to start[g + 1] - 1.
        keep: whether to keep the readings, in ascending order, instead of sums.
    """
    values = values + 0.0  # turns -0.0 into 0.0, so that there is only one zero
    count = np.diff(start)
    group = np.repeat(np.arange(len(count)), count)
    if keep:
        values = values[np.lexsort((values, group))]
        return [values[a:b].tobytes() for a, b in zip(start[:-1], start[1:], strict=True)]
    least, greatest = np.full(len(count), math.inf), np.full(len(count), -math.inf)
    np.minimum.at(least, group, values)
    np.maximum.at(greatest, group, values)
    fraction, exponent = np.frexp(values)
    mantissa = np.abs(np.ldexp(fraction, 53)).astype(np.int64)
    place = exponent.astype(np.int64) - 53 - LOWEST
    small = np.maximum(-place, 0)  # subnormal numbers have zeros in these bits
    mantissa, place = mantissa >> small, place + small
    sign = np.where(values < 0, -1, 1)
    high, low = mantissa >> _HALF, mantissa & ((1 << _HALF) - 1)
    sums = _compute_digits(len(count), group, [(place, mantissa, sign)])
    parts = (
        (2 * place + 2 * _HALF, high * high),
        (2 * place + _HALF + 1, high * low),
        (2 * place, low * low),
    )
    squares = _compute_digits(len(count), group, [(at, part, np.ones_like(part)) for at, part in parts])
    head = np.stack([count, least.view(np.int64), greatest.view(np.int64)], 1)
    whole = np.concatenate([head, sums, squares], 1).astype("<i8")
    return [row.tobytes() for row in whole]


def _compute_digits(groups: int, group: Ints, parts: Sequence[tuple[Ints, Ints, Ints]]) -> Ints:
    """Return first digit's place, number of digits, and digits of the sum of sign * part * 2^place of each group."""
    first = min((int(place.min()) // DIGIT for place, _, _ in parts if len(place)), default=0)
    last = max((int(place.max()) // DIGIT for place, _, _ in parts if len(place)), default=0) + 3
    digits = np.zeros((groups, last - first), np.int64)
    flat, row = digits.reshape(-1), group * digits.shape[1]
    for place, part, sign in parts:
        at, shift = place // DIGIT - first, place % DIGIT
        low, high = (part & _MASK) << shift, (part >> DIGIT) << shift
        for step, some in (
            (0, low & _MASK),
            (1, (low >> DIGIT) & _MASK),
            (1, high & _MASK),
            (2, high >> DIGIT),
        ):
            np.add.at(flat, row + at + step, sign * some)
    return np.concatenate([np.tile([first, digits.shape[1]], (groups, 1)), digits], 1)


def merge_accumulators(parts: Sequence[bytes], keep: bool) -> bytes:
    """Return one accumulator that is the sum of all parts."""
    if len(parts) == 1:
        return parts[0]
    if keep:
        return np.sort(np.concatenate([np.frombuffer(one, "<f8") for one in parts])).tobytes()
    several = [unpack_moments(one) for one in parts]
    return pack_moments(
        ReadingMoments(
            sum(one.count for one in several),
            min(one.least for one in several),
            max(one.greatest for one in several),
            sum(one.total for one in several),
            sum(one.squares for one in several),
        )
    )


def pack_moments(found: ReadingMoments) -> bytes:
    """Return the shortest encoding of an accumulator."""
    head = np.array([found.count, *np.array([found.least, found.greatest]).view(np.int64)], "<i8")
    parts = [head.tobytes()]
    for number in (found.total, found.squares):
        first = max(((number & -number).bit_length() - 1) // DIGIT, 0) if number else 0
        rest, digits = abs(number) >> (first * DIGIT), []
        while rest:
            digits.append((rest & int(_MASK)) * (1 if number > 0 else -1))
            rest >>= DIGIT
        parts.append(np.array([first, len(digits), *digits], "<i8").tobytes())
    return b"".join(parts)


def unpack_moments(accumulator: bytes) -> ReadingMoments:
    """Decode an accumulator into numbers."""
    numbers = np.frombuffer(accumulator, "<i8")
    least, greatest = (float(one) for one in numbers[1:3].view("<f8"))
    found, at = [], 3
    for _ in range(2):
        first, length = int(numbers[at]), int(numbers[at + 1])
        digits = numbers[at + 2 : at + 2 + length].tolist()
        found.append(sum(digit << (DIGIT * i) for i, digit in enumerate(digits) if digit) << (DIGIT * first))
        at += 2 + length
    return ReadingMoments(int(numbers[0]), least, greatest, found[0], found[1])


def compute_aggregates(
    accumulators: Sequence[bytes], aggregates: Sequence[WindowAggregate], keep: bool
) -> dict[str, Floats]:
    """Return each aggregate (G,); NaN for an undefined aggregate (no readings, or the spread of one reading).

    Raises:
        UserError: a function fails, or does not return one number per group.
    """
    values = [np.frombuffer(one, "<f8") for one in accumulators] if keep else []
    start = np.cumsum([0, *map(len, values)])
    flat = np.concatenate(values) if values else np.zeros(0)
    sums = [unpack_moments(one) for one in (accumulate(flat, start, False) if keep else accumulators)]
    found = {}
    for one in aggregates:
        if one.kind == "quantile":
            assert one.level is not None
            found[one.name] = np.array([_compute_quantile(some, one.level) for some in values])
        elif one.kind == "function":
            found[one.name] = _apply_function(one, flat, start)
        else:
            found[one.name] = np.array([_OF_MOMENTS[one.kind](some) for some in sums], float)
    return found


def _compute_quantile(values: Floats, level: float) -> float:
    """Return a quantile of ascending readings, with linear interpolation (Hyndman & Fan 1996, type 7)."""
    return float(np.quantile(values, level)) if len(values) else math.nan


def _apply_function(one: WindowAggregate, values: Floats, start: Ints) -> Floats:
    assert one.function is not None
    what = f"aggregate {one.name}: {one.function.name}"
    function = one.function.function
    try:
        found = np.asarray(function(values.copy(), start.copy()), float)
    except Exception as error:
        raise UserError(
            f"{what} failed ({type(error).__name__}: {extract_first_line(error)}): mend it"
        ) from error
    if found.shape != (len(start) - 1,):
        raise UserError(
            f"{what} returned an array of shape {found.shape}, which must be {(len(start) - 1,)}: mend it"
        )
    return found


def _compute_ratio(above: int, below: int, power: int) -> float:
    """Return above / below * 2^power, rounded once."""
    try:
        return above / (below << -power) if power < 0 else (above << power) / below
    except OverflowError:
        return math.inf if above > 0 else -math.inf


def _compute_variance(of: ReadingMoments) -> float:
    n = of.count
    if n < 2:
        return math.nan
    return _compute_ratio(n * of.squares - of.total * of.total, n * (n - 1), 2 * LOWEST)


_OF_MOMENTS: Mapping[str, Callable[[ReadingMoments], float]] = {
    "count": lambda of: of.count,
    "min": lambda of: of.least if of.count else math.nan,
    "max": lambda of: of.greatest if of.count else math.nan,
    "sum": lambda of: _compute_ratio(of.total, 1, LOWEST),
    "mean": lambda of: _compute_ratio(of.total, of.count, LOWEST) if of.count else math.nan,
    "variance": _compute_variance,
    "stddev": lambda of: math.sqrt(_compute_variance(of)) if of.count > 1 else math.nan,
}
