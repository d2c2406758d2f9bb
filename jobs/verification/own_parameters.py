"""Initial states of keys with learned parameters, to filter their history once more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from pyspark.sql import functions as F

from jobs.snapshots.state_rows import find_state_extras_widths
from jobs.state.encoding.arrow import build_matrix
from jobs.state.encoding.keys import build_identity_arrays, build_identity_columns
from jobs.state.encoding.rows import KeyedRows
from kalman.types import Filter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.snapshots.runtime import ModelRuntime
    from jobs.verification.gathering import KeySample

MOST_KEYS = 1_000_000
"""Maximum number of keys whose parameters are sent to the workers, some 50 bytes each."""
FIELD = "parameters"
"""Field of a state with the key's parameters."""


class TooManyKeys(ValueError):
    """Raised when there are more keys than can be sent to the workers."""


@dataclass(frozen=True)
class LearnedInitialStates:
    """Function that returns the initial states of a bucket's keys, each with its parameters. Picklable.

    identity: arrays (K,) of the keys' identities, sorted by route; values (d, K): their parameters. A key that is not
    among them begins as the model defines.
    """

    kernel: Filter
    identity: dict[str, NDArray]
    values: NDArray[np.float64]

    def __call__(self, keyed: KeyedRows) -> NDArray[np.float64]:
        """Return the states (size, J)."""
        keys = keyed.keys
        states = self.kernel.initial(keys.size)
        route = np.ascontiguousarray(keys.arrays["route"])
        place = np.searchsorted(self.identity["route"], route)
        at = np.flatnonzero(place < len(self.identity["route"]))
        for name, known in self.identity.items():
            at = at[known[place[at]] == keys.arrays[name][at]]
        states[:, at] = self.kernel.with_parameters(states[:, at], self.values[:, place[at]])
        return states


def read_learned_states(rows: DataFrame, runtime: ModelRuntime, sample: KeySample) -> LearnedInitialStates:
    """Return the learned parameters of the sampled keys in a snapshot's rows.

    Raises:
        TooManyKeys: there are more keys than can be sent to the workers.
    """
    chosen = rows.filter(sample.has(F.col("key"))).select(
        *build_identity_columns(runtime.kind, F.col("key")), F.col("extras")[FIELD].alias(FIELD)
    )
    table = chosen.drop("text").limit(MOST_KEYS + 1).toArrow().combine_chunks()
    if table.num_rows > MOST_KEYS:
        raise TooManyKeys
    columns = {name: table[name].to_numpy() for name in table.column_names if name != FIELD}
    identity = build_identity_arrays(columns)
    order = np.argsort(identity["route"], kind="stable")
    width = find_state_extras_widths(runtime.kernel)[FIELD]
    values = build_matrix(table[FIELD].combine_chunks(), width, FIELD)
    return LearnedInitialStates(
        runtime.kernel, {name: a[order] for name, a in identity.items()}, values[:, order]
    )
