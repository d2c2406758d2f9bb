"""Build a filter of any kind from the model definition in a spec."""

from collections.abc import Callable, Mapping
from typing import Any

from kalman.building.gaussian import build_any_linear, build_cubature, build_extended, build_unscented
from kalman.building.modes import build_imm, build_mmae
from kalman.filters.gaussian import GaussianFilter
from kalman.filters.lms import build_lms, build_nlms
from kalman.filters.rls import build_rls
from kalman.filters.robust.gaussian import build_robust_gaussian
from kalman.filters.robust.linear import build_robust_linear
from kalman.filters.rounded import add_rounding
from kalman.filters.sliding_likelihood import add_sliding_likelihood
from kalman.mixtures.building import FAMILIES, build_mixture
from kalman.models.definition import Definition
from kalman.models.groups import select_pooled
from kalman.models.learned_entries import substitute_learned
from kalman.smoothers.fixed_lag import add_fixed_lag
from kalman.types import Filter, ModelError


def build(definition: Definition, parameters: Mapping[str, Any] | None = None) -> Filter:
    """Return the filter of a definition, with learned `parameters` in place of the written ones.

    Parameters learned by group are replaced by the pooled values (`kalman.models.groups` has those of each group).

    The definition has the keys of a model spec: filter, states, measurement, control, process, observation,
    initial, learn, robust, adaptive, smoothing, storage, modes, transition, imm, mmae, mixture,
    sliding_log_likelihood. Raises ModelError, which names the field.
    """
    definition, parameters = substitute_learned(definition, select_pooled(definition, parameters or {}))
    kind = definition.get("filter", "linear")
    if not isinstance(kind, str) or kind not in FILTERS:
        raise ModelError("filter", f"{kind!r} is not a filter", f"choose one of {', '.join(FILTERS)}")
    if definition.get("form") not in (None, "covariance") and kind not in FORMED:
        raise ModelError("form", f"the {kind} filter has none", f"remove it, or use {', '.join(FORMED)}")
    builders = FILTERS
    for section in ("robust", "adaptive"):
        if definition.get(section) is not None:
            builders = ROBUST
            if kind not in ROBUST:
                remedy = f"remove it, or use {', '.join(ROBUST)}"
                raise ModelError(section, f"the {kind} filter has none", remedy)
    model = add_fixed_lag(definition, builders[kind](definition, parameters))
    return add_rounding(definition, add_sliding_likelihood(definition, model))


Builder = Callable[[Definition, Mapping[str, Any]], Filter]

FORMED: dict[str, Builder] = {
    "linear": build_any_linear,
    "extended": build_extended,
    "unscented": build_unscented,
    "cubature": build_cubature,
}
"""Builders of the kinds of filters that have a `form`."""

FILTERS: dict[str, Builder] = {
    **FORMED,
    "rls": build_rls,
    "lms": build_lms,
    "nlms": build_nlms,
    "imm": lambda definition, learned: build_imm(definition, build, learned),
    "mmae": lambda definition, learned: build_mmae(definition, build, learned),
    **dict.fromkeys(FAMILIES, build_mixture),
}
"""Builders by kind of filter. A new kind is one more entry."""


def _build_robust(definition: Definition, learned: Mapping[str, Any]) -> Filter:
    plain = build_any_linear(definition, learned)
    if isinstance(plain, GaussianFilter):
        return build_robust_gaussian(plain, definition)
    return build_robust_linear(definition, learned)


ROBUST: dict[str, Builder] = {
    "linear": _build_robust,
    "extended": lambda definition, learned: build_robust_gaussian(
        build_extended(definition, learned), definition
    ),
    "unscented": lambda definition, learned: build_robust_gaussian(
        build_unscented(definition, learned), definition
    ),
    "cubature": lambda definition, learned: build_robust_gaussian(
        build_cubature(definition, learned), definition
    ),
    "imm": FILTERS["imm"],
    "mmae": FILTERS["mmae"],
}
"""Builders by kind of filter for definitions with a section `robust` or `adaptive`."""
