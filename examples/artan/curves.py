"""A curve that grows exponentially along a line: exp(a x + b), of states a and b and a row's column x."""

import numpy as np


def growth(x, u):
    """Return the expected measurement, for all keys at once: x (2, K), u (1, K)."""
    return np.exp(x[:1] * u[:1] + x[1:])


def slope(x, u):
    """Return its derivatives by a and b (1, 2, K)."""
    expected = growth(x, u)[0]
    return np.array([[expected * u[0], expected]])
