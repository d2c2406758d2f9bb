"""Key-specific parameters: names, values, and places in the field `parameters` of the state."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from kalman.filters.gaussian import GaussianFilter
from kalman.filters.linear import LinearFilter
from kalman.filters.multiple_models import MultipleModels
from kalman.filters.robust.gaussian import RobustGaussianFilter
from kalman.filters.robust.linear import RobustLinearFilter
from kalman.filters.robust.step import locate_key_parameters
from kalman.filters.state_layout import locate_fields, unwrap_filter
from kalman.models.structure import Parameter
from kalman.types import Array, Filter

FIELD = "parameters"


class KeyParameterLayout(NamedTuple):
    """Key-specific parameters of a filter.

    parameters: from a parameter's name to the parameter with the value of a new key
    rows: from a parameter's name to its rows in the field `parameters`
    learned: names of the parameters that `with_parameters` sets, in order
    adapted: names of the parameters that adaptive noise moves with each row
    """

    parameters: dict[str, Parameter]
    rows: dict[str, slice]
    learned: tuple[str, ...]
    adapted: tuple[str, ...]


def find_key_parameters(model: Filter) -> KeyParameterLayout:
    """Return the key-specific parameters of a filter; the result is empty if keys share all parameters."""
    model = unwrap_filter(model)
    if isinstance(model, MultipleModels):
        named = {p.name: p for p in model.own}
        return KeyParameterLayout(named, locate_key_parameters(model.own, tuple(named), 0), tuple(named), ())
    base = model.base if isinstance(model, RobustLinearFilter) else model
    if not isinstance(base, (LinearFilter, GaussianFilter)) or not base.own:
        return KeyParameterLayout({}, {}, (), ())
    rows = locate_key_parameters(base.parameters, base.own, 0)
    named = {parameter.name: parameter for parameter in base.parameters if parameter.name in rows}
    if isinstance(model, (RobustLinearFilter, RobustGaussianFilter)):
        return KeyParameterLayout(named, rows, model.learned, model.adaptive.names)
    return KeyParameterLayout(named, rows, tuple(rows), ())


def with_key_parameters(model: Filter, state: Array, values: Mapping[str, Array]) -> Array:
    """Return states (size, K) with these learned parameters, (d, K) by name; other parameters are unchanged."""
    own = find_key_parameters(model)
    if not own.learned:
        return state
    field = state[locate_fields(model.fields)[FIELD]]
    given = [values.get(name, field[own.rows[name]]) for name in own.learned]
    return model.with_parameters(state, np.concatenate(given))


def copy_key_parameters(model: Filter, state: Array, field: Array, adapted: bool = True) -> Array:
    """Return states (size, K) with learned parameters from the field `parameters` (p, K) of other states.

    adapted: whether to copy the adapted parameters also; otherwise these parameters are unchanged.
    """
    own = find_key_parameters(model)
    names = own.learned if adapted else [name for name in own.learned if name not in own.adapted]
    return with_key_parameters(model, state, {name: field[own.rows[name]] for name in names})
