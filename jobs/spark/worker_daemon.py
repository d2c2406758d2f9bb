"""A daemon for Spark's Python workers that has already loaded everything that the operators import.

Spark forks its Python workers from a daemon. Spark's daemon loads next to nothing, so every new worker imports NumPy,
pandas, Arrow and the filters. That takes longer than filtering a million rows (docs/decisions/0018). This daemon
imports them once, and its forks share them; otherwise it is Spark's daemon. `spark.python.daemon.module` selects it
(`jobs.spark.conf`).
"""

from __future__ import annotations

import gc
import importlib

MODULES = (
    "numpy",
    "pandas",
    "pyarrow",
    "pyspark.worker",
    "pyspark.sql.pandas.serializers",
    "pyspark.sql.streaming.proto.StateMessage_pb2",
    "pyspark.sql.streaming.stateful_processor_api_client",
    "pyspark.sql.streaming.stateful_processor_util",
    "pyspark.testing.utils",  # the state client uses it in every call
    "kalman",
    "jobs.state.encoding.estimates",
    "jobs.batch.batch_filter",
    "jobs.snapshots.state_rows",
    "jobs.streaming.operators.estimate_files",
    "jobs.streaming.operators.processor",
    "jobs.streaming.operators.wrappers",
)
"""The modules that a worker of the stream or of a batch pass needs; they import the others."""


def load_modules() -> None:
    """Load the modules and exclude them from garbage collection, which runs after each task of a worker."""
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    from pyspark.daemon import manager

    load_modules()
    manager()
