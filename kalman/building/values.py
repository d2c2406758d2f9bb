"""The values of a model's parameters, by the names under which they are learned."""

from collections.abc import Mapping
from typing import Any

from kalman.building.registry import build
from kalman.filters.gaussian import GaussianFilter
from kalman.filters.linear import LinearFilter
from kalman.filters.multiple_models import MultipleModels
from kalman.filters.robust.linear import RobustLinearFilter
from kalman.filters.state_layout import unwrap_filter
from kalman.models import columns
from kalman.models.definition import Definition, convert_to_definition
from kalman.models.learned_entries import INITIAL, is_chosen, learn_requests
from kalman.models.learned_entries import list_chosen_parameters as chosen_entries
from kalman.types import Filter


def collect_parameter_values(
    definition: Definition, learned: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the values of a model's parameters as a definition writes them, learned ones in place of written ones.

    Parameters that come from columns have no values. Entries of F and H and the initial distribution are included where
    the definition asks to learn them. Raises ModelError.
    """
    learned = learned or {}
    found = _collect_values(unwrap_filter(build(definition, learned)))
    entries = [request for request in learn_requests(definition) if is_chosen(request.name)]
    if entries:
        found |= {
            parameter.name: convert_to_definition(parameter) for parameter in chosen_entries(definition)
        }
    return {**found, **{name: value for name, value in learned.items() if name in found or name in INITIAL}}


def _collect_values(model: Filter) -> dict[str, Any]:
    if isinstance(model, MultipleModels):
        found = {
            f"{name}.{parameter}": value
            for name, mode in zip(model.names, model.modes, strict=True)
            for parameter, value in _collect_values(unwrap_filter(mode)).items()
        }
        if model.transition is not None:
            found["transition"] = [list(row) for row in model.transition]
        return found
    base = model.base if isinstance(model, RobustLinearFilter) else model
    if not isinstance(base, (LinearFilter, GaussianFilter)):
        return {}
    return {p.name: convert_to_definition(p) for p in base.parameters if not columns.find_columns(p.value)}
