"""Check the snapshots from which generations started.

Their states must be unchanged, and equal to the result of a batch pass (with the keys' learned parameters) or of the
migration that made them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from pyspark.sql import functions as F

from jobs.batch.batch_filter import Begin, build_batch, compute_final_states, pack_buckets
from jobs.core.errors import UserError
from jobs.lineage import replayed_late_rows
from jobs.lineage.catalog import Catalog
from jobs.lineage.generations import DeployedModel
from jobs.lineage.inputs_table import InputsTable
from jobs.lineage.source_ranges import is_before
from jobs.snapshots import manifests
from jobs.snapshots.manifests import REMOVED, Manifest
from jobs.snapshots.model_runtime import ModelRuntime
from jobs.snapshots.state_rows import StateRows, count_state_numbers, find_state_extras_widths
from jobs.snapshots.store import verify
from jobs.spark.warehouse import Warehouse
from jobs.state.encoding.arrow import build_matrix
from jobs.state.encoding.keys import build_identity_arrays, build_identity_columns, build_key_text
from jobs.state.encoding.packets import NEVER
from jobs.state.encoding.rows import KeyedRows
from jobs.storage.positions import KAFKA, to_datetime
from jobs.storage.tables import measurements
from jobs.upgrades.migration import migrating
from jobs.upgrades.migration.apply import apply_migration
from jobs.upgrades.migration.rekey import build_rekey, merge_rows, rekey_rows
from jobs.upgrades.migration.versions import (
    MigrationStep,
    find_path_back,
    find_path_between,
    read_known_versions,
)
from jobs.verification import gathering
from jobs.verification.gathering import CannotVerify, KeySample
from jobs.verification.recomputing import Kind, check_states, collect_findings
from jobs.verification.runs import Findings, describe_difference
from kalman.filters.numerics import may_differ
from kalman.types import Filter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


MOST_KEYS = 1_000_000
"""The maximum number of keys whose parameters are sent to the workers, at some 50 bytes a key."""
FIELD = "parameters"
"""The field of a state that contains the key's parameters."""


class TooManyKeys(ValueError):
    """Raised if there are more keys than can be sent to the workers."""


@dataclass(frozen=True)
class LearnedInitialStates:
    """A picklable function that returns the initial states of a bucket's keys, each with its learned parameters.

    identity: arrays (K,) that identify the keys, sorted by route. values (d, K): the parameters of these keys. Any
    other key begins as the model defines.
    """

    kernel: Filter
    identity: dict[str, NDArray]
    values: NDArray[np.float64]

    def __call__(self, keyed: KeyedRows) -> NDArray[np.float64]:
        """Return the initial states (size, J) of J keys."""
        keys = keyed.keys
        states = self.kernel.initial(keys.size)
        route = np.ascontiguousarray(keys.arrays["route"])
        place = np.searchsorted(self.identity["route"], route)
        at = np.flatnonzero(place < len(self.identity["route"]))
        for name, known in self.identity.items():
            at = at[known[place[at]] == keys.arrays[name][at]]
        states[:, at] = self.kernel.with_parameters(states[:, at], self.values[:, place[at]])
        return states


def read_learned_states(rows: DataFrame, runtime: ModelRuntime, sample: KeySample) -> LearnedInitialStates:
    """Return the learned parameters of the sampled keys in a snapshot's rows.

    Raises:
        TooManyKeys: there are more keys than can be sent to the workers.
    """
    chosen = rows.filter(sample.has(F.col("key"))).select(
        *build_identity_columns(runtime.kind, F.col("key")), F.col("extras")[FIELD].alias(FIELD)
    )
    table = chosen.drop("text").limit(MOST_KEYS + 1).toArrow().combine_chunks()
    if table.num_rows > MOST_KEYS:
        raise TooManyKeys
    columns = {name: table[name].to_numpy() for name in table.column_names if name != FIELD}
    identity = build_identity_arrays(columns)
    order = np.argsort(identity["route"], kind="stable")
    width = find_state_extras_widths(runtime.kernel)[FIELD]
    values = build_matrix(table[FIELD].combine_chunks(), width, FIELD)
    return LearnedInitialStates(
        runtime.kernel, {name: a[order] for name, a in identity.items()}, values[:, order]
    )


PARTITIONS = 8


def check_snapshot(
    model: DeployedModel[Warehouse],
    manifest: Manifest,
    sample: KeySample,
    tolerance: float,
    compared: Collection[str | None],
) -> Findings:
    """Compare the sampled keys of a snapshot with the states recomputed from its lineage.

    Args:
        model: the deployed model.
        manifest: the manifest of the snapshot.
        sample: the sample of the snapshot's keys.
        tolerance: the relative difference up to which numbers count as close.
        compared: exported snapshots that the check of a segment compares with the states at its end.

    Raises:
        CannotVerify: the snapshot's states cannot be recomputed.
    """
    name = f"snapshot {manifest.snapshot_id}"
    if manifest.status == REMOVED:
        raise CannotVerify(f"{name} was removed")
    try:
        rows = verify(model.warehouse, manifest)
    except UserError as damage:
        return Findings.of(describe_difference(damage.message), states_different=1)
    if manifest.without_state:
        expected = rows.limit(0)
    elif manifest.parent is not None and not Catalog(model.warehouse).is_export(manifest):
        expected = _recompute_migrated(model, manifest)
    elif manifest.imported:
        raise CannotVerify(f"{name} was made of a table of states, which nothing else gives")
    elif manifest.generation is None:
        expected = _recompute_pretrained(model, manifest, rows, sample)
    elif manifest.snapshot_id in compared:
        return Findings()
    else:
        raise CannotVerify(
            f"{name} is the state of {manifest.generation}, which is not among the live estimates' generations"
        )
    runtime = ModelRuntime.of(model.warehouse, manifest.model_spec(model.spec.folder), manifest.parameters)
    width = count_state_numbers(runtime.kernel)
    both = gathering.convert_states(Kind.SEED, expected, runtime)
    both = both.unionByName(gathering.convert_states(Kind.END, rows, runtime))
    parts = both.filter(sample.has(F.col("key"))).repartition(PARTITIONS, "key")
    check = partial(check_states, width, tolerance, by_numerics=_has_other_numerics(manifest, runtime))
    return collect_findings(parts, check, name)


