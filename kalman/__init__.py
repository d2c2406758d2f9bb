"""Kalman-family filters for many independent keys, in NumPy alone: no Spark, no I/O, no clock.

Arrays have the keys on their last axis. `build` makes a filter of a model definition, `run` takes rows
through it, `learning` finds its parameters.
"""

from kalman.flags import FLAGS
from kalman.registry import FILTERS, build
from kalman.run import KeyStates, Outputs, SortedRows, initial_states, run
from kalman.structures import STRUCTURES
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
