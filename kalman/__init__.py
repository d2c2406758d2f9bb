"""Kalman-family filters for many independent keys, in NumPy alone: no Spark, no I/O, no clock.

Arrays have the keys on their last axis. `build` makes a filter from a model definition, `run` filters rows, `smooth`
smooths rows, `forecast` predicts. `kalman.learning.learners.learnable` returns the learner of a model's parameters.
This module does not import `kalman.learning`, since SciPy's optimisers take longer to import than the rest of the
package.
"""

from kalman.building.registry import FILTERS, build
from kalman.evaluation.forecast import forecast
from kalman.filters.numerics import NUMERICS
from kalman.flags import FLAGS
from kalman.models.structures import STRUCTURES
from kalman.run import KeyStates, Outputs, SortedRows, initial_states, run
from kalman.smoothers.smooth import smooth
from kalman.types import Filter, ModelError, Rows, Step

__all__ = [
    "FILTERS",
    "FLAGS",
    "NUMERICS",
    "STRUCTURES",
    "Filter",
    "KeyStates",
    "ModelError",
    "Outputs",
    "Rows",
    "SortedRows",
    "Step",
    "build",
    "forecast",
    "initial_states",
    "run",
    "smooth",
]
