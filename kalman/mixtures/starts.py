"""Starts of mixtures from columns: columns of a key's first row give the key's weights and components."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kalman.linalg.packing import packed_index, packed_size
from kalman.mixtures.categorical import Categorical
from kalman.mixtures.families import Family
from kalman.models import columns
from kalman.models.columns import Cell, Column, compute_lowest_pivot, resolve
from kalman.types import Array, ModelError

INSTEAD = {"means": 0.0, "rates": 1.0, "probabilities": 0.5}
"""Placeholder for a column before the first row, by the name of the parameter."""
SUM = 1e-6
"""Largest allowed deviation of a sum of weights from 1."""


class MixtureStart(NamedTuple):
    """The flat components (`Components.flat`) of a key at its first row, as numbers or columns.

    The cells are the weights of `count` components, their means (n entries each), and their spreads (p numbers each).
    """

    cells: tuple[Cell, ...]
    family: Family
    count: int
    m: int

    def resolve_start(self, u: Array) -> tuple[Array, npt.NDArray[np.bool_]]:
        """Return the flat components (d, K), whose weights sum to 1, and a mask (K,) of keys with invalid values."""
        k, m, keys = self.count, self.m, u.shape[1]
        n = self.family.entries(m)
        flat = np.array([np.broadcast_to(a, keys) for a in resolve(self.cells, list(u))], float)
        weights, means, spread = flat[:k], flat[k : k + k * n], flat[k + k * n :]
        with np.errstate(all="ignore"):
            total = weights.sum(axis=0)
            sound = (weights > 0.0).all(axis=0) & (np.abs(total - 1.0) <= SUM) & np.isfinite(flat).all(axis=0)
            if self.family.mean == "rates":
                sound &= (means > 0.0).all(axis=0)
            if self.family.mean == "probabilities":
                sound &= ((means > 0.0) & (means < 1.0)).all(axis=0)
            for part in self._list_share_groups():
                shares = means[part]
                whole = shares.sum(axis=0)
                sound &= np.abs(whole - 1.0) <= SUM
                means[part] = shares / whole
            p = self.family.spreads(m)
            for component in range(k if p else 0):
                own = list(spread[component * p : (component + 1) * p])
                sound &= np.greater_equal(compute_lowest_pivot(own), 0.0)
                sound &= np.all([own[packed_index(i, i)] > 0.0 for i in range(m)], axis=0)
            flat[:k] = weights / total
        return flat, ~sound

    def _list_share_groups(self) -> list[list[int]]:
        """Return groups of entries of the means that sum to 1: the categories of one measurement in one component."""
        if not isinstance(self.family, Categorical):
            return []
        n = self.family.entries(self.m)
        return [[k * n + i for i in part] for k in range(self.count) for part in self.family.parts()]


def replace_column_names(
    family: Family, count: int, m: int, written: Mapping[str, Any], controls: Sequence[str]
) -> tuple[dict[str, Any], MixtureStart | None]:
    """Return written components with numbers in place of columns, and the start from columns, None without columns.

    Raises:
        ModelError: a text is not the name of a column, or a list has the wrong size.
    """
    if not any(_has_texts(value) for value in written.values()):
        return dict(written), None
    cells: list[Cell] = []
    plain = dict(written)
    weights = written.get("weights")
    if weights is None:
        cells += [1.0 / count] * count
    else:
        cells += columns.parse_vector_cells("mixture.weights", weights, count, controls)
        if _has_texts(weights):
            plain.pop("weights")
    name, n = family.mean, family.entries(m)
    for k, row in enumerate(_check_list(f"mixture.{name}", written.get(name), count)):
        cells += columns.parse_vector_cells(
            f"mixture.{name}[{k}]", row if isinstance(row, (list, tuple)) else [row], n, controls
        )
    if _has_texts(written.get(name)):
        plain[name] = [_choose_placeholder(family, m)] * count
    if family.spread:
        matrices = _check_list(f"mixture.{family.spread}", written.get(family.spread), count)
        for k, matrix in enumerate(matrices):
            cells += columns.parse_covariance_cells(f"mixture.{family.spread}[{k}]", matrix, m, controls)
        if _has_texts(matrices):
            plain[family.spread] = [np.eye(m).tolist()] * count
    assert len(cells) == count * (1 + n + (packed_size(m) if family.spread else 0))
    return plain, MixtureStart(tuple(cells), family, count, m)


def _choose_placeholder(family: Family, m: int) -> list[float]:
    """Return the placeholder for a component's mean before the first row."""
    if isinstance(family, Categorical):
        return [1.0 / len(part) for part in family.parts() for _ in part]
    return [INSTEAD[family.mean]] * m


def list_start_controls(start: MixtureStart | None) -> set[int]:
    """Return the indices of the controls that a start uses."""
    return set() if start is None else {a.index for a in start.cells if isinstance(a, Column)}


def _check_list(field: str, value: Any, count: int) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)) or len(value) != count:
        raise ModelError(field, "is not one for each component", f"write a list of {count}")
    return value


def _has_texts(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, (list, tuple)) and any(_has_texts(a) for a in value))
