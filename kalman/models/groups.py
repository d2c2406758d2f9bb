"""Parameters of groups of keys, stored under `groups` beside the pooled values of learned parameters.

by          names of the key columns that define the groups
values      texts of these columns, for each group
parameters  each group's learned parameters by name; with scope: key, the centre of the parameters of the group's keys
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kalman.types import Array, Filter, ModelError

GROUPS = "groups"
Build = Callable[[Mapping[str, Any], Mapping[str, Any] | None], Filter]


def select_pooled(definition: Mapping[str, Any], parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the pooled parameters. Raises ModelError if the model does not learn by the groups in `parameters`."""
    found = parameters.get(GROUPS)
    if found is None:
        return parameters
    learn = definition.get("learn") or {}
    if learn.get("scope") not in ("group", "key") or list(learn.get("by") or ()) != list(found["by"]):
        problem = f"they were learned by {', '.join(found['by'])}, and the model learns otherwise"
        raise ModelError(f"parameters.{GROUPS}", problem, "learn again")
    return {name: value for name, value in parameters.items() if name != GROUPS}


def begin_states(build: Build, definition: Mapping[str, Any], parameters: Mapping[str, Any]) -> Array:
    """Return initial states (size, G + 1), one for each group, and the last for keys without a known group.

    build: the function `kalman.build`. Raises ModelError if a group's parameters do not fit the model.
    """
    rest = select_pooled(definition, parameters)
    own = parameters[GROUPS]["parameters"] if GROUPS in parameters else []
    return np.concatenate([build(definition, {**rest, **one}).initial(1) for one in (*own, {})], axis=1)
