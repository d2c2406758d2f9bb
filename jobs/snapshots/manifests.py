"""Manifests, whose commit makes a snapshot exist, and functions that find manifests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jobs.specs.model_spec import ModelSpec
from jobs.storage.positions import (
    DELTA,
    FIRST_NUMERICS,
    is_in_table,
    is_same_if_known,
    rank,
    split_numerics,
    with_numerics,
)
from jobs.storage.warehouse import Tables

KEYS = ("snapshot_id",)
"""Key columns of the table."""
GOOD, REMOVED = "good", "removed"
"""`removed`: `maintain` has removed the snapshot's rows. The manifest stays, because generations refer to it."""
WITHOUT_STATE = "-empty"
"""Suffix of the id of a snapshot without states, from which a generation begins anew."""
IMPORTED = "-imported-"
"""Part of the id of a snapshot that was imported from a user's table; a digest of the table's content follows."""
_JSON = ("parameters", "position", "waiting", "inputs", "learned")
"""Columns that store a dictionary as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The description of a snapshot, stored as a row in `manifests`."""

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
    """The watermark and a digest of the waiting rows (`jobs.snapshots.waiting_rows`), if rows wait for a watermark."""
    inputs: dict[str, Any] | None = None
    """The version of the table of inputs at the last rows (`inputs_table.Version`), if the model has inputs."""
    learned: dict[str, Any] | None = None
    """A digest of the learned rows (`jobs.snapshots.learned_rows`); None without rows, or in earlier releases."""
    numerics: int = FIRST_NUMERICS
    """The version of the numerics with which `pretrain` filtered the history; stored in the JSON of the position."""

    @property
    def version(self) -> int:
        """Return the rank of the position: a version of the measurements, or the sum of a topic's offsets."""
        return rank(self.position)

    @property
    def preference(self) -> tuple[bool, int, int]:
        """Return the sort key of snapshots that fit, the best last: first by having no cut, then by position."""
        return self.cut is None, self.version, self.snapshots_version

    @property
    def without_state(self) -> bool:
        """Return whether the snapshot has no states because an upgrade dropped them."""
        return self.snapshot_id.endswith(WITHOUT_STATE)

    @property
    def imported(self) -> bool:
        """Return whether the user imported the states, so that they reflect no row of the measurements."""
        return IMPORTED in self.snapshot_id

    def model_spec(self, folder: str | None = None) -> ModelSpec:
        """Return the spec with which the snapshot was made, and which gives the states their meaning.

        Args:
            folder: folder of the model's functions (`ModelSpec.folder`); a spec that names functions needs it.
        """
        return ModelSpec.model_validate_json(self.spec).with_folder(folder)


def find(warehouse: Tables, snapshot_id: str) -> Manifest | None:
    """Return a snapshot's manifest, or None if the snapshot does not exist or was removed."""
    found = record(warehouse, snapshot_id)
    return None if found is None or found.status == REMOVED else found


def record(warehouse: Tables, snapshot_id: str) -> Manifest | None:
    """Return the manifest of a snapshot, including a removed snapshot; None if the snapshot never existed."""
    if not warehouse.exists("manifests"):
        return None
    rows = warehouse.rows("manifests", {"snapshot_id": snapshot_id})
    return _parse_manifest(rows[0]) if rows else None


def read_manifests(warehouse: Tables, model: str | None = None) -> list[Manifest]:
    """Return the manifests of one model or of all models, in the order of the commits of their state rows."""
    if not warehouse.exists("manifests"):
        return []
    rows = warehouse.rows("manifests", None if model is None else {"model": model})
    return sorted(
        (_parse_manifest(row) for row in rows), key=lambda one: (one.snapshots_version, one.snapshot_id)
    )


def find_newest_startable(
    warehouse: Tables,
    model: str,
    fingerprint: str,
    source: str = DELTA,
    table: str | None = None,
    topic_id: str | None = None,
) -> Manifest | None:
    """Return the good snapshot with this fingerprint and the furthest position from which a stream can start, or None.

    table, topic_id: ids of the measurements table and of the topic; they exclude snapshots of former tables or topics
    of the same name. A snapshot is also excluded if the table lost its commit when it was restored from a backup.
    """
    fit = [
        one
        for one in read_manifests(warehouse, model)
        if one.status == GOOD
        and one.cut is None
        and one.fingerprint == fingerprint
        and one.position["source"] == source
        and is_same_if_known(table, one.position.get("id"))
        and is_same_if_known(topic_id, one.position.get("topic_id"))
    ]
    fit.sort(key=lambda one: (one.version, one.snapshots_version), reverse=True)
    return next((one for one in fit if is_in_table(warehouse, one.position)), None)


def build_manifest_row(manifest: Manifest) -> dict[str, Any]:
    """Return a manifest as a row of its table, in which dictionaries are JSON."""
    values = {name: getattr(manifest, name) for name in Manifest.__dataclass_fields__ if name != "numerics"}
    values["position"] = with_numerics(manifest.position, manifest.snapshot_id, manifest.numerics)
    texts = {name: None if values[name] is None else json.dumps(values[name]) for name in _JSON}
    return {**values, **texts}


def _parse_manifest(values: dict[str, Any]) -> Manifest:
    parsed = {name: json.loads(values.get(name) or "null") for name in _JSON}
    parsed["position"], numerics = split_numerics(parsed["position"], values["snapshot_id"])
    return Manifest(**{**values, **parsed, "parameters": parsed["parameters"] or {}, "numerics": numerics})
