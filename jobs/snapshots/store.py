"""Write, verify and remove snapshots: state rows first, then the manifest row that makes the snapshot exist."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jobs.core.errors import UserError
from jobs.snapshots import learned_rows, verified_rows, waiting_rows
from jobs.snapshots.manifests import GOOD, KEYS, REMOVED, Manifest, all_of, find, row_of
from jobs.snapshots.row_ids import TABLE as IDS
from jobs.snapshots.state_files import measure_stored, write_states
from jobs.snapshots.state_rows import StateRows
from jobs.snapshots.verified_rows import STATES, RowsDigest, read_rows
from jobs.snapshots.waiting_rows import TABLE as WAITING
from jobs.spark.conf import codegen_for
from jobs.spark.warehouse import Warehouse
from jobs.storage.replaced_files import delete_rows
from jobs.storage.row_changes import NOW, add_columns, put_rows, update_rows
from jobs.storage.tables import MANIFESTS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.snapshots.state_files import Measured
    from jobs.snapshots.waiting_rows import Held


def write(
    warehouse: Warehouse,
    manifest: Manifest,
    states: StateRows | DataFrame,
    held: Held | None = None,
    learned: DataFrame | None = None,
    check: Callable[[Manifest], None] | None = None,
) -> Manifest:
    """Write a snapshot: its rows, replacing those of a killed attempt, then its manifest. Return the written manifest.

    Killed before the manifest is committed, the snapshot does not exist, and the next attempt overwrites its rows. A
    snapshot that exists with damaged rows gets new rows, and one commit points its manifest to them.

    Args:
        warehouse: of the snapshot.
        manifest: describes the snapshot. Count, checksum and table version are filled in here; its `key_count` is the
            number of keys to expect, about.
        states: key (text), state_index, event_time, mean, covariance, log_likelihood, extras; or how tasks make them.
        held: waiting rows and remembered ids, for a model whose rows wait for a watermark.
        learned: what was learned (`learned_rows.COLUMNS`), if anything was.
        check: called with the manifest before it is committed; what it raises leaves rows without a manifest.
    """
    with codegen_for(warehouse.spark, manifest.key_count):
        version, (count, checksum, total) = write_states(warehouse, manifest, states)
    waiting = None if held is None else waiting_rows.write(warehouse, manifest, held)
    told = None if learned is None else learned_rows.write(warehouse, manifest, learned)
    found = {"key_count": count, "checksum": checksum, "rows": total, "snapshots_version": version}
    written = replace(manifest, **found, status=GOOD, waiting=waiting, learned=told)
    if check is not None:
        check(written)
    return _commit(warehouse, written)


def _commit(warehouse: Warehouse, manifest: Manifest) -> Manifest:
    """Commit the manifest of a snapshot whose rows are written, and return it as its table has it.

    A new manifest, and that of a snapshot that was removed, are put as a whole. One that is there is pointed to its
    rows, which were written again.
    """
    warehouse.create("manifests", MANIFESTS)
    add_columns(warehouse, "manifests", MANIFESTS)  # those that a table of an earlier release lacks
    row = {**row_of(manifest), "committed_at": NOW}
    names = ["key_count", "checksum", "rows", "snapshots_version", "parameters"]
    names += [name for name in ("waiting", "learned") if row[name] is not None]

    def changed(there: list[dict[str, Any]]) -> list[dict[str, Any]]:
        before = next((one for one in there if one["snapshot_id"] == manifest.snapshot_id), None)
        if before is None or before["status"] == REMOVED:
            return [row]
        return [{**before, **{name: row[name] for name in names}}]

    put_rows(warehouse, "manifests", KEYS, changed)
    written = find(warehouse, manifest.snapshot_id)
    assert written is not None
    return written


def remove(warehouse: Warehouse, model: str, names: list[str]) -> None:
    """Remove snapshots: first mark their manifests, in one commit, so that no valid manifest is without its rows.

    Killed in between, the next call removes the rows of the marked manifests.
    """
    if not warehouse.exists("manifests"):
        return
    if names:
        chosen = {"model": model, "snapshot_id": tuple(names)}
        update_rows(warehouse, "manifests", KEYS, chosen, {"status": REMOVED})
    gone = [one.snapshot_id for one in all_of(warehouse, model) if one.status == REMOVED]
    for table in (STATES, WAITING, IDS, learned_rows.TABLE) if gone else ():
        delete_rows(warehouse, table, [[("model", "=", model), ("snapshot_id", "in", gone)]])


def find_whole(warehouse: Warehouse, snapshot_id: str) -> Manifest | None:
    """Return a snapshot's manifest if it exists and its rows are whole; None means that it has to be written."""
    found = find(warehouse, snapshot_id)
    try:
        if found is not None:
            verify(warehouse, found)
            learned_rows.verified(warehouse, found)
    except UserError:
        return None
    return found


def verify(warehouse: Warehouse, manifest: Manifest) -> DataFrame:
    """Return a snapshot's state rows, pinned to a version of their table, after checking that they are whole.

    Raises:
        UserError: rows are missing, doubled or changed.
    """
    return read_rows(warehouse, manifest.snapshot_id, manifest.model, whole_version(warehouse, manifest))


def whole_version(
    warehouse: Warehouse,
    manifest: Manifest,
    measure: Callable[[Warehouse, Manifest, int], Measured] | None = None,
) -> int:
    """Return a version of the table in which a snapshot's state rows are whole (`verified_rows.whole_version`).

    Args:
        warehouse: of the snapshot.
        manifest: of the snapshot.
        measure: reads its rows, as `measure_batches` does in this process; None: tasks of Spark do.

    Raises:
        UserError: rows are missing, doubled or changed.
    """
    measured = measure_stored if measure is None else measure
    digest = RowsDigest(manifest.key_count, manifest.checksum, manifest.snapshots_version)
    return verified_rows.whole_version(
        warehouse,
        STATES,
        manifest.snapshot_id,
        digest,
        lambda version: measured(warehouse, manifest, version)[:2],
        "keys",
    )
