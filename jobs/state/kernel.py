"""Check a model spec with the numerics, for the checks that the package `specs` cannot make without them."""

from __future__ import annotations

import re
from pathlib import Path

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
