"""Show broken model specs where Airflow shows errors: no DAG, only an import error while one is broken.

The other files leave a broken model out, so that its mistake takes no other model's DAGs down.
"""

from __future__ import annotations

from jobs.specs.model_spec import SpecError
from kalman_dags.specs import read_specs

_, problems = read_specs()
if problems:
    raise SpecError(problems)
