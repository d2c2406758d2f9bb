"""The learner of a model definition."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kalman.filters.multiple_models import SEVERAL
from kalman.learning.em import Learner
from kalman.learning.em_linear import build_em_learner
from kalman.learning.filter_learning import build_mode_learner, filter_learner, select_heavy_tailed
from kalman.learning.maximum_likelihood import build_linear_learner
from kalman.learning.mixtures import build_mixture_learner
from kalman.mixtures.building import FAMILIES
from kalman.types import ModelError

LEARNERS: dict[str, Callable[[Mapping[str, Any]], Learner]] = {
    **dict.fromkeys(FAMILIES, build_mixture_learner),
    **dict.fromkeys(SEVERAL, build_mode_learner),
    **dict.fromkeys(("extended", "unscented", "cubature"), filter_learner),
}
"""Learners by kind of filter; other kinds use the linear filter's exact gradient, except with heavy-tailed noise."""


def learnable(definition: Mapping[str, Any]) -> Learner:
    """Return the learner of a definition's `learn.parameters`. Raises ModelError."""
    method = (definition.get("learn") or {}).get("method") or "mle"
    if method not in ("mle", "em"):
        raise ModelError("learn.method", f"{method!r} is not known", "choose mle or em")
    kind = definition.get("filter", "linear")
    if kind in LEARNERS:
        return LEARNERS[kind](definition)
    if kind == "linear" and select_heavy_tailed(definition):
        return filter_learner(definition)
    found = build_linear_learner(definition)
    return build_em_learner(found) if method == "em" else found
