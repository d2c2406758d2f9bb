"""From a model definition, as written in a spec, to a filter."""

from collections.abc import Callable, Mapping
from typing import Any

from kalman.definition import Definition
from kalman.fixed_lag import fixed_lag
from kalman.linear import build_linear
from kalman.types import Filter, ModelError


def build(definition: Definition, parameters: Mapping[str, Any] | None = None) -> Filter:
    """Return the filter that a definition describes, with learned `parameters` in place of the written ones.

    The definition has the keys of a model spec: filter, states, measurement, control, process, observation,
    initial, learn, smoothing. Raises ModelError, which names the field.
    """
    kind = definition.get("filter", "linear")
    if not isinstance(kind, str) or kind not in FILTERS:
        raise ModelError("filter", f"{kind!r} is not a filter", f"choose one of {', '.join(FILTERS)}")
    return fixed_lag(definition, FILTERS[kind](definition, parameters or {}))


FILTERS: dict[str, Callable[[Definition, Mapping[str, Any]], Filter]] = {"linear": build_linear}
"""What builds each kind of filter. A new kind is one more entry."""
