"""Show broken model specs where Airflow shows errors: no DAG, only an import error while a spec is broken.

The other files skip a broken spec, so that it does not take down the DAGs of other models.
"""

from __future__ import annotations

from jobs.specs.model_spec import SpecError
from kalman_dags.specs import read_specs

_, problems = read_specs()
if problems:
    raise SpecError(problems)
