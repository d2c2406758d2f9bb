"""Parameters by group of keys, which learned parameters hold beside the values of all, under `groups`:

by          names of the key columns that define the groups
values      of each group: the texts of those columns
parameters  of each group: its learned parameters by name, or the middle of its keys' with scope: key
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kalman.types import Array, Filter, ModelError

GROUPS = "groups"
Build = Callable[[Mapping[str, Any], Mapping[str, Any] | None], Filter]


def pooled(definition: Mapping[str, Any], parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the pooled parameters. Raises ModelError where the model does not learn by these groups."""
    found = parameters.get(GROUPS)
    if found is None:
        return parameters
    learn = definition.get("learn") or {}
    if learn.get("scope") not in ("group", "key") or list(learn.get("by") or ()) != list(found["by"]):
        problem = f"they were learned by {', '.join(found['by'])}, and the model learns otherwise"
        raise ModelError(f"parameters.{GROUPS}", problem, "learn again")
    return {name: value for name, value in parameters.items() if name != GROUPS}


def begin_states(build: Build, definition: Mapping[str, Any], parameters: Mapping[str, Any]) -> Array:
    """Return the initial states (size, G + 1) of the keys of each group, and last that of keys of no known group.

    build: `kalman.build`. Raises ModelError where a group's parameters do not fit the model.
    """
    rest = pooled(definition, parameters)
    own = parameters[GROUPS]["parameters"] if GROUPS in parameters else []
    return np.concatenate([build(definition, {**rest, **one}).initial(1) for one in (*own, {})], axis=1)
