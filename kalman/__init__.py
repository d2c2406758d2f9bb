"""Kalman-family filters for many independent keys, in NumPy alone: no Spark, no I/O, no clock.

Arrays have the keys on their last axis. `build` makes a filter of a model definition, `run` takes rows
through it, `learning` finds its parameters.
"""

from kalman.building.registry import FILTERS, build
from kalman.flags import FLAGS
from kalman.models.structures import STRUCTURES
from kalman.run import KeyStates, Outputs, SortedRows, initial_states, run
from kalman.types import Filter, ModelError, Rows, Step

__all__ = [
    "FILTERS",
    "FLAGS",
    "STRUCTURES",
    "Filter",
    "KeyStates",
    "ModelError",
    "Outputs",
    "Rows",
    "SortedRows",
    "Step",
    "build",
    "initial_states",
    "run",
]
