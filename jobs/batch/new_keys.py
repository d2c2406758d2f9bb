"""Pretrain new keys while a stream runs, which imports their states without a restart (decision 0015).

The history of a new key lands in the measurements as marked rows (`ingest --history`). A stream that imports new keys
skips marked rows, while a batch pass reads them like all others. So a state filtered from marked rows alone reflects no
row that the stream ever reads. A stream that has no state of the key may therefore import this state once, at any
moment, without counting a row twice. `pretrain` appends such states to the table `new_keys/<model>`, which the stream
reads as a second source. The source's offsets fix which states each micro-batch imports, as the offsets of measurements
fix its rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pyspark.sql import functions as F

from jobs.batch.batch_filter import Interval, pack_buckets
from jobs.batch.key_learning import Populations
from jobs.batch.pretraining import write_filtered
from jobs.batch.snapshot_ids import TableVersion, find_earlier_id
from jobs.core.errors import UserError
from jobs.core.report import format_count
from jobs.lineage import generations
from jobs.lineage.generations import DeployedModel, read_origin_manifest
from jobs.lineage.inputs_table import InputsTable
from jobs.snapshots import learned_rows, manifests
from jobs.snapshots.model_runtime import ModelRuntime, hash_meaning
from jobs.snapshots.store import find_whole, verify
from jobs.spark.warehouse import Warehouse
from jobs.specs.sections import PRETRAINED
from jobs.storage.measurements_table import IS_HISTORY, create_new_keys_table, find_history_version
from jobs.storage.positions import build_delta_position, check_version, to_datetime
from jobs.storage.tables import measurements
from kalman.learning.em_linear import ExpectationMaximisation
from kalman.learning.key_fits import Population
from kalman.learning.learners import learnable
from kalman.mixtures.building import FAMILIES

if TYPE_CHECKING:
    from jobs.snapshots.manifests import Manifest


class Offer(NamedTuple):
    """States of new keys as a snapshot; keys: the number of keys that are offered for the first time."""

    manifest: Manifest
    keys: int


def offer(
    model: DeployedModel[Warehouse], table: str, version: int, on_progress: Callable[[str], None]
) -> list[Offer]:
    """Filter the marked history up to a version, and offer the states to the streams of this version of the model.

    One offer is made for each set of parameters among the live generation and the shadows. If there is no such
    generation, one offer is made with the parameters of the snapshot from which a new generation would begin.
    Idempotent: if this call is killed, the next call completes the offer.
    """
    landed = find_history_version(model.warehouse, table, version)
    if landed is None:
        return []
    return [_offer(model, table, landed, base, on_progress) for base in _list_bases(model, table)]


def _list_bases(model: DeployedModel[Warehouse], table: str) -> list[Manifest]:
    """Return the snapshots from which the model's generations began, one for each set of parameters."""
    warehouse = model.warehouse
    fingerprint = model.spec.fingerprint()
    bases = [
        read_origin_manifest(warehouse, one)
        for one in generations.read_generations(warehouse, model.name)
        if one.status in (generations.LIVE, generations.SHADOW) and one.fingerprint == fingerprint
    ]
    if not bases:
        identity = warehouse.table_id(table)
        newest = manifests.find_newest_startable(
            warehouse, model.name, fingerprint, model.spec.source_kind, identity
        )
        bases = [] if newest is None else [newest]
    return list({hash_meaning(fingerprint, one.parameters): one for one in bases}.values())


def _offer(
    model: DeployedModel[Warehouse],
    table: str,
    landed: int,
    base: Manifest,
    on_progress: Callable[[str], None],
) -> Offer:
    warehouse, spec = model.warehouse, model.spec
    meaning = hash_meaning(spec.fingerprint(), base.parameters)
    inputs = None if spec.inputs is None else InputsTable(model)
    version = None if inputs is None else inputs.newest()
    made_of = [meaning, table, landed, spec.learn and spec.learn.model_dump(mode="json"), version]
    of_table = TableVersion.of(warehouse, table, landed)
    identity, former = (
        f"{spec.name}-v{spec.version}-new-{landed}-{_compute_digest(parts)}"
        for parts in ([*made_of, *of_table.ids], made_of)
    )
    identity = find_earlier_id(warehouse, former, of_table) or identity
    manifest = find_whole(warehouse, identity)
    if manifest is None:
        rows = warehouse.read(table, landed).filter(IS_HISTORY).select(*spec.columns)
        runtime = ModelRuntime(spec, base.parameters, rows.schema)
        given = 0
        if inputs is not None and version is not None:  # as for a snapshot of all rows
            given = rows.count()
            rows = inputs.complete_rows(rows, runtime.kind, version.version)
        count, newest = rows.agg(F.count("*"), F.max(F.unix_micros(F.col(f"`{spec.time}`")))).collect()[0]
        on_progress(f"filtering {count:,} rows of history")
        runtime.ship(warehouse.spark)
        packed = pack_buckets(rows, runtime.rows.joined, count)
        populations = _read_populations(warehouse, runtime, base)
        made = replace(
            base,
            snapshot_id=identity,
            position=build_delta_position(table, landed, *of_table.ids),
            # No stream begins from a snapshot with a cut, because it reflects only history.
            cut=to_datetime(0 if newest is None else newest + 1),
            generation=None,
            batch_id=None,
            parent=base.snapshot_id,
            waiting=None,
            learned=None,
            inputs=None if version is None else {**version._asdict(), "left_out": given - count},
            spec=spec.format_stored_text(),
        )
        manifest = write_filtered(warehouse, made, runtime, packed, Interval(), populations)
    return Offer(manifest, _append(warehouse, spec.name, manifest, meaning))