def _has_other_numerics(manifest: Manifest, runtime: ModelRuntime) -> bool:
    """Return whether a batch pass may give other bits than the snapshot has, because it was made with other numerics.

    This is never the case for a migrated snapshot.
    """
    if manifest.parent is not None or manifest.without_state:
        return False
    return bool(may_differ(runtime.kernel, runtime.kernel.initial(1), manifest.numerics).any())


def _recompute_migrated(model: DeployedModel[Warehouse], manifest: Manifest) -> DataFrame:
    """Return the states that the migration of the snapshot's parent gives."""
    warehouse = model.warehouse
    assert manifest.parent is not None
    name = f"snapshot {manifest.snapshot_id}"
    source = manifests.find(warehouse, manifest.parent)
    if source is None:
        raise CannotVerify(f"{name}: snapshot {manifest.parent}, which it was migrated from, was removed")
    try:
        steps = _find_steps(model, source, manifest)
        migration = migrating.find_original_migration(manifest, source, steps) if steps else None
    except UserError:
        migration, steps = None, []
    if migration is None:
        raise CannotVerify(
            f"{name}: the migration that made it from {source.snapshot_id} is not the one that the specs have now"
        )
    migrating.ship_functions(warehouse, steps)
    states = apply_migration(StateRows.of(gathering.read_snapshot_states(warehouse, source)), migration).frame
    rekey = build_rekey(warehouse, steps, migration.target)
    return states if rekey is None else merge_rows(rekey_rows(states, rekey), rekey)


def _find_steps(model: DeployedModel[Warehouse], source: Manifest, manifest: Manifest) -> list[MigrationStep]:
    """Return the migrations, forward or back, from a snapshot's version to the version of a snapshot made from it.

    Raises:
        UserError: no such path exists in the known specs.
    """
    if source.model_version > manifest.model_version:
        return find_path_back(model, source, manifest)
    own = {one.model_version: one.model_spec(model.spec.folder) for one in (source, manifest)}
    return find_path_between(
        {**read_known_versions(model), **own}, source.model_version, manifest.model_version
    )


def _recompute_pretrained(
    model: DeployedModel[Warehouse], manifest: Manifest, states: DataFrame, sample: KeySample
) -> DataFrame:
    """Return the states from a batch pass over the history, with the snapshot's parameters."""
    name = f"snapshot {manifest.snapshot_id}"
    own = manifest.model_spec(model.spec.folder)
    table, position = measurements(manifest.model), manifest.position
    topic = position["source"] == KAFKA
    version = position.get("measurements") if topic else position["version"]
    if version is None:
        raise CannotVerify(f"{name}: which version of {table} it was made from is not recorded")
    rows = replayed_late_rows.drop_late_copies(model.warehouse, model.warehouse.read(table, int(version)))
    if topic:
        rows = rows.filter(F.col("_partition").isNull() | is_before(position))
    runtime = ModelRuntime(own, manifest.parameters, rows.schema)
    runtime.ship(model.warehouse.spark)
    frame = rows.select(*own.columns).filter(sample.has(build_key_text(runtime.kind)))
    at = F.col(f"`{own.time}`")
    if manifest.cut is not None:
        frame = frame.filter(at < F.lit(manifest.cut))
    watermark = NEVER if manifest.waiting is None else manifest.waiting["watermark"]
    if own.order.waits and watermark not in (None, NEVER):
        frame = frame.filter(at < F.lit(to_datetime(watermark)))
    if own.inputs is not None:
        if manifest.inputs is None:
            raise CannotVerify(f"{name}: the version of its keys' inputs is not recorded")
        joined = InputsTable(model.with_spec(own)).joined(frame, runtime.kind, manifest.inputs["version"])
        frame = joined.dropna(subset=own.input_names)
    batch = build_batch(runtime)
    packed = pack_buckets(frame, batch.rows, frame.count())
    return compute_final_states(packed, runtime.kernel, batch, _begin(runtime, states, sample, name)).frame


def _begin(runtime: ModelRuntime, states: DataFrame, sample: KeySample, name: str) -> Begin | None:
    """Return the function for the initial states of keys: by group, or with the parameters in each key's own state."""
    learn = runtime.spec.learn
    if learn is None or learn.scope != "key":
        return runtime.begin
    try:
        return read_learned_states(states, runtime, sample)
    except TooManyKeys as error:
        raise CannotVerify(
            f"{name}: more than {MOST_KEYS:,} keys have learned parameters of their own; take a smaller --share"
        ) from error
