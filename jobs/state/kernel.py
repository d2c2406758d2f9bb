"""Check a model spec with the numerics, and find the linear map from its states to its measurements."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import kalman
from jobs.specs.loading import load_spec
from jobs.specs.model_spec import ModelSpec, SpecError
from jobs.specs.problems import suggest_word
from kalman.evaluation.row_figures import check_figures
from kalman.filters.linear import LinearFilter, check_length
from kalman.learning.learners import learnable

SURELY_FEW = 20
"""Number of states up to which the program of a filter step is never too long, for any matrices of the model."""


def load_checked_spec(name_or_path: str | Path, models_dir: str | Path | None = None) -> ModelSpec:
    """Load a spec as `load_spec` does, and check it with the numerics.

    Raises:
        SpecError: the file is missing, is not YAML, is not a valid spec, or its model cannot be built.
    """
    return check_numerics(load_spec(name_or_path, models_dir))


def check_numerics(spec: ModelSpec) -> ModelSpec:
    """Check kinds, dimensions, covariances and learnable parameters; return the spec.

    Raises:
        SpecError: the model cannot be built.
    """
    definition = spec.definition()
    try:
        kernel = kalman.build(definition)
        if isinstance(kernel, LinearFilter) and len(spec.states) > SURELY_FEW:
            check_length(kernel)
        check_figures(kernel, spec.outputs.figures)
        if spec.learn is not None:
            learnable(definition)
    except kalman.ModelError as error:
        hint = _suggest_word(error.field, error.problem, error.remedy)
        raise SpecError(spec.problem(error.field, error.problem, f"{hint} {error.remedy}")) from error
    return spec


def _suggest_word(field: str, problem: str, remedy: str) -> str:
    """Return the phrase `did you mean 'x'?` if the remedy lists the known words."""
    listed = re.search(r"(?:choose one of|choose from|known are) (.+)$", remedy)
    written = re.match(r"'([^']*)'|the model has no parameter '([^']*)'", problem)
    word = next(filter(None, written.groups()), "") if written else field.rsplit(".", 1)[-1]
    return suggest_word(word, listed[1].split(", ")) if listed else ""


Floats = NDArray[np.float64]


class LinearMeasuring(NamedTuple):
    """The constant matrix H (m, n) and offset (m,) by which the states give the measurements."""

    H: Floats
    offset: Floats


def find_measuring(spec: ModelSpec) -> LinearMeasuring | None:
    """Return the constant map from states to measurements; None if the map depends on the row or is not linear."""
    try:
        kernel: Any = kalman.build(spec.definition())
        H = np.array(kernel.H, float)
        offset = np.array(kernel.offset or np.zeros(len(H)), float)
    except (AttributeError, TypeError, ValueError, kalman.ModelError):
        return None
    return LinearMeasuring(H, offset) if H.shape == (len(spec.measurement), len(spec.states)) else None


def find_measured_direction(spec: ModelSpec) -> Floats | None:
    """Return the first row of H (n,); None if this row is not constant, or an offset is added."""
    found = find_measuring(spec)
    return None if found is None or found.offset.any() else found.H[0]


def project_states(mean: Floats, covariance: Floats, h: Floats, offset: float) -> tuple[Floats, Floats]:
    """Return mean and variance (N,) of h x + offset without measurement noise; only states with h != 0 are used."""
    used = np.flatnonzero(h)
    part = covariance[:, used[:, None], used]
    with np.errstate(invalid="ignore"):  # infinity minus infinity is NaN: no band is drawn
        return mean @ h + offset, np.einsum("i,nij,j->n", h[used], part, h[used])