def _compute_digest(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:10]


def _read_populations(warehouse: Warehouse, runtime: ModelRuntime, base: Manifest) -> Populations | None:
    """Return the populations that are the priors of new keys, as in the stream; None if no key learns parameters.

    A snapshot of an earlier release has only the mean of the population; the spread is then the unit matrix that this
    earlier release assumed.

    Raises:
        UserError: keys learn parameters with a filter whose learner cannot start from the stream's parameters.
    """
    spec = runtime.spec
    if spec.learn is None or spec.learn.scope != "key":
        return None
    if spec.filter in FAMILIES:
        raise UserError(
            f"{spec.name}: new keys of filter: {spec.filter} with learn.scope: key cannot be pretrained beside a "
            f"stream: write stream.new_keys: prior, or learn.scope: pooled"
        )
    found = learned_rows.read_populations(warehouse, base)
    if found:
        groups = {name: one for name, one in found.items() if name is not None}
        return Populations(tuple(spec.learn.by), found[None], groups)
    learner: Any = learnable(runtime.definition)
    problem = learner.model if isinstance(learner, ExpectationMaximisation) else learner
    theta = replace(problem, begin={**problem.begin, **runtime.parameters}).start
    return Populations((), Population(theta, np.eye(len(theta)), 0), {})


def _append(warehouse: Warehouse, model: str, manifest: Manifest, meaning: str) -> int:
    """Append a snapshot's new states to the table of offers; return the number of appended states."""
    table = create_new_keys_table(warehouse, model)
    rows = verify(warehouse, manifest).withColumn("meaning", F.lit(meaning))
    before = warehouse.read(table, warehouse.latest_version(table))
    before = before.filter(F.col("meaning") == meaning)
    same = ["key", "state_index", "event_time"]
    fresh = rows.join(before.select(*same).distinct(), on=same, how="left_anti").select(*rows.columns)
    count = fresh.count()
    if count:
        warehouse.append(fresh.coalesce(1), table, (f"new-keys-{manifest.snapshot_id}", 1))
    return count


def format_offers(offers: list[Offer]) -> list[str]:
    """Return the report lines of offers."""
    return [
        f"snapshot {one.manifest.snapshot_id}: {format_count(one.manifest.key_count, 'key')} from history "
        f"landed for new keys, {one.keys:,} of them newly offered to running streams"
        for one in offers
    ]


def offer_history_states(
    model: DeployedModel[Warehouse], version: int | None, on_progress: Callable[[str], None]
) -> list[Offer]:
    """Offer the states of new keys without pretraining anything else (`pretrain --history`).

    Raises:
        UserError: the model's streams import no new keys, no history has landed, or no snapshot has parameters.
    """
    if model.spec.stream.new_keys != PRETRAINED:
        raise UserError(
            f"--history: the streams of {model.name} import no pretrained keys: write stream.new_keys: {PRETRAINED} in "
            f"its spec"
        )
    table = measurements(model.name)
    newest = check_version(model.warehouse, table, version)
    if find_history_version(model.warehouse, table, newest) is None:
        raise UserError(
            f"--history: no history of new keys has landed for {model.name}: land some with `kalman-pipeline ingest "
            f"--model {model.name} --history --input FILE`"
        )
    made = offer(model, table, newest, on_progress)
    if not made:
        raise UserError(
            f"--history: {model.name} has no snapshot to take parameters from: run `kalman-pipeline pretrain --model "
            f"{model.name}` first"
        )
    return made
