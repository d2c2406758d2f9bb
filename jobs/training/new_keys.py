"""Keys that are pretrained while a stream runs: it takes their states over without a restart (decision 0015).

The history of such a key lands in the measurements, marked (`ingest --history`). A stream that takes new keys passes
marked rows over, and a batch pass takes them in their place like all others. So a state of marked rows alone reflects
nothing that the stream has met or will meet: it may be taken at any moment, once, by a stream that has no state of the
key, and nothing is counted twice. `pretrain` makes such states, and appends them to the table `new_keys/<model>`. The
stream reads that as a second source: what a micro-batch takes is fixed by its offsets, as its measurements are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import functions as F

from jobs.core.errors import UserError
from jobs.core.report import plural
from jobs.key_inputs.table import InputsTable
from jobs.lineage import generations
from jobs.lineage.start_point import origin
from jobs.snapshots import manifests
from jobs.snapshots.runtime import ModelRuntime
from jobs.snapshots.seeds import meaning_of
from jobs.snapshots.store import find_whole, verify, write
from jobs.specs.sections import PRETRAINED
from jobs.training.batch_filter import batch_of, bucket_rows, final_states
from jobs.training.learning import Window, each_key_learner
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.measurements_table import create, marked, newest_landing
from jobs.warehouse.positions import check_version, delta_position, to_datetime
from jobs.warehouse.tables import measurements
from kalman.learning.learners import LEARNERS
from kalman.learning.maximum_likelihood import maximum_likelihood

if TYPE_CHECKING:
    from jobs.snapshots.manifests import Manifest
    from jobs.specs.model_spec import ModelSpec
    from jobs.state.filter_step import Begin


class Offer(NamedTuple):
    """States of new keys, as a snapshot; keys: how many a stream of these parameters had not been offered before."""

    manifest: Manifest
    keys: int


def offer(
    warehouse: Warehouse, spec: ModelSpec, table: str, version: int, on_progress: Callable[[str], None]
) -> list[Offer]:
    """Filter the marked history up to a version, and offer its keys' states to the streams of this very model.

    They are made with the parameters that the live stream, and any shadow, runs with; where nothing runs, with those of
    the snapshot that one would begin from. Killed between the snapshot and the offer, the next call ends what was
    begun; again it changes nothing.
    """
    landed = newest_landing(warehouse, table, version)
    if landed is None:
        return []
    return [
        _offer(warehouse, spec, table, landed, base, on_progress) for base in _bases(warehouse, spec, table)
    ]


def _bases(warehouse: Warehouse, spec: ModelSpec, table: str) -> list[Manifest]:
    """Return the snapshots that the streams of a model run from, one for each set of parameters."""
    fingerprint = spec.fingerprint()
    going = [
        origin(warehouse, one)
        for one in generations.all_of(warehouse, spec.name)
        if one.status in (generations.LIVE, generations.SHADOW) and one.fingerprint == fingerprint
    ]
    if not going:
        identity = warehouse.table_id(table)
        newest = manifests.newest_startable(warehouse, spec.name, fingerprint, spec.source_kind, identity)
        going = [] if newest is None else [newest]
    return list({meaning_of(fingerprint, one.parameters): one for one in going}.values())


def _offer(
    warehouse: Warehouse,
    spec: ModelSpec,
    table: str,
    landed: int,
    base: Manifest,
    on_progress: Callable[[str], None],
) -> Offer:
    meaning = meaning_of(spec.fingerprint(), base.parameters)
    inputs = None if spec.inputs is None else InputsTable(warehouse, spec)
    version = None if inputs is None else inputs.newest()
    made_of = [meaning, table, landed, spec.learn and spec.learn.model_dump(mode="json"), version]
    digest = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()
    identity = f"{spec.name}-v{spec.version}-new-{landed}-{digest[:10]}"
    manifest = find_whole(warehouse, identity)
    if manifest is None:
        rows = warehouse.read(table, landed).filter(marked()).select(*spec.columns)
        runtime = ModelRuntime(spec, base.parameters, rows.schema)
        given = 0
        if inputs is not None and version is not None:  # as in a snapshot of all measurements
            inputs.load(runtime.kind, version.version)
            given = rows.count()
            rows = inputs.joined(rows, runtime.kind, version.version).dropna(subset=spec.input_names)
        count, newest = rows.agg(F.count("*"), F.max(F.unix_micros(F.col(f"`{spec.time}`")))).collect()[0]
        on_progress(f"filtering {count:,} rows of history")
        runtime.ship(warehouse.spark)
        packed = bucket_rows(rows, runtime.rows.joined, count)
        states = final_states(packed, runtime.kernel, batch_of(runtime), _begin(runtime))
        made = replace(
            base,
            snapshot_id=identity,
            position=delta_position(table, landed, warehouse.table_id(table)),
            # A snapshot with a cut is history only: no stream begins from it.
            cut=to_datetime(0 if newest is None else newest + 1),
            generation=None,
            batch_id=None,
            parent=base.snapshot_id,
            waiting=None,
            inputs=None if version is None else {**version._asdict(), "left_out": given - count},
            spec=spec.model_dump_json(by_alias=True),
        )
        manifest = write(warehouse, made, states)
    return Offer(manifest, _append(warehouse, spec.name, manifest, meaning))


def _begin(runtime: ModelRuntime) -> Begin | None:
    """Return the initial states of new keys, as a stream with these parameters would have them.

    Raises:
        UserError: each key would have to learn its own parameters, and the model's learner cannot continue from others.
    """
    spec = runtime.spec
    if spec.learn is None or spec.learn.scope != "key":
        return runtime.begin
    if spec.filter in LEARNERS:
        raise UserError(
            f"{spec.name}: new keys of filter: {spec.filter} with learn.scope: key cannot be pretrained beside a "
            f"stream: write stream.new_keys: prior, or learn.scope: pooled"
        )
    problem = maximum_likelihood(runtime.definition)
    theta = replace(problem, begin={**problem.begin, **runtime.parameters}).start
    return each_key_learner(runtime.definition, runtime.kernel, Window(), theta, spec.unit_us)


def _append(warehouse: Warehouse, model: str, manifest: Manifest, meaning: str) -> int:
    """Offer the states of a snapshot that have not been offered as they are, once; return how many there were."""

    table = create(warehouse, model)
    rows = verify(warehouse, manifest).withColumn("meaning", F.lit(meaning))
    before = warehouse.read(table, warehouse.latest_version(table))
    before = before.filter(F.col("meaning") == meaning)
    same = ["key", "state_index", "event_time"]
    fresh = rows.join(before.select(*same).distinct(), on=same, how="left_anti").select(*rows.columns)
    count = fresh.count()
    if count:
        warehouse.append(fresh.coalesce(1), table, (f"new-keys-{manifest.snapshot_id}", 1))
    return count


def lines(offers: list[Offer]) -> list[str]:
    """Return what people are told of offers."""
    return [
        f"snapshot {one.manifest.snapshot_id}: {plural(one.manifest.key_count, 'key')} of history "
        f"landed for new keys, {one.keys:,} of them offered now to running streams"
        for one in offers
    ]


def only_history(
    warehouse: Warehouse, spec: ModelSpec, version: int | None, on_progress: Callable[[str], None]
) -> list[Offer]:
    """Offer the keys of marked history alone: `pretrain --history`.

    Raises:
        UserError: the model's streams take no new keys, none has landed, or there is nothing to take parameters from.
    """
    if spec.stream.new_keys != PRETRAINED:
        raise UserError(
            f"--history: the streams of {spec.name} take no pretrained keys: write stream.new_keys: {PRETRAINED} in "
            f"its spec"
        )
    table = measurements(spec.name)
    newest = check_version(warehouse, table, version)
    if newest_landing(warehouse, table, newest) is None:
        raise UserError(
            f"--history: no history of new keys has landed for {spec.name}: land some with `kalman-pipeline ingest "
            f"--model {spec.name} --history --input FILE`"
        )
    made = offer(warehouse, spec, table, newest, on_progress)
    if not made:
        raise UserError(
            f"--history: {spec.name} has no snapshot to take parameters from: run `kalman-pipeline pretrain --model "
            f"{spec.name}` first"
        )
    return made
