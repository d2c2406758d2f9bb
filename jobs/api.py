"""The public interface for notebooks and other programs: a Spark session, the warehouse, model specs and the estimates.

Every name listed here keeps its meaning from release to release; other modules of `jobs` may change. The numerics are
in `kalman`; `jobs.offline.plots` draws pictures and needs matplotlib.
"""

from __future__ import annotations

from jobs.core.errors import UserError
from jobs.core.settings import Settings
from jobs.lineage.live import is_live, latest_corrections, live_estimates, live_latest
from jobs.spark.session import spark_session
from jobs.spark.warehouse import Warehouse
from jobs.specs.loading import load_all, load_spec
from jobs.specs.model_spec import ModelSpec, SpecError
from jobs.supervision.progress import progress_of

__all__ = [
    "ModelSpec",
    "Settings",
    "SpecError",
    "UserError",
    "Warehouse",
    "is_live",
    "latest_corrections",
    "live_estimates",
    "live_latest",
    "load_all",
    "load_spec",
    "progress_of",
    "spark_session",
]
