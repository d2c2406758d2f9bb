"""Manifests: the commit point of a snapshot, and how one is found."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from jobs.specs.model_spec import ModelSpec
from jobs.warehouse.delta import Warehouse, utc
from jobs.warehouse.positions import DELTA, rank

if TYPE_CHECKING:
    from pyspark.sql import Row

GOOD, REMOVED = "good", "removed"
"""`removed`: `maintain` has taken its rows away. The manifest stays, as it says what generations began from."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """One snapshot as its manifest row says it is."""

    snapshot_id: str
    model: str
    model_version: int
    fingerprint: str
    parameters: dict[str, Any]
    position: dict[str, Any]
    key_count: int
    checksum: str
    rows: int
    snapshots_version: int
    spec: str
    status: str = GOOD
    cut: datetime | None = None
    learn_from: datetime | None = None
    learn_to: datetime | None = None
    generation: str | None = None
    batch_id: int | None = None
    parent: str | None = None
    committed_at: datetime | None = None
    waiting: dict[str, Any] | None = None
    """Of a model whose rows wait for a watermark: that, and the rows that wait (`jobs.snapshots.waiting_rows`)."""
    inputs: dict[str, Any] | None = None
    """Of a model with inputs: the version of their table that the last rows had (`jobs.key_inputs.table.Version`)."""

    @property
    def version(self) -> int:
        """Return how far in its source rows are reflected: a version, or a topic's sum of offsets."""
        return rank(self.position)

    def model_spec(self, folder: str | None = None) -> ModelSpec:
        """Return the spec of the snapshot's own time, which says what its states mean.

        folder: of the model's functions (`ModelSpec.folder`); a spec that names functions cannot be built without it.
        """
        return ModelSpec.model_validate_json(self.spec).with_folder(folder)


def find(warehouse: Warehouse, snapshot_id: str) -> Manifest | None:
    """Return a snapshot's manifest, or None if the snapshot does not exist, or does no longer."""
    found = record(warehouse, snapshot_id)
    return None if found is None or found.status == REMOVED else found


def record(warehouse: Warehouse, snapshot_id: str) -> Manifest | None:
    """Return a snapshot's manifest, also if its rows are gone, or None if there never was such a snapshot."""
    if not warehouse.exists("manifests"):
        return None
    row = warehouse.read("manifests").filter(F.col("snapshot_id") == snapshot_id).first()
    return None if row is None else _manifest(row)


def all_of(warehouse: Warehouse, model: str | None = None) -> list[Manifest]:
    """Return the manifests, of one model or of all, in the order in which their rows were committed."""
    if not warehouse.exists("manifests"):
        return []
    frame = warehouse.read("manifests")
    if model is not None:
        frame = frame.filter(F.col("model") == model)
    return [_manifest(row) for row in frame.orderBy("snapshots_version", "snapshot_id").collect()]


def newest_startable(
    warehouse: Warehouse, model: str, fingerprint: str, source: str = DELTA, table: str | None = None
) -> Manifest | None:
    """Return the good snapshot of this very model that reflects most, among those that a stream may start from.

    With the id of the measurements `table`, none of a table that was there before it.
    """
    fit = [
        one
        for one in all_of(warehouse, model)
        if one.status == GOOD
        and one.cut is None
        and one.fingerprint == fingerprint
        and one.position["source"] == source
        and (table is None or one.position.get("id", table) == table)
    ]
    return max(fit, key=lambda one: (one.version, one.snapshots_version), default=None)


def _manifest(row: Row) -> Manifest:
    values = utc(row.asDict())
    return Manifest(
        **{
            **values,
            "parameters": json.loads(values["parameters"] or "{}"),
            "position": json.loads(values["position"]),
            "waiting": json.loads(values.get("waiting") or "null"),
            "inputs": json.loads(values.get("inputs") or "null"),
        }
    )
