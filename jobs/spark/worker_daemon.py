"""Start Spark's Python workers with everything that our operators import already loaded.

Spark forks its Python workers from a daemon. The one that comes with it has loaded next to nothing, so every new worker
imports NumPy, pandas, Arrow and the filters by itself, which takes longer than filtering a million rows
(docs/decisions/0018). This daemon imports them once; its forks share what is loaded. It is Spark's own in everything
else, and is chosen by `spark.python.daemon.module` (`jobs.spark.conf`).
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
    "pyspark.testing.utils",  # the client of the state asks it about NumPy at every call
    "kalman",
    "jobs.encoding.estimates",
    "jobs.training.batch_filter",
    "jobs.snapshots.store",
    "jobs.streaming.operators.event_time_processor",
)
"""What a worker of the stream or of a batch pass needs, with all that these import."""


def warm() -> None:
    """Load the modules, and take them out of the garbage collector's sight: it runs after each task of a worker."""
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    from pyspark.daemon import manager

    warm()
    manager()
