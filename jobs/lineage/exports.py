"""Identify exports: snapshots of a generation's own state at the end of a micro-batch."""

from __future__ import annotations

import hashlib

from jobs.lineage import generations
from jobs.lineage.generations import Generation
from jobs.snapshots import manifests
from jobs.snapshots.manifests import Manifest
from jobs.storage.warehouse import Tables


def snapshot_id(generation: Generation, batch: int, version: int) -> str:
    """Return the id of the snapshot of a generation's micro-batch, which completes a version of the measurements."""
    digest = hashlib.sha256(f"{generation.checkpoint}/{batch}".encode()).hexdigest()
    return f"{generation.model}-v{generation.model_version}-{version}-{digest[:10]}"


def is_export(warehouse: Tables, manifest: Manifest) -> bool:
    """Tell if a snapshot is the state of a generation itself, not a migration of it, by its id.

    Both name the generation and its micro-batch, and earlier releases gave exports the parent of their generation's
    snapshot.
    """
    if manifest.generation is None or manifest.batch_id is None:
        return False
    for one in generations.all_of(warehouse, manifest.model):
        if one.generation == manifest.generation:
            return manifest.snapshot_id == snapshot_id(one, manifest.batch_id, manifest.version)
    return False


def export_behind(warehouse: Tables, snapshot: str) -> Manifest | None:
    """Return the export from which a snapshot was migrated, or the snapshot's own manifest if it is none of these."""
    found = manifests.record(warehouse, snapshot)
    while found is not None and found.parent is not None and not is_export(warehouse, found):
        found = manifests.record(warehouse, found.parent)
    return found
