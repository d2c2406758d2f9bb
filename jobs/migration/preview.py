"""Tell how a migration would change the states of a snapshot without Spark, where the warehouse is local."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from jobs.core.errors import RUN_FAILED, UserError
from jobs.migration.apply import measurer, summed
from jobs.migration.migrating import plan_of, refuse_bad_states, refuse_waiting
from jobs.snapshots.manifests import find
from jobs.snapshots.state_rows import extras_widths, with_extras
from jobs.storage.table_rows import parts_of
from jobs.storage.warehouse import Tables

if TYPE_CHECKING:
    from jobs.migration.state_map import Migration
    from jobs.migration.versions import Step
    from jobs.snapshots.manifests import Manifest

BATCH = 10_000
"""How many keys are migrated together."""


def preview(
    tables: Tables, source: Manifest, steps: list[Step]
) -> tuple[Manifest | None, dict[str, Any]] | None:
    """Return the snapshot that an earlier run has made, if it has, and how the states would change.

    None: only Spark can tell, as keys become others. The checksum of the rows is Spark's, so it is not verified here;
    their number is.

    Raises:
        UserError: a step cannot be made, rows are missing, or some keys would have an invalid state.
    """
    plan, spec = plan_of(source, steps), steps[-1].new
    if any(step.keys is not None for step in steps):
        return None
    found, told = find(tables, plan.snapshot_id), {"parameters": plan.changes}
    if found is not None:
        return found, told
    if source.waiting is not None:
        refuse_waiting(source, spec)
    measure = measurer(plan.migration)
    parts = [row for batch in measure(_states(tables, source, plan.migration)) for row in batch.to_pylist()]
    change = {**summed(parts, plan.migration), **told}
    keys = change["keys"] + change["left_out"]
    if keys != source.key_count:
        raise UserError(
            f"snapshot {source.snapshot_id} is damaged: {keys} keys, where its manifest says {source.key_count}; "
            f"start from another snapshot or pretrain again",
            RUN_FAILED,
        )
    refuse_bad_states(change, source, spec.version)
    return None, change


def _states(tables: Tables, source: Manifest, migration: Migration) -> Iterator[pa.RecordBatch]:
    """Yield a snapshot's state rows, in the columns that a migration reads."""
    columns = ["key", "mean", "covariance", "extras"]
    names = list(extras_widths(migration.source))
    mine = {"model": source.model, "snapshot_id": source.snapshot_id}
    # Rows of a snapshot are written once, so those of the newest version of the table are those of the first.
    for part in parts_of(tables.root, "snapshots", columns, mine):
        for batch in part.select(columns).combine_chunks().to_batches(max_chunksize=BATCH):
            yield with_extras(batch, names)
