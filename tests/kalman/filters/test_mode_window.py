"""The window of an MMAE while a mode fails, against filters of each mode alone and sums by hand."""

import numpy as np
import pytest
from scipy.special import logsumexp

import kalman
from kalman import flags
from tests.kalman.support.oracles import run_one

START = [0.5, 0.3, 0.2]
FLOOR = 1e-6


def mode(q, r):
    return {
        "process": {"kind": "random_walk", "variance": q},
        "observation": {"H": [[1.0]], "R": [[r]]},
    }


MODES = [mode(1.0, 0.0), mode(1.0, 1.0), mode(0.1, 4.0)]  # the first cannot weigh two readings of one time
INITIAL = {"mean": [0.2], "covariance": [[9.0]]}
SHARED = {"states": ["level"], "measurement": ["y"], "initial": INITIAL}


def floored(logs):
    logs = np.maximum(logs - logsumexp(logs), np.log(FLOOR))
    return logs - logsumexp(logs)


def by_hand(y, dt, window):
    """Probabilities (N, 3) and log-likelihood (N,), each mode a linear filter that is stepped row by row."""
    filters = [kalman.build({**SHARED, **m, "filter": "linear"}) for m in MODES]
    states = [f.initial(1) for f in filters]
    logs, recent = np.log(START), []
    probabilities, scores = [], []
    for k, value in enumerate(y):
        rows = kalman.Rows(np.array([dt[k]]), np.array([k == 0]), np.array([[value]]), np.empty((0, 1)))
        steps = [f.step(s, rows) for f, s in zip(filters, states, strict=True)]
        states = [after for after, _ in steps]
        good = np.array([step.flag[0] == flags.WELL for _, step in steps])
        row = np.array([step.log_likelihood[0] for _, step in steps])
        row[~good] = np.log(FLOOR) + row[good].max()
        if not np.isnan(value):
            scores.append(logsumexp(logs[good] + row[good]))
            recent = [*recent, row][-window:]
        else:
            scores.append(0.0)
        logs = floored(np.log(START) + np.sum(recent, axis=0))
        probabilities.append(np.exp(logs))
        if not good.all():
            w = np.exp(logs[good] - logsumexp(logs[good]))
            m = np.array([s[0, 0] for s, ok in zip(states, good, strict=True) if ok])
            P = np.array([s[1, 0] for s, ok in zip(states, good, strict=True) if ok])
            mean = w @ m
            fresh = np.array([[mean], [w @ (P + (m - mean) ** 2)]])
            states = [s if ok else fresh for s, ok in zip(states, good, strict=True)]
    return np.array(probabilities), np.array(scores)


@pytest.mark.parametrize("window", [1, 2, 3, 6])
def test_a_failing_mode_stays_low_until_the_row_has_left_the_window(window):
    """Repeated times make the first mode fail, twice in a row too; a missing reading does not move the window."""
    rng = np.random.default_rng(3)
    time = np.array([0, 0, 1, 2, 3, 4, 5, 5, 5, 6, 7, 8, 9, 10.0])
    y = np.cumsum(rng.normal(size=len(time))) * 0.5
    y[4] = np.nan
    definition = {
        **SHARED,
        "filter": "mmae",
        "modes": MODES,
        "mmae": {"window": window, "floor": FLOOR},
        "initial": {**INITIAL, "mode_probabilities": START},
    }
    _, outputs = run_one(definition, y, time)
    assert not outputs.flag.any()
    probabilities, scores = by_hand(y, np.diff(time, prepend=0.0), window)
    found = outputs.extra["mode_probabilities"].T
    np.testing.assert_allclose(found, probabilities, rtol=1e-9)
    np.testing.assert_allclose(outputs.log_likelihood, scores, rtol=1e-9, atol=1e-11)
    assert probabilities[1, 0] < 1e-4, "the mode did not fail"
    assert probabilities[-1, 0] > 1e-3 or window == 6, "it never came back"
