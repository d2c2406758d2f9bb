"""An Ornstein-Uhlenbeck process that hardly moves between two rows, against decimal arithmetic of 60 digits."""

from decimal import Decimal, localcontext

import numpy as np
import pytest

import kalman
from kalman.models.structures import parse
from tests.kalman.support.oracles import UNIT

VARIANCE, MEAN = 3.7, 2.5e6


def exact(rate, dt):
    """What is kept, noise and offset, and their derivatives by the rate."""
    with localcontext() as context:
        context.prec = 60
        x, v, m = Decimal(rate) * Decimal(dt), Decimal(VARIANCE), Decimal(MEAN)
        kept = (-x).exp()
        parts = (kept, v * (1 - kept * kept), m * (1 - kept))
        slopes = (-Decimal(dt) * kept, v * 2 * Decimal(dt) * kept * kept, m * Decimal(dt) * kept)
        return [float(a) for a in parts], [float(a) for a in slopes]


@pytest.mark.parametrize("share", [1e-15, 1e-12, 1e-9, 1e-6, 1e-3, 0.1, 3.0])
@pytest.mark.parametrize("dt", [1e-3, 1.0, 1e6])
def test_transition_and_tangents(share, dt):
    rate = share / dt
    written = {"kind": "ornstein_uhlenbeck", "rate": rate, "variance": VARIANCE, "mean": MEAN}
    process = parse("process", written)
    values = {p.name: p.value for p in process.parameters}
    (F, Q, c), by_rate = exact(rate, dt)
    moved = process.transition(np.array([dt]), [], values)
    found = [np.asarray(a)[0] for a in (moved.F[0][0], moved.Q[0], moved.c[0])]
    np.testing.assert_allclose(found, [F, Q, c], rtol=2e-15)
    (slope,) = process.tangents("rate", np.array([dt]), [], values)
    found = [np.asarray(a)[0] for a in (slope.F[0][0], slope.Q[0], slope.c[0])]
    np.testing.assert_allclose(found, by_rate, rtol=2e-15)
    (slope,) = process.tangents("variance", np.array([dt]), [], values)
    np.testing.assert_allclose(slope.Q[0], Q / VARIANCE, rtol=2e-15)
    (slope,) = process.tangents("mean", np.array([dt]), [], values)
    np.testing.assert_allclose(slope.c[0], c / MEAN, rtol=2e-15)


def test_a_thousand_short_steps_are_a_long_one():
    """Rows without a measurement, each at rate dt = 1e-9, from a level that is known: only noise grows."""
    model = kalman.build(
        {
            "states": ["level"],
            "measurement": ["y"],
            "process": {"kind": "ornstein_uhlenbeck", "rate": 1e-9, "variance": VARIANCE, "mean": MEAN},
            "observation": {"R": [[1.0]]},
            "initial": {"mean": [0.0], "covariance": [[0.0]]},
        }
    )
    time = np.arange(1001) * UNIT
    rows = kalman.SortedRows(
        np.zeros(1001, np.int64), time.astype(np.int64), np.full((1, 1001), np.nan), np.empty((0, 1001))
    )
    states, _ = kalman.run(model, kalman.initial_states(model, 1), rows, UNIT)
    (_, Q, c), _ = exact(1e-9, 1000.0)
    np.testing.assert_allclose(states.values[:, 0], [c, Q], rtol=1e-12)
