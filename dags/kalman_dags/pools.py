"""The pools that the DAGs need, one slot a stream, as JSON for `airflow pools import`."""

from __future__ import annotations

import json
import sys

from jobs.spec import ModelSpec
from kalman_dags.family import monitor_pool, specs, stream_pool


def pools(models: list[ModelSpec]) -> dict[str, dict[str, object]]:
    """Return the pools as `airflow pools import` reads them."""
    wanted = {stream_pool(spec.name): f"the stream of {spec.name}" for spec in models}
    watched = (spec for spec in models if spec.monitor is not None)
    wanted |= {monitor_pool(spec.name): f"the monitor of {spec.name}" for spec in watched}
    return {
        name: {
            "slots": 1,
            "description": f"One driver at a time for {what}",
            # A deferred task still holds its stream.
            "include_deferred": True,
        }
        for name, what in wanted.items()
    }


if __name__ == "__main__":
    json.dump(pools(list(specs())), sys.stdout, indent=2)
    print()
