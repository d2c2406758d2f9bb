"""Find states that lack rows which their generation has estimated.

Releases before 0.3.0 kept states in files with one name for all attempts of a micro-batch (format 1). If a driver was
killed or frozen between its states and its commit, files of two attempts could be read as one state. Some keys then
have the state of an earlier micro-batch, which reflects fewer rows than were estimated, never more. A state counts its
rows, and each of these rows has one estimate without a flag, so a comparison of the two counts finds each such key.
"""

from __future__ import annotations

from typing import NamedTuple

from pyspark.sql import functions as F

from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.report import format_count
from jobs.lineage.catalog import Catalog
from jobs.lineage.generations import Generation, walk_ancestors
from jobs.snapshots.manifests import GOOD, Manifest
from jobs.snapshots.verified_rows import read_rows
from jobs.spark.warehouse import Warehouse
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.tables import estimates

ALLOW = "--allow-missing-rows"


class MissingRows(NamedTuple):
    """The number of rows that a generation's state lacks at the end of a micro-batch, and the number of their keys."""

    generation: Generation
    batch: int
    rows: int
    keys: int


def refuse_missing_rows(warehouse: Warehouse, generation: Generation, end: Manifest) -> None:
    """Refuse a generation whose state, written as snapshot `end`, lacks rows, or whose ancestors' states lack rows.

    Raises:
        UserError: rows are missing; the message has the command that computes the state anew.
    """
    found = find_missing_rows(warehouse, generation, end)
    if found is None:
        return
    raise UserError(
        f"the state of {found.generation.generation} at micro-batch {found.batch} lacks {format_count(found.rows, 'row')} of "
        f"{format_count(found.keys, 'key')} that it has estimated: a release before 0.3.0 combined the states of two "
        f"attempts of a micro-batch (CHANGELOG.md). {_suggest_remedy(generation, found.generation)}",
        RUN_FAILED,
    )


def find_missing_rows(warehouse: Warehouse, generation: Generation, end: Manifest) -> MissingRows | None:
    """Return the rows that a generation's state lacks, or else those that its ancestors' handed-over states lacked.

    end: the snapshot of the generation's state at the end of a micro-batch. Models whose rows wait for a watermark are
    not compared: their attempts always wrote the same files.
    """
    catalog = Catalog(warehouse)
    manifest: Manifest | None = end
    for at in walk_ancestors(catalog.generations(generation.model), generation):
        if manifest is None or manifest.generation != at.generation or manifest.model_spec().timed:
            return None
        found = _compare_missing_rows(warehouse, at, catalog.manifest(at.snapshot_id), manifest)
        if found is not None:
            return found
        manifest = catalog.export_behind(at.snapshot_id)
    return None


def _compare_missing_rows(
    warehouse: Warehouse, generation: Generation, origin: Manifest | None, end: Manifest
) -> MissingRows | None:
    """Compare the rows in a state, less the rows in the snapshot at its start, with the generation's estimates."""
    table, batch = estimates(generation.model), end.batch_id
    if (
        batch is None
        or origin is None
        or {origin.status, end.status} != {GOOD}
        or not warehouse.exists(table)
    ):
        return None
    mine = (F.col("generation") == generation.generation) & (F.col("batch_id") <= batch)
    estimated = warehouse.read(table).filter(
        mine & F.col("flags").isNull()
    )  # a flagged row does not change its key's state
    # Newly pretrained keys bring rows that this generation has not estimated: then each key is compared.
    if (
        Checkpoint(warehouse, generation.checkpoint).sources() == 1
        and end.rows - origin.rows >= estimated.count()
    ):
        return None
    began, ended = (
        read_rows(warehouse, one.snapshot_id, one.model, one.snapshots_version).select(
            F.col("key").cast("string"), F.col("state_index").alias(name)
        )
        for one, name in ((origin, "began"), (end, "ended"))
    )
    counted = estimated.groupBy(F.col("key").cast("string")).agg(F.count("*").alias("estimated"))
    joined = counted.join(ended, on="key", how="left").join(began, on="key", how="left")
    reflected = F.coalesce("ended", F.lit(0)) - F.coalesce("began", F.lit(0))
    lacking = joined.select((F.col("estimated") - reflected).alias("rows")).filter("rows > 0")
    found = lacking.agg(F.sum("rows").alias("rows"), F.count("*").alias("keys")).first()
    assert found is not None
    return MissingRows(generation, batch, found["rows"], found["keys"]) if found["keys"] else None


def _suggest_remedy(live: Generation, hurt: Generation) -> str:
    """Return the command that computes a state anew from a snapshot and the rows after it."""
    if live.fingerprint == hurt.fingerprint:
        how = f"`kalman-pipeline stream --model {live.model} --adopt {hurt.snapshot_id}` computes"
    else:
        how = (
            f"`kalman-pipeline pretrain --model {live.model}`, then `stream --adopt` with the snapshot that it makes, "
            f"compute"
        )
    return f"{how} the state anew from its rows. Where these are gone, `stream {ALLOW}` goes on with the state as it is"
