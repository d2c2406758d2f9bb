"""The runtime form of a model: filter, formats, the files of its functions, and the stream's initial state.

Specs, fingerprints and the data sent to workers contain only the names of the functions `module:function`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

import kalman
from jobs.snapshots import row_ids, waiting_rows
from jobs.snapshots.manifests import Manifest
from jobs.snapshots.state_rows import StateRows, pack_seeds
from jobs.spark.warehouse import Warehouse
from jobs.specs.functions import list_functions
from jobs.specs.model_spec import ModelSpec
from jobs.specs.sections import PRETRAINED
from jobs.state.block_format import StateFormat, build_state_format
from jobs.state.encoding.estimates import EstimateFormat, estimate_format
from jobs.state.encoding.keys import KeyKind, build_key_kind
from jobs.state.encoding.packets import NEVER
from jobs.state.encoding.routing import Routing
from jobs.state.encoding.rows import RowFormat, build_row_format
from jobs.state.key_groups import GroupBegin, group_begin
from jobs.state.plan import EventTimePolicy
from jobs.state.reorder_buffer import build_waiting_format
from jobs.state.row_ids import build_ids_format
from jobs.storage.measurements_table import create_new_keys_table, new_keys
from jobs.storage.tables import measurements
from kalman.filters.rounded import find_storage_dtype
from kalman.filters.state_output import StateOutput, follows_from_moments
from kalman.models.named import find, find_module_file
from kalman.types import Filter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from jobs.storage.checkpoints import Checkpoint


def list_function_files(names: Iterable[str], folder: str | None) -> list[Path]:
    """Return the files with the modules of the named functions, except modules of installed packages.

    A package is zipped in a temporary folder. If a module imports other modules from its folder, these are not
    included; the modules must then be made a package.

    Raises:
        ModelError: a function does not exist.
    """
    files: dict[Path, None] = {}
    for name in names:
        find(name, folder)
        file = find_module_file(name, folder)
        if file is not None and not _is_installed(file):
            files[file] = None
    return [_zip_package(file) if file.is_dir() else file for file in files]


def ship(spark: SparkSession, definition: Mapping[str, Any]) -> None:
    """Send the files of a definition's functions to the session's workers.

    Raises:
        ModelError: a function does not exist.
    """
    ship_named(spark, list_functions(definition), definition.get("folder"))


def ship_named(spark: SparkSession, names: Iterable[str], folder: str | None) -> None:
    """Send the files of the named functions to the session's workers, as `ship` does.

    Raises:
        ModelError: a function does not exist.
    """
    for file in list_function_files(names, folder):
        spark.sparkContext.addPyFile(str(file))


def _is_installed(file: Path) -> bool:
    """Return whether a file is installed in the Python environment that the workers share."""
    own = Path(__file__).resolve().parents[2]
    paths = sysconfig.get_paths()
    places = [Path(paths[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    places += [own / "kalman", own / "jobs"]
    return any(file.resolve().is_relative_to(place) for place in places)


def _zip_package(package: Path) -> Path:
    place = Path(tempfile.mkdtemp(prefix="kalman-functions-"))
    archive = shutil.make_archive(str(place / package.name), "zip", package.parent, package.name)
    return Path(archive)


@dataclass(frozen=True)
class ModelRuntime:
    """A spec, its learned parameters and the schema of its measurements; all other values are derived on first use."""

    spec: ModelSpec
    parameters: Mapping[str, Any]
    schema: StructType

    @classmethod
    def of(cls, warehouse: Warehouse, spec: ModelSpec, parameters: Mapping[str, Any]) -> ModelRuntime:
        """Return the runtime of a model whose measurements are in the warehouse."""
        return cls(spec, parameters, warehouse.schema(measurements(spec.name)))

    @cached_property
    def definition(self) -> dict[str, Any]:
        return self.spec.definition()

    @cached_property
    def kernel(self) -> Filter:
        kernel = kalman.build(self.definition, self.parameters)
        if self.spec.forecast is None or follows_from_moments(kernel):
            return kernel
        return StateOutput(kernel)  # `skill` forecasts from the state in the estimates

    @cached_property
    def kind(self) -> KeyKind:
        return build_key_kind(self.spec.key, self.schema)

    @cached_property
    def rows(self) -> RowFormat:
        """Return the format of rows without the inputs of their keys."""
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
        """Return the initial states of keys by group; None if no group has learned parameters."""
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

    def ship_to(self, warehouse: Warehouse) -> None:
        """Send these files as `ship` does, if tasks of Spark do the work."""
        if not warehouse.in_process:
            self.ship(warehouse.spark)

    def ship(self, spark: SparkSession) -> None:
        """Send the files of the model's functions to the session's workers.

        Raises:
            ModelError: a function is missing.
        """
        _ = self.kernel  # if a function is missing, this error names the field of the spec
        ship(spark, self.definition)


def build_initial_state(
    warehouse: Warehouse, runtime: ModelRuntime, manifest: Manifest, states: StateRows, routing: Routing
) -> DataFrame:
    """Return the initial state of the stateful operator as packets of a snapshot's states, waiting rows and row ids."""
    timed = runtime.spec.timed
    seeds = _pack_states(states, runtime, routing, timed)
    held = waiting_rows.read_waiting_rows(warehouse, manifest) if timed else None
    if held is None:
        return seeds
    seeds = seeds.unionByName(waiting_rows.pack_waiting_rows(held.rows, runtime.rows, routing))
    if held.ids is not None:
        seeds = seeds.unionByName(row_ids.pack_row_ids(held.ids, runtime.rows, routing))
    return seeds


def hash_meaning(fingerprint: str, parameters: Mapping[str, Any]) -> str:
    """Return a digest of a model's fingerprint and parameters, which together give its states their meaning."""
    text = json.dumps([fingerprint, dict(parameters)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_importing_new_keys(warehouse: Warehouse, checkpoint: Checkpoint, spec: ModelSpec) -> bool:
    """Return whether a generation imports new keys. The spec decides this once, when the generation begins.

    Spark's checkpoint has an offset for each source, so no source can be added later. If an earlier generation imported
    keys, later generations also import keys, whatever the spec says. The state of a later generation may descend from
    the earlier generation and reflect marked rows after its position, which would otherwise be counted twice.
    """
    sources = checkpoint.sources()
    if sources is not None:
        return sources > 1
    return spec.stream.new_keys == PRETRAINED or warehouse.exists(new_keys(spec.name))


def read_offered_states(warehouse: Warehouse, runtime: ModelRuntime, routing: Routing) -> DataFrame:
    """Return a streaming frame of packets with the pretrained states that are offered to this model and parameters."""
    spec = runtime.spec
    table = create_new_keys_table(warehouse, spec.name)
    # All files are in one micro-batch, because a key must be known before its first row.
    reader = warehouse.spark.readStream.format("delta").option("maxFilesPerTrigger", 1_000_000)
    rows = reader.load(warehouse.path(table))
    mine = rows.filter(F.col("meaning") == hash_meaning(spec.fingerprint(), runtime.parameters))
    return _pack_states(StateRows.of(mine), runtime, routing, typed=True)


def _pack_states(states: StateRows, runtime: ModelRuntime, routing: Routing, typed: bool) -> DataFrame:
    return pack_seeds(states, runtime.kernel, runtime.kind, runtime.state.layout, routing, typed)
