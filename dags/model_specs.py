"""Show broken model specs where Airflow shows errors: as an import error of this file, which has no DAG.

The other files skip a broken spec, so that the DAGs of the other models remain.
"""

from __future__ import annotations

from jobs.specs.model_spec import SpecError
from kalman_dags.specs import read_specs

_, problems = read_specs()
if problems:
    raise SpecError(problems)
