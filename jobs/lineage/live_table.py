"""The table `live`, for other readers: the generations and micro-batches whose estimates are live.

It repeats what `generations` says (`jobs.lineage.live`), so that any reader finds the live rows by one join: the row's
`generation` is in the table, and its `batch_id` is at most `last_batch`. Beside that it names the states, in the order
of the numbers in `mean`, and the key columns. `generations` stays the truth: a switch is one commit there, and the verb
that switched writes this table after it. A verb that is killed in between leaves the former lineage here, whole, until
the next start of a driver, `promote`, `rollback`, `upgrade` or `maintain`.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from jobs.lineage import generations
from jobs.lineage.generations import trace_live_lineage
from jobs.snapshots import manifests
from jobs.storage.replaced_files import replace_partition
from jobs.storage.table_log import Conflict
from jobs.storage.table_rows import read_table
from jobs.storage.tables import LIVE_ESTIMATES
from jobs.storage.warehouse import Tables

if TYPE_CHECKING:
    from jobs.lineage.generations import Generation
    from jobs.snapshots.manifests import Manifest

TABLE = "live"
NO_END = (1 << 63) - 1
"""`last_batch` of the live generation, which has no end: the largest number of the column's type."""
_ATTEMPTS = 5
"""Each further attempt means that a switch came between; the next refresh completes what these leave."""
_TEXTS = pa.list_(pa.string())
_SCHEMA = pa.schema(
    [
        ("model", pa.string()),
        ("place", pa.int32()),
        ("generation", pa.string()),
        ("last_batch", pa.int64()),
        ("model_version", pa.int32()),
        ("states", _TEXTS),
        ("key_columns", _TEXTS),
    ]
)


def refresh_live_table(warehouse: Tables, model: str) -> bool:
    """Write a model's rows of the table, a commit each time they have changed; return whether they have.

    The generations are read again after each write: rows read before another command's switch, written after its own
    refresh, would otherwise stay until the next start of a driver.
    """
    changed = False
    for _ in range(_ATTEMPTS):
        rows = build_live_rows(
            generations.read_generations(warehouse, model), manifests.read_manifests(warehouse, model)
        )
        if not rows and not warehouse.exists(TABLE):
            break
        warehouse.create(TABLE, LIVE_ESTIMATES, ("model",))
        if _read_present_rows(warehouse, model) == rows:
            break
        changed = True
        with suppress(Conflict):  # another command writes this table at the same time: compare again
            replace_partition(warehouse, TABLE, "model", model, pa.Table.from_pylist(rows, _SCHEMA))
    return changed


def build_live_rows(known: list[Generation], snapshots: list[Manifest]) -> list[dict[str, Any]]:
    """Return the rows of a model's generations with live micro-batches, the live generation first."""
    by_name = {one.generation: one for one in known}
    specs = {one.snapshot_id: json.loads(one.spec) for one in snapshots}
    segments = [(by_name[name], last) for name, last in trace_live_lineage(known) if last != -1]
    return [
        {
            "model": one.model,
            "place": place,
            "generation": one.generation,
            "last_batch": NO_END if last is None else last,
            "model_version": one.model_version,
            "states": specs.get(one.snapshot_id, {}).get("states"),
            "key_columns": specs.get(one.snapshot_id, {}).get("key"),
        }
        for place, (one, last) in enumerate(segments)
    ]


def _read_present_rows(warehouse: Tables, model: str) -> list[dict[str, Any]]:
    """Return a model's rows in the table, in order of place."""
    names = [name for name in _SCHEMA.names if name != "model"]
    found = read_table(warehouse.root, TABLE, names, partition={"model": model})
    rows = [] if found is None else [{"model": model, **row} for row in found.to_pylist()]
    return sorted(rows, key=lambda row: row["place"])
