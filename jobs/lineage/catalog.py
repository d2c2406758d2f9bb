"""A cached view of a warehouse's control tables, which reads each table once.

A catalog serves one command, or one decision within a command. A command that changes generations does not rely on a
catalog: its commit compares the rows with the newest version of the table, and a lease reads the newest row.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from typing import TypeVar

from jobs.lineage import generations
from jobs.lineage.generations import Generation, LineageSegment, select_live, trace_live_lineage
from jobs.snapshots import manifests
from jobs.snapshots.manifests import Manifest
from jobs.specs.model_spec import ModelSpec
from jobs.storage.quarantine import count_rows_by_model
from jobs.storage.table_rows import measure_files
from jobs.storage.warehouse import Tables

Row = TypeVar("Row", Generation, Manifest)


class Catalog:
    """The generations, snapshots and quarantined rows of all models of a warehouse; each table is read on first use.

    Args:
        warehouse: warehouse of the tables.
    """

    def __init__(self, warehouse: Tables) -> None:
        self.warehouse = warehouse

    @property
    def models(self) -> list[str]:
        """Return the names of the models that have a snapshot or a generation, sorted."""
        return sorted({*self._generations, *self._manifests})

    def generations(self, model: str) -> Sequence[Generation]:
        """Return the generations of a model, oldest first."""
        return self._generations.get(model, ())

    def manifests(self, model: str) -> Sequence[Manifest]:
        """Return the manifests of a model, in the order of the commits of their state rows."""
        return self._manifests.get(model, ())

    def live(self, model: str) -> Generation | None:
        """Return the live generation of a model, or None."""
        return select_live(self.generations(model))

    def lineage(self, model: str) -> list[LineageSegment]:
        """Return the lineage of a model's live estimates, the live generation first."""
        return trace_live_lineage(self.generations(model))

    def read_specs(self, model: str, deployed: ModelSpec | None) -> dict[str, ModelSpec]:
        """Return the spec by which to read each generation's estimates, without generations whose spec is unknown.

        It is the deployed spec if this has the meaning of the generation's states, else the spec of its snapshot.

        Args:
            model: name of the model.
            deployed: the deployed spec; None if its file is missing or broken.
        """
        found: dict[str, ModelSpec] = {}
        for one in self.generations(model):
            manifest = self.manifest(one.snapshot_id)
            if deployed is not None and (manifest is None or one.fingerprint == deployed.fingerprint()):
                found[one.generation] = deployed
            elif manifest is not None:
                found[one.generation] = manifest.model_spec(None if deployed is None else deployed.folder)
        return found

    def live_spec(self, model: str, deployed: ModelSpec | None) -> ModelSpec | None:
        """Return the spec of the live generation (`read_specs`), or the deployed spec if nothing is live."""
        live = self.live(model)
        return deployed if live is None else self.read_specs(model, deployed).get(live.generation)

    def manifest(self, snapshot: str) -> Manifest | None:
        """Return the manifest of a snapshot, including a removed snapshot; None if the snapshot never existed."""
        return self._snapshots.get(snapshot)

    def is_export(self, manifest: Manifest) -> bool:
        """Return whether a snapshot is an export of a generation, and not a migration of an export.

        The id decides, because other columns do not: the columns of both kinds name the generation and its micro-batch,
        and an export of an earlier release has the parent of its generation's snapshot as its parent.
        """
        if manifest.batch_id is None:
            return False
        source = [one for one in self.generations(manifest.model) if one.generation == manifest.generation]
        return any(
            manifest.snapshot_id == export_id(one, manifest.batch_id, manifest.version) for one in source
        )

    def export_behind(self, snapshot: str) -> Manifest | None:
        """Return the manifest of the export from which a snapshot was migrated, or else of the snapshot itself."""
        found = self.manifest(snapshot)
        while found is not None and found.parent is not None and not self.is_export(found):
            found = self.manifest(found.parent)
        return found

    def count_quarantined_rows(self, model: str) -> int:
        """Return the number of a model's rows in quarantine."""
        return self._held.get(model, 0)

    @cache  # noqa: B019 - a catalog lives as long as its command
    def file_sizes(self, table: str) -> tuple[int, int] | None:
        """Return the number of files of a table and their size in bytes; None if the table does not exist."""
        return measure_files(self.warehouse.root, table) if self.warehouse.exists(table) else None

    @cached_property
    def _generations(self) -> dict[str, list[Generation]]:
        return group_by_model(generations.read_generations(self.warehouse))

    @cached_property
    def _manifests(self) -> dict[str, list[Manifest]]:
        return group_by_model(manifests.read_manifests(self.warehouse))

    @cached_property
    def _snapshots(self) -> dict[str, Manifest]:
        return {one.snapshot_id: one for known in self._manifests.values() for one in known}

    @cached_property
    def _held(self) -> dict[str, int]:
        return count_rows_by_model(self.warehouse)


def export_id(generation: Generation, batch: int, version: int) -> str:
    """Return the id of the export of a generation after a micro-batch that completes a version of the measurements."""
    digest = hashlib.sha256(f"{generation.checkpoint}/{batch}".encode()).hexdigest()
    return f"{generation.model}-v{generation.model_version}-{version}-{digest[:10]}"


def group_by_model(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the rows of each model, in the order in which they are given."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row.model].append(row)
    return dict(found)
