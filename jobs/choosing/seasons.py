"""Find the period of a season from the periodograms of some series."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.core.times import UNIT_US

Floats = NDArray[np.float64]

CALENDAR = (
    ("hour", float(UNIT_US["hour"])),
    ("day", float(UNIT_US["day"])),
    ("week", float(UNIT_US["week"])),
    ("year", 365.2425 * UNIT_US["day"]),
)
LONGEST = 8_192
"""Number of last grid points of a series that are used."""
CYCLES = 3
"""Periods that the data must contain for a found period; a calendar period needs two and a half."""
LEAST_STEPS = 3.0
CALENDAR_PEAK, PEAK, HARMONIC = 6.0, 15.0, 4.0
"""Ratios to the background from which a peak counts: at a calendar period, at another period, as a harmonic."""
MOST_HARMONICS = 3


class Season(NamedTuple):
    """Season: period in microseconds, name for a person, number of harmonics, ratio of the peak to the background."""

    period: float
    name: str
    harmonics: int
    peak: float


class _Spectrum(NamedTuple):
    """Frequencies (f,) in cycles per microsecond, and ratios (f,) of the periodogram to its background."""

    frequency: Floats
    ratio: Floats

    def at(self, frequency: float) -> float:
        """Return the largest ratio within one bin of a frequency, 0 outside the spectrum."""
        width = self.frequency[1] - self.frequency[0]
        near = np.abs(self.frequency - frequency) <= 1.01 * width
        return float(self.ratio[near].max(initial=0.0))


def find_season(series: Iterable[tuple[NDArray[np.int64], Floats]], step: int) -> Season | None:
    """Return the season that at least half of the series have, or None.

    Args:
        series: times in microseconds (n,), sorted, and values (n,), NaN where missing.
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
    tops = [one.frequency[np.argmax(one.ratio)] for one in spectra]
    frequency = float(np.median(tops))
    peak = float(np.median([one.at(frequency) for one in spectra]))
    if peak < PEAK:
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
    return _Spectrum(kept / (n * float(step)), ratio)


def _compute_background(flat: Floats, j: int) -> float:
    low, high = max(int(j / 2), 1), min(2 * j + 4, len(flat))
    around = np.r_[flat[low : max(j - 2, low)], flat[j + 3 : high]]
    return float(np.median(around)) if len(around) >= 3 else float("inf")
