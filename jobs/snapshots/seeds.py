"""The seeds of a stream: a snapshot's states, waiting rows and row ids, and pretrained states of new keys."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from jobs.snapshots import row_ids, waiting_rows
from jobs.snapshots.manifests import Manifest
from jobs.snapshots.runtime import ModelRuntime
from jobs.snapshots.state_rows import pack_seeds
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.specs.sections import PRETRAINED
from jobs.state.encoding.routing import Routing
from jobs.storage.measurements_table import create_new_keys_table, new_keys

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.storage.checkpoints import Checkpoint


def build_initial_state(
    warehouse: Warehouse, runtime: ModelRuntime, manifest: Manifest, states: DataFrame, routing: Routing
) -> DataFrame:
    """Return the stateful operator's initial state, as packets: a snapshot's states, waiting rows and row ids."""
    timed = runtime.spec.timed
    seeds = _pack_states(states, runtime, routing, timed)
    held = waiting_rows.read_waiting_rows(warehouse, manifest) if timed else None
    if held is None:
        return seeds
    seeds = seeds.unionByName(waiting_rows.pack_waiting_rows(held.rows, runtime.rows, routing))
    return (
        seeds
        if held.ids is None
        else seeds.unionByName(row_ids.pack_row_ids(held.ids, runtime.rows, routing))
    )


def hash_meaning(fingerprint: str, parameters: Mapping[str, Any]) -> str:
    """Return the digest of a model's fingerprint and parameters, which give its states their meaning."""
    text = json.dumps([fingerprint, dict(parameters)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_importing_new_keys(warehouse: Warehouse, checkpoint: Checkpoint, spec: ModelSpec) -> bool:
    """Return whether a generation imports new keys. The spec decides this once, when the generation begins.

    Spark's checkpoint holds an offset for each source, so no source can be added later. If an earlier generation
    imported keys, later generations do so whatever their spec has. Their state may descend from it and reflect marked
    rows after its position, which would then be counted twice.
    """
    sources = checkpoint.sources()
    if sources is not None:
        return sources > 1
    return spec.stream.new_keys == PRETRAINED or warehouse.exists(new_keys(spec.name))


def read_offered_states(warehouse: Warehouse, runtime: ModelRuntime, routing: Routing) -> DataFrame:
    """Return a streaming frame of packets with the pretrained states offered to this model and parameters."""
    spec = runtime.spec
    table = create_new_keys_table(warehouse, spec.name)
    # All files in one micro-batch: a key must be known before its first row.
    reader = warehouse.spark.readStream.format("delta").option("maxFilesPerTrigger", 1_000_000)
    rows = reader.load(warehouse.path(table))
    mine = rows.filter(F.col("meaning") == hash_meaning(spec.fingerprint(), runtime.parameters))
    return _pack_states(mine, runtime, routing, typed=True)


def _pack_states(states: DataFrame, runtime: ModelRuntime, routing: Routing, typed: bool) -> DataFrame:
    return pack_seeds(states, runtime.kernel, runtime.kind, runtime.state.layout, routing, typed)
