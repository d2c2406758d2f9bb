"""The handle of a deployed model: its spec, and the warehouse with its tables."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, Self, TypeVar

from jobs.specs.model_spec import ModelSpec
from jobs.storage.warehouse import Tables

AnyTables = TypeVar("AnyTables", bound=Tables, covariant=True)


@dataclass(frozen=True)
class DeployedModel(Generic[AnyTables]):
    """A model's deployed spec, and the warehouse with its tables.

    A function with a parameter `DeployedModel[Tables]` needs no Spark; `DeployedModel[Warehouse]` starts Spark on first
    use.
    """

    spec: ModelSpec
    warehouse: AnyTables

    @property
    def name(self) -> str:
        """Return the model's name."""
        return self.spec.name

    def with_spec(self, spec: ModelSpec) -> Self:
        """Return the handle with another spec of the model: the spec of a generation or a snapshot."""
        return replace(self, spec=spec)
