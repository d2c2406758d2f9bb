"""Find the rhythm of a table's rows (the usual step, gaps, repeats, the unit for rates), and the period of a season."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.core.times import UNIT_US

GAP = 1.5
"""A pause of at least this number of usual steps is a gap."""
_NAMES = (
    ("week", "w"),
    ("day", "d"),
    ("hour", "h"),
    ("minute", "min"),
    ("second", "s"),
    ("millisecond", "ms"),
)


class Rhythm(NamedTuple):
    """The rhythm of rows in time.

    step: median time between two rows of a key, in microseconds.
    regular: share of steps that equal the median step.
    gaps: number of pauses of more than GAP steps.
    longest: the longest such pause in microseconds.
    repeats: number of rows that repeat key and time of another row.
    unit: the unit of time for the spec.
    """

    step: int
    regular: float
    gaps: int
    longest: int
    repeats: int
    unit: str

    @property
    def step_in_units(self) -> float:
        """Return the step in the spec's unit of time."""
        return self.step / UNIT_US[self.unit]


def find_rhythm(key: NDArray[np.int64], time: NDArray[np.int64]) -> Rhythm:
    """Return the rhythm of rows (N,) in the files' order."""
    order = np.lexsort((time, key))
    same = np.diff(key[order]) == 0
    steps = np.diff(time[order])[same]
    positive = steps[steps > 0]
    step = int(np.median(positive)) if len(positive) else UNIT_US["second"]
    regular = float((positive == step).mean()) if len(positive) else 0.0
    gaps = positive[positive > GAP * step]
    return Rhythm(
        step, regular, len(gaps), int(gaps.max(initial=0)), int((steps == 0).sum()), _choose_unit(step)
    )


def _choose_unit(step: int) -> str:
    """Return the longest unit that is not longer than the step; a week only for steps of whole weeks."""
    units = sorted(UNIT_US, key=UNIT_US.__getitem__, reverse=True)
    fitting = [
        unit for unit in units if UNIT_US[unit] <= step and (unit != "week" or step % UNIT_US[unit] == 0)
    ]
    return fitting[0] if fitting else "microsecond"


def format_span(micros: float) -> str:
    """Format a time span for a person: `5 min`, `1.5 d`."""
    for name, short in _NAMES:
        if micros >= UNIT_US[name] and (name != "week" or micros % UNIT_US[name] == 0):
            return f"{micros / UNIT_US[name]:.4g} {short}"
    return f"{micros:.4g} µs"


Floats = NDArray[np.float64]

CALENDAR = (
    ("hour", float(UNIT_US["hour"])),
    ("day", float(UNIT_US["day"])),
    ("week", float(UNIT_US["week"])),
    ("year", 365.2425 * UNIT_US["day"]),
)
LONGEST = 8_192
"""The maximum number of grid points, at the end of a series, that are used."""
CYCLES, OTHER_CYCLES = 3, 6
"""The number of periods that the data must contain (for a calendar period two and a half suffice), and of a period that
no calendar explains: a wandering level often shows three or four waves.
"""
LEAST_STEPS = 3.0
CALENDAR_PEAK, PEAK, HARMONIC = 6.0, 15.0, 4.0
"""Ratios to the background from which a peak counts: at a calendar period, at another period, as a harmonic. The second
grows by one for each doubling of the number of frequencies, the highest of which is by chance as much higher.
"""
MOST_HARMONICS = 3


class Season(NamedTuple):
    """A season: period in microseconds, name for a person, number of harmonics, ratio of the peak to the background."""

    period: float
    name: str
    harmonics: int
    peak: float


class _Spectrum(NamedTuple):
    """Frequencies (f,) in cycles per series and per microsecond; ratios (f,) of the periodogram to its background."""

    cycles: NDArray[np.int64]
    frequency: Floats
    ratio: Floats

    def at(self, frequency: float) -> float:
        """Return the largest ratio within one bin of a frequency; 0 for a frequency outside the spectrum."""
        width = self.frequency[1] - self.frequency[0]
        near = np.abs(self.frequency - frequency) <= 1.01 * width
        return float(self.ratio[near].max(initial=0.0))


def find_season(series: Iterable[tuple[NDArray[np.int64], Floats]], step: int) -> Season | None:
    """Return the season that at least half of the series have; None if there is no such season.

    Args:
        series: for each series, times in microseconds (n,), sorted, and values (n,), NaN where missing.
        step: usual step, in microseconds.
    """
    spectra = [one for time, y in series if (one := _compute_spectrum(time, y, step)) is not None]
    if not spectra:
        return None
    best: Season | None = None
    for name, period in CALENDAR:
        if period < LEAST_STEPS * step:
            continue
        peak = float(np.median([one.at(1 / period) for one in spectra]))
        if peak >= CALENDAR_PEAK and (best is None or peak > best.peak):
            best = Season(period, f"a {name}", _count_harmonics(spectra, period, step), peak)
    if best is not None:
        return best
    tops = [one.frequency[np.argmax(one.ratio * (one.cycles >= OTHER_CYCLES))] for one in spectra]
    frequency = float(np.median(tops))
    peak = float(np.median([one.at(frequency) for one in spectra]))
    if peak < PEAK + np.log2(max(len(one.ratio) for one in spectra)):
        return None
    period = 1 / frequency
    return Season(period, f"{period / step:.1f} steps", _count_harmonics(spectra, period, step), peak)


def _count_harmonics(spectra: list[_Spectrum], period: float, step: int) -> int:
    found = 1
    for j in range(2, MOST_HARMONICS + 1):
        if period / j >= 2.0 * step and np.median([one.at(j / period) for one in spectra]) >= HARMONIC:
            found = j
    return found


def _compute_spectrum(time: NDArray[np.int64], y: Floats, step: int) -> _Spectrum | None:
    """Return the periodogram of a series on the grid of its usual step; gaps are filled by linear interpolation."""
    good = np.isfinite(y)
    time, y = time[good], y[good]
    if len(time) < 8:
        return None
    first = max(int(time[0]), int(time[-1]) - (LONGEST - 1) * step)
    n = int((time[-1] - first) // step) + 1
    if n < 16 or len(time) < n / 4:
        return None
    x = np.interp(first + step * np.arange(n), time, y)
    low, high = np.quantile(x, [0.01, 0.99])
    x = np.clip(x, low, high)  # an outlier has power at all frequencies
    at = np.arange(n) - (n - 1) / 2
    x = x - x.mean() - at * (at @ x) / (at @ at)
    power = np.abs(np.fft.rfft(x * np.hanning(n))) ** 2
    k = np.arange(len(power))
    kept = np.flatnonzero((k >= CYCLES) & (k <= n / LEAST_STEPS))
    if len(kept) < 4 or not power[kept].any():
        return None
    # The background of a wandering level falls like 1 / f^2: remove this trend, then compare neighbours.
    flat = power * np.maximum(k, 1.0) ** 2
    ratio = np.array([flat[j] / max(_compute_background(flat, j), 1e-300) for j in kept.tolist()])
    return _Spectrum(kept, kept / (n * float(step)), ratio)


def _compute_background(flat: Floats, j: int) -> float:
    low, high = max(int(j / 2), 1), min(2 * j + 4, len(flat))
    around = np.r_[flat[low : max(j - 2, low)], flat[j + 3 : high]]
    return float(np.median(around)) if len(around) >= 3 else float("inf")
