"""The handle of a deployed model that functions take: its spec, and the warehouse that has its tables."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, Self, TypeVar

from jobs.specs.model_spec import ModelSpec
from jobs.storage.warehouse import Tables

AnyTables = TypeVar("AnyTables", bound=Tables, covariant=True)


@dataclass(frozen=True)
class DeployedModel(Generic[AnyTables]):
    """A model's deployed spec, and the warehouse that has its tables.

    A function that takes `DeployedModel[Tables]` needs no Spark; `DeployedModel[Warehouse]` starts it when first used.
    """

    spec: ModelSpec
    warehouse: AnyTables

    @property
    def name(self) -> str:
        """Return the model's name."""
        return self.spec.name

    def with_spec(self, spec: ModelSpec) -> Self:
        """Return the handle with another spec of the model: one with which a generation runs or a snapshot was made."""
        return replace(self, spec=spec)
