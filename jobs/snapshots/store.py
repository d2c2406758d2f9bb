"""Write, verify and remove snapshots; the state rows are written first, then the manifest makes the snapshot exist."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jobs.core.errors import UserError
from jobs.snapshots import learned_rows, verified_rows, waiting_rows
from jobs.snapshots.manifests import GOOD, KEYS, REMOVED, Manifest, build_manifest_row, find, read_manifests
from jobs.snapshots.row_ids import TABLE as IDS
from jobs.snapshots.state_rows import StateRows, measure_stored, read_stored_rows, write_states
from jobs.snapshots.verified_rows import STATES, RowsDigest, read_rows
from jobs.snapshots.waiting_rows import TABLE as WAITING
from jobs.spark.warehouse import Warehouse
from jobs.storage.row_changes import NOW, add_columns, delete_rows, put_rows, update_rows
from jobs.storage.tables import MANIFESTS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.snapshots.waiting_rows import Held


def write(
    warehouse: Warehouse,
    manifest: Manifest,
    states: StateRows | DataFrame,
    held: Held | None = None,
    learned: DataFrame | None = None,
    check: Callable[[Manifest], None] | None = None,
) -> Manifest:
    """Write a snapshot's rows, then its manifest; return the written manifest. Rows of a killed attempt are replaced.

    After a kill before the manifest's commit, the snapshot does not exist, and the next attempt overwrites its rows. If
    a snapshot exists with damaged rows, new rows are written, and one commit points the manifest to the new rows.

    Args:
        warehouse: warehouse of the snapshot.
        manifest: description of the snapshot. This function fills in count, checksum and table version; the given
            `key_count` is an estimate of the number of keys.
        states: rows with key (text), state_index, event_time, mean, covariance, log_likelihood, extras; or `StateRows`.
        held: waiting rows and remembered ids, for a model whose rows wait for a watermark; None without a watermark.
        learned: rows with `learned_rows.COLUMNS`; None if no parameters were learned.
        check: function called with the manifest before its commit; if it raises an error, the rows stay without a
            manifest. None means no check.
    """
    with warehouse.choose_codegen(manifest.key_count):
        version, (count, checksum, total) = write_states(warehouse, manifest, states)
    waiting = None if held is None else waiting_rows.write(warehouse, manifest, held)
    told = None if learned is None else learned_rows.write(warehouse, manifest, learned)
    found = {"key_count": count, "checksum": checksum, "rows": total, "snapshots_version": version}
    written = replace(manifest, **found, status=GOOD, waiting=waiting, learned=told)
    if check is not None:
        check(written)
    return _commit(warehouse, written)


def _commit(warehouse: Warehouse, manifest: Manifest) -> Manifest:
    """Commit the manifest of a snapshot whose rows are written, and return the stored manifest.

    A new manifest, or the manifest of a removed snapshot, is written as a whole. If a manifest exists, only its
    references to the rows are changed, because the rows were written again.
    """
    warehouse.create("manifests", MANIFESTS)
    add_columns(warehouse, "manifests", MANIFESTS)  # a table of an earlier release may lack some columns
    row = {**build_manifest_row(manifest), "committed_at": NOW}
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
    """Remove snapshots: first mark their manifests as removed, in one commit, so that no valid manifest lacks its rows.

    After a kill before the rows are removed, the next call removes the rows of the marked manifests.
    """
    if not warehouse.exists("manifests"):
        return
    if names:
        chosen = {"model": model, "snapshot_id": tuple(names)}
        update_rows(warehouse, "manifests", KEYS, chosen, {"status": REMOVED})
    gone = [one.snapshot_id for one in read_manifests(warehouse, model) if one.status == REMOVED]
    for table in (STATES, WAITING, IDS, learned_rows.TABLE) if gone else ():
        delete_rows(warehouse, table, [[("model", "=", model), ("snapshot_id", "in", gone)]])


def find_whole(warehouse: Warehouse, snapshot_id: str) -> Manifest | None:
    """Return the manifest of a snapshot if its rows are whole; None means that the snapshot must be written."""
    found = find(warehouse, snapshot_id)
    try:
        if found is not None:
            find_whole_states(warehouse, found)
            learned_rows.find_whole_version(warehouse, found)
    except UserError:
        return None
    return found


def verify(warehouse: Warehouse, manifest: Manifest) -> DataFrame:
    """Return a snapshot's state rows, pinned to a version of their table, after a check that the rows are whole.

    Raises:
        UserError: rows are missing, doubled or changed.
    """
    return read_rows(warehouse, manifest.snapshot_id, manifest.model, find_whole_states(warehouse, manifest))


def read_whole_states(warehouse: Warehouse, manifest: Manifest) -> StateRows:
    """Return the rows of `verify`, which the tasks that use them read from their files.

    Raises:
        UserError: rows are missing, doubled or changed.
    """
    return read_stored_rows(warehouse, manifest, find_whole_states(warehouse, manifest))


def find_whole_states(warehouse: Warehouse, manifest: Manifest) -> int:
    """Return a version of the table in which a snapshot's state rows are whole (`verified_rows.find_whole_version`).

    Raises:
        UserError: rows are missing, doubled or changed.
    """
    return verified_rows.find_whole_version(
        warehouse,
        STATES,
        manifest.snapshot_id,
        RowsDigest(manifest.key_count, manifest.checksum, manifest.snapshots_version),
        lambda version: measure_stored(warehouse, manifest, version)[:2],
        "keys",
    )
