"""Made series of unlike scales and noises, and models to learn them by key."""

import numpy as np

import kalman

LEVEL = {
    "states": ["level"],
    "measurement": ["y"],
    "process": {"kind": "random_walk", "variance": 1.0},
    "observation": {"R": [[1.0]]},
    "initial": {"diffuse": True},
    "learn": {"parameters": ["variance", "R"], "scope": "key"},
}
TREND = {
    **LEVEL,
    "states": ["level", "slope"],
    "process": {"kind": "local_linear_trend", "level_variance": 1.0, "slope_variance": 0.1},
    "learn": {"parameters": ["level_variance", "slope_variance", "R"], "scope": "key"},
}


def made(keys, length, seed, states):
    """Return y (keys, length): scales of 1e-6 to 1e9, signal to noise of 1e-3 to 1e3, gaps (NaN) and outliers."""
    rng = np.random.default_rng([seed, states])
    y = np.empty((keys, length))
    for k in range(keys):
        ratio = 10 ** rng.uniform(-3, 3)
        noise = rng.normal(size=(2, length)) * np.sqrt(ratio)
        steps = noise[0] + (np.cumsum(noise[1] * 10 ** rng.uniform(-2, 0)) if states == 2 else 0.0)
        one = np.cumsum(steps) + rng.normal(size=length)
        if k % 3 == 1:
            one[rng.random(length) < 0.03] += rng.normal() * 10 * np.sqrt(1 + ratio)
        if k % 2 == 1:
            one[1:][rng.random(length - 1) < 0.15] = np.nan
            begin = rng.integers(20, length - 60)
            one[begin : begin + 40] = np.nan
        y[k] = (one + rng.normal() * 100) * 10 ** rng.uniform(-6, 9)
    return y


def loads(length, seed=3):
    """Return ten series (10, length) like the load of machines: in per cent, rounded, idle for long; one is loud."""
    rng = np.random.default_rng(seed)
    y = np.empty((10, length))
    for k in range(10):
        wander = np.cumsum(rng.normal(size=length) * (rng.random(length) < 0.05)) * 0.5
        y[k] = 20 + wander + rng.normal(size=length) * 0.3
        if k < 3:
            bursts = (rng.random(length) < 0.02) * rng.exponential(0.2, length)
            y[k] = np.round(rng.normal(size=length) * 0.05 + bursts, 1)
        elif k < 5:
            jumps = np.cumsum(rng.normal(size=length) * (rng.random(length) < 0.01) * 2)
            y[k] = np.round(50 + jumps + rng.normal(size=length) * 0.2, 1)
        elif k == 5:
            day = 30 * np.sin(np.arange(length) / 288 * 2 * np.pi)
            spikes = (rng.random(length) < 0.01) * 40
            y[k] = 1e3 * np.round(40 + day + rng.normal(size=length) * 8 + spikes, 2)
    y[9] *= 1e-3
    return y


def bursts(keys, length, seed):
    """Return series (length,) of a Gaussian core, some with a level, and 1 to 10 % of bursts 1e2 to 1e5 as large."""
    rng = np.random.default_rng(seed)
    found = []
    for k in range(keys):
        core = 80 + 20 * rng.normal(size=length) + (np.cumsum(3 * rng.normal(size=length)) if k % 2 else 0.0)
        hit = rng.random(length) < rng.uniform(0.01, 0.1)
        found.append(core + hit * np.abs(rng.normal(size=length)) * 20 * 10 ** rng.uniform(2, 5))
    return found


def rows_of(y):
    """Return rows at one unit of time apart, without those that are missing; y (keys, length) or a list of series."""
    key = np.concatenate([np.full(len(one), k) for k, one in enumerate(y)])
    time = np.concatenate([np.arange(len(one)) * 1_000_000 for one in y])
    values = np.concatenate(list(y))
    kept = ~np.isnan(values)
    return kalman.SortedRows(key[kept], time[kept], values[kept][None], np.empty((0, kept.sum())))
