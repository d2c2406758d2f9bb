"""The runtime form of a model: the filter with its parameters, and the formats of rows, states and estimates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import kalman
from jobs.spark.user_functions import ship
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.state.block_format import StateFormat, build_state_format
from jobs.state.encoding.estimates import EstimateFormat, estimate_format
from jobs.state.encoding.keys import KeyKind, build_key_kind
from jobs.state.encoding.packet_kinds import NEVER
from jobs.state.encoding.rows import RowFormat, build_row_format
from jobs.state.event_time_policy import EventTimePolicy
from jobs.state.key_groups import GroupBegin, group_begin
from jobs.state.reorder_buffer import build_waiting_format
from jobs.state.row_ids import build_ids_format
from jobs.storage.tables import measurements
from kalman.filters.rounded import find_storage_dtype
from kalman.filters.state_output import StateOutput, follows_from_moments
from kalman.types import Filter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

    from jobs.snapshots.manifests import Manifest


@dataclass(frozen=True)
class ModelRuntime:
    """A spec, its learned parameters, and the schema of its measurements; the rest is derived on first use."""

    spec: ModelSpec
    parameters: Mapping[str, Any]
    schema: StructType

    @classmethod
    def of(cls, warehouse: Warehouse, spec: ModelSpec, parameters: Mapping[str, Any]) -> ModelRuntime:
        """Return the runtime of a model whose measurements are in the warehouse."""
        return cls(spec, parameters, warehouse.read(measurements(spec.name)).schema)

    @cached_property
    def definition(self) -> dict[str, Any]:
        return self.spec.definition()

    @cached_property
    def kernel(self) -> Filter:
        kernel = kalman.build(self.definition, self.parameters)
        if self.spec.forecast is None or follows_from_moments(kernel):
            return kernel
        return StateOutput(kernel)  # `skill` forecasts from it

    @cached_property
    def kind(self) -> KeyKind:
        return build_key_kind(self.spec.key, self.schema)

    @cached_property
    def rows(self) -> RowFormat:
        """Return the format of rows, without the inputs of their keys."""
        return build_row_format(self.spec, self.kind, self.schema)

    @cached_property
    def state(self) -> StateFormat:
        spec, kernel = self.spec, self.kernel
        return build_state_format(
            spec.name,
            spec.version,
            spec.states,
            kernel.fields,
            self.kind,
            kernel.size,
            find_storage_dtype(kernel),
        )

    @cached_property
    def ids(self) -> StateFormat | None:
        """Return the format of remembered row ids, or None if the model has no row ids."""
        return build_ids_format(self.spec, self.rows)

    @cached_property
    def waiting(self) -> StateFormat:
        """Return the format of the rows that wait for the watermark."""
        return build_waiting_format(self.spec, self.rows)

    @cached_property
    def estimates(self) -> EstimateFormat:
        return estimate_format(self.kind, self.spec, self.kernel)

    @cached_property
    def begin(self) -> GroupBegin | None:
        """Return the initial states by group, or None if no group has learned parameters."""
        return group_begin(self.kind, self.definition, self.parameters)

    def build_event_time_policy(self, manifest: Manifest | None = None) -> EventTimePolicy:
        """Return the event-time policy of the stateful operator; its watermark begins at the snapshot's watermark."""
        spec = self.spec
        held = (None if manifest is None else manifest.waiting) or {}
        watermark, newest = held.get("watermark"), held.get("newest")
        return EventTimePolicy(
            delay=spec.order.delay_us,
            row_format=self.waiting,
            watermark=NEVER if watermark is None else watermark,
            waits=spec.order.waits,
            drop_duplicates=spec.duplicates is not None and spec.duplicates.action == "drop",
            idle=None if spec.expiry is None else spec.expiry.after_us,
            archive=spec.expiry is not None and spec.expiry.returns == "archive",
            replay_length=spec.order.rows or 0,
            processing_time=spec.expiry is not None and spec.expiry.clock == "processing",
            patience=spec.order.patience_us,
            max_event_time=NEVER if newest is None else newest,
            id_format=self.ids,
        )

    def ship(self, spark: SparkSession) -> None:
        """Send the files of the model's functions to the session's workers.

        Raises:
            ModelError: a function is missing.
        """
        _ = self.kernel  # if a function is missing, this error names the field of the spec
        ship(spark, self.definition)
