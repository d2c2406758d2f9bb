"""A daemon for Spark's Python workers that has already loaded everything that the operators import.

Spark forks its Python workers from a daemon. Spark's own daemon loads almost nothing, so every new worker imports
NumPy, pandas, Arrow and the filters, which takes longer than filtering a million rows (docs/decisions/0018). This
daemon imports these modules once, and its forks share them; in all other respects it is Spark's daemon. The setting
`spark.python.daemon.module` selects this daemon (`jobs.spark.conf`).
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from importlib.machinery import PathFinder

_ARCHIVES = ("pyspark.zip", "-src.zip")

MODULES = (
    "numpy",
    "pandas",
    "pyarrow",
    "pyspark.worker",
    "pyspark.sql.pandas.serializers",
    "pyspark.sql.streaming.proto.StateMessage_pb2",
    "pyspark.sql.streaming.stateful_processor_api_client",
    "pyspark.sql.streaming.stateful_processor_util",
    "pyspark.testing.utils",  # every call of the state client uses this module
    "kalman",
    "jobs.state.encoding.estimates",
    "jobs.batch.batch_filter",
    "jobs.batch.file_rows",
    "jobs.snapshots.state_rows",
    "jobs.streaming.estimate_files",
    "jobs.streaming.planned_rows",
    "jobs.streaming.processors",
)
"""The modules that a worker of a stream or a batch pass needs; these modules import all others."""


def drop_archived_pyspark() -> None:
    """Drop Spark's archive of PySpark from the path where Spark is part of the installed PySpark.

    The modules of an archive are compiled at every start.
    """
    installed = [path for path in sys.path if not path.endswith(_ARCHIVES)]
    found, home = PathFinder.find_spec("pyspark", installed), os.environ.get("SPARK_HOME", "")
    if found and os.path.isdir(home) and os.path.samefile(os.path.dirname(str(found.origin)), home):
        sys.path[:] = installed


def load_modules() -> None:
    """Load the modules, and exclude them from garbage collection, which runs after each task of a worker."""
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    drop_archived_pyspark()

    from pyspark.daemon import manager

    load_modules()
    manager()
