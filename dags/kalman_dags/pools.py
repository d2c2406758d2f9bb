"""Pools of the DAGs, with one slot for each stream, monitor and skill, as JSON for `airflow pools import`."""

from __future__ import annotations

import json
import sys

from jobs.specs.model_spec import ModelSpec
from kalman_dags.dag_defaults import name_pool
from kalman_dags.specs import list_driven_verbs, load_specs


def list_pools(models: list[ModelSpec]) -> dict[str, dict[str, object]]:
    """Return the pools in the format of `airflow pools import`."""
    return {
        name_pool(verb, spec.name): {
            "slots": 1,
            "description": f"One driver at a time for the {verb} of {spec.name}",
            # A deferred task still holds its stream.
            "include_deferred": True,
        }
        for spec in models
        for verb in list_driven_verbs(spec)
    }


if __name__ == "__main__":
    json.dump(list_pools(list(load_specs())), sys.stdout, indent=2)
    print()
