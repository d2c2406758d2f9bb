"""What the control tables of a warehouse say about its models, each table read once.

A command that shows many models reads each table once instead of once a model. A command that changes generations does
not decide by a catalog: its commit compares with the table's newest version.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from typing import Protocol, TypeVar

from jobs.lineage import generations
from jobs.lineage.chain import LineageSegment, lineage_of
from jobs.lineage.generations import Generation
from jobs.snapshots import manifests
from jobs.snapshots.manifests import Manifest
from jobs.storage.quarantine import held_by_model
from jobs.storage.table_rows import file_sizes
from jobs.storage.warehouse import Tables
from jobs.supervision.driver_status import LIVE


class _OfModel(Protocol):
    @property
    def model(self) -> str: ...


Row = TypeVar("Row", bound=_OfModel)


class Catalog:
    """The generations, snapshots and held rows of all models of a warehouse; each table is read when first asked for.

    Args:
        warehouse: of the tables.
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
        """Return the manifests of a model, in the order in which their state rows were committed."""
        return self._manifests.get(model, ())

    def live(self, model: str) -> Generation | None:
        """Return the live generation of a model, None if there is none."""
        return next((one for one in self.generations(model) if one.status == LIVE), None)

    def lineage(self, model: str) -> list[LineageSegment]:
        """Return the lineage of a model's live estimates, the live generation first."""
        return lineage_of(self.generations(model))

    def held_rows(self, model: str) -> int:
        """Return the number of rows of a model that the quarantine holds."""
        return self._held.get(model, 0)

    @cache  # noqa: B019 - a catalog lives as long as its command
    def file_sizes(self, table: str) -> tuple[int, int] | None:
        """Return the number of files of a table and their bytes; None if there is no such table."""
        return file_sizes(self.warehouse.root, table) if self.warehouse.exists(table) else None

    @cached_property
    def _generations(self) -> dict[str, list[Generation]]:
        return _by_model(generations.all_of(self.warehouse))

    @cached_property
    def _manifests(self) -> dict[str, list[Manifest]]:
        return _by_model(manifests.all_of(self.warehouse))

    @cached_property
    def _held(self) -> dict[str, int]:
        return held_by_model(self.warehouse)


def _by_model(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row.model].append(row)
    return dict(found)
