"""Write rows for an example: `python -m examples.artan.rows line rows.csv`. The same rows each time."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import pandas as pd

NOISE = 1.0
"""Standard deviation of the measurements' noise."""


def line(rng: np.random.Generator, models: int = 10, rows: int = 60) -> pd.DataFrame:
    """Return z = 0.5 x + 0.2 y + 1.2 + w for several models, with y the square root of x."""
    x = np.tile(np.arange(rows, dtype=float), models)
    y = np.sqrt(x)
    return _keyed(models, rows, x=x, y=y, z=0.5 * x + 0.2 * y + 1.2 + _noise(rng, x))


def growth(rng: np.random.Generator, models: int = 2, rows: int = 26) -> pd.DataFrame:
    """Return z = exp(0.2 x + 0.7) + w for two models."""
    x = np.tile(np.arange(rows, dtype=float), models)
    return _keyed(models, rows, x=x, z=np.exp(0.2 * x + 0.7) + _noise(rng, x))


def trend(rng: np.random.Generator, models: int = 2, rows: int = 40) -> pd.DataFrame:
    """Return a level that rises by one from row to row, with noise."""
    level = np.tile(np.arange(rows, dtype=float), models)
    return _keyed(models, rows, z=level + _noise(rng, level))


def clusters(rng: np.random.Generator, models: int = 2, rows: int = 400) -> pd.DataFrame:
    """Return points of three normal clusters, of which a fifth, three and five tenths of the points are."""
    size = models * rows
    chosen = rng.choice(3, size=size, p=[0.2, 0.3, 0.5])
    means = np.array([[1.0, 2.0], [10.0, 5.0], [4.0, 4.0]])
    roots = np.linalg.cholesky(np.array([np.eye(2), [[4.0, 2.0], [2.0, 4.0]], 5.0 * np.eye(2)]))
    points = means[chosen] + np.einsum("nij,nj->ni", roots[chosen], rng.normal(size=(size, 2)))
    return _keyed(models, rows, a=points[:, 0], b=points[:, 1])


SETS: dict[str, Callable[[np.random.Generator], pd.DataFrame]] = {
    "line": line,
    "growth": growth,
    "trend": trend,
    "clusters": clusters,
}
"""The sets of rows by name."""


def made(name: str) -> pd.DataFrame:
    """Return the rows of a set."""
    return SETS[name](np.random.default_rng(list(SETS).index(name)))


def _noise(rng: np.random.Generator, like: np.ndarray) -> np.ndarray:
    return NOISE * rng.normal(size=like.shape)


def _keyed(models: int, rows: int, **columns: np.ndarray) -> pd.DataFrame:
    """Return the columns with the model of each row, and its time: one row a second."""
    at = pd.date_range("2024-01-01", periods=rows, freq="s").strftime("%Y-%m-%dT%H:%M:%SZ")
    return pd.DataFrame({"model": np.repeat(np.arange(models), rows), "at": list(at) * models, **columns})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("set", choices=SETS)
    parser.add_argument("output", help="a .csv file")
    arguments = parser.parse_args()
    made(arguments.set).to_csv(arguments.output, index=False)
