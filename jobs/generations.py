"""Keep the lineages of streams: which one is live for a model, and where it began; one checkpoint for life each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from jobs.errors import ALREADY_RUNNING, RUN_FAILED, UserError
from jobs.tables import GENERATIONS, Warehouse, utc

if TYPE_CHECKING:
    from pyspark.sql import Row

    from jobs.snapshots import Manifest

LIVE, RETIRED, FAILED, SHADOW = "live", "retired", "failed", "shadow"


@dataclass(frozen=True, slots=True)
class Generation:
    """One stream lineage as its row says it is."""

    generation: str
    model: str
    model_version: int
    fingerprint: str
    snapshot_id: str
    checkpoint: str
    start_position: dict[str, Any]
    partitions: int
    blocks: int
    status: str
    owner: str | None = None
    epoch: int = 0
    heartbeat: datetime | None = None
    last_error: str | None = None
    created_at: datetime | None = None
    retired_at: datetime | None = None

    @property
    def start_version(self) -> int:
        """Return the version of the measurements table up to which the snapshot reflects all rows."""
        return int(self.start_position["version"])


def all_of(warehouse: Warehouse, model: str | None = None) -> list[Generation]:
    """Return the generations, of one model or of all, oldest first."""
    from pyspark.sql import functions as F

    if not warehouse.exists("generations"):
        return []
    frame = warehouse.read("generations")
    if model is not None:
        frame = frame.filter(F.col("model") == model)
    return [_generation(row) for row in frame.orderBy("created_at", "generation").collect()]


def live(warehouse: Warehouse, model: str) -> Generation | None:
    """Return the model's live generation, or None."""
    return next((one for one in all_of(warehouse, model) if one.status == LIVE), None)


def begin(warehouse: Warehouse, manifest: Manifest, partitions: int, blocks: int) -> Generation:
    """Make a new live generation from a snapshot and retire the one that was live, in one commit.

    Killed before the commit, nothing has changed; after it, the new generation is live and has still no checkpoint,
    so the next start begins it from its snapshot.

    Raises:
        UserError: another driver did the same at the same moment.
    """
    from delta.tables import DeltaTable
    from pyspark.sql import functions as F

    warehouse.create("generations", GENERATIONS)
    known = all_of(warehouse, manifest.model)
    name = f"{manifest.model}-g{len(known) + 1:04d}"
    made = Generation(
        generation=name,
        model=manifest.model,
        model_version=manifest.model_version,
        fingerprint=manifest.fingerprint,
        snapshot_id=manifest.snapshot_id,
        checkpoint=warehouse.path(f"checkpoints/{name}"),
        start_position=manifest.position,
        partitions=partitions,
        blocks=blocks,
        status=LIVE,
    )
    rows = [{**_columns(made), "action": "begin"}]
    rows += [{**_columns(one), "action": "retire"} for one in known if one.status == LIVE]
    schema = warehouse.read("generations").schema.add("action", "string")
    source = warehouse.spark.createDataFrame(rows, schema).coalesce(1)
    columns = {name: F.col(f"s.{name}") for name in _columns(made)}
    target = DeltaTable.forPath(warehouse.spark, warehouse.path("generations")).alias("t")
    merge = (
        # The model, not the generation alone: so that any other change of the model's generations is a conflict.
        target.merge(source.alias("s"), "t.model = s.model AND t.generation = s.generation")
        .whenMatchedUpdate(
            "s.action = 'retire'",
            {
                "status": F.lit(RETIRED),
                "retired_at": F.current_timestamp(),
                "owner": F.lit(None).cast("string"),
            },
        )
        .whenNotMatchedInsert("s.action = 'begin'", {**columns, "created_at": F.current_timestamp()})
    )
    with one_of_two(made.model), warehouse.lock("generations"):
        if len(all_of(warehouse, manifest.model)) != len(known):
            raise taken(manifest.model, "another driver has just begun a generation")
        merge.execute()
    return made


def taken(model: str, who: str) -> UserError:
    """Return the refusal of a driver that came second."""
    return UserError(
        f"the stream of {model} is taken: {who}; one driver at a time, so this one stops", ALREADY_RUNNING
    )


@contextmanager
def one_of_two(model: str) -> Iterator[None]:
    """Turn the conflict of two commits into the refusal of the later one."""
    from delta.exceptions import DeltaConcurrentModificationException

    try:
        yield
    except DeltaConcurrentModificationException as error:
        raise taken(model, "another driver has just changed its generations") from error


def update(warehouse: Warehouse, condition: Any, values: dict[str, Any]) -> None:
    """Set columns of the generations that meet a condition, in one commit."""
    from delta.tables import DeltaTable

    with warehouse.lock("generations"):
        DeltaTable.forPath(warehouse.spark, warehouse.path("generations")).update(condition, values)


def check_unchanged(generation: Generation, fingerprint: str, version: int) -> None:
    """Refuse to go on with a state that means something else than the model's spec.

    Raises:
        UserError: says what changed and what to do.
    """
    if generation.fingerprint == fingerprint:
        return
    what = (
        f"the spec is version {version} and the live generation {generation.generation} is of version "
        f"{generation.model_version}"
        if generation.model_version != version
        else f"its spec has changed since generation {generation.generation} began, under the same version {version}"
    )
    raise UserError(
        f"the stream of {generation.model} cannot go on: {what}, so its state would mean something else. Put "
        f"the old spec back, or pretrain the new one and start a new generation with "
        f"`stream --model {generation.model} --adopt SNAPSHOT`",
        RUN_FAILED,
    )


def _columns(one: Generation) -> dict[str, Any]:
    fields = {name: getattr(one, name) for name in Generation.__dataclass_fields__}
    return {**fields, "start_position": json.dumps(one.start_position)}


def _generation(row: Row) -> Generation:
    values = utc(row.asDict())
    made = Generation(**{**values, "start_position": json.loads(values["start_position"])})
    return replace(made, epoch=made.epoch or 0)
