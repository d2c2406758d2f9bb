"""A deployed model and its table of generations.

Each generation is one stream lineage with one checkpoint. At most one generation of a model is live.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Generic, NamedTuple, Self, TypeVar

from jobs.core.errors import ALREADY_RUNNING, INPUT_ERROR, RUN_FAILED, UserError
from jobs.snapshots.manifests import Manifest, record
from jobs.specs.model_spec import ModelSpec
from jobs.storage.checkpoints import Checkpoint, checkpoint_of
from jobs.storage.positions import FIRST_NUMERICS, KAFKA, is_reached, rank, split_numerics, with_numerics
from jobs.storage.row_changes import NOW, Rows, put_rows, update_rows
from jobs.storage.table_log import Conflict
from jobs.storage.tables import GENERATIONS
from jobs.storage.warehouse import Tables
from jobs.supervision.driver_status import LIVE

RETIRED, FAILED, SHADOW, REMOVED = "retired", "failed", "shadow", "removed"
"""`removed`: a retired generation whose checkpoint `maintain` has removed. Its row stays for readers of estimates."""

KEYS = ("model", "generation")
"""Key columns of the table."""
_CHANGED = "another command has just changed its generations"


@dataclass(frozen=True, slots=True)
class Generation:
    """One stream lineage, stored as a row in `generations`.

    A generation with a `parent` continues right after the parent's micro-batch `parent_batch` (-1: after the parent's
    start). The path of its checkpoint is relative to the warehouse's root. `numerics` has no column of its own; it is
    stored in the JSON of the start position (`with_numerics`).
    """

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
    parent: str | None = None
    parent_batch: int | None = None
    numerics: int = FIRST_NUMERICS

    @property
    def number(self) -> int:
        """Return the generation's number among the model's generations."""
        digits = self.generation.rpartition("-g")[2]
        return int(digits) if digits.isdigit() else 0

    @property
    def start_version(self) -> int:
        """Return the rank of the start position: a version of the measurements, or the sum of a topic's offsets."""
        return rank(self.start_position)

    @property
    def topic(self) -> str | None:
        """Return the Kafka topic that the generation reads, or None if it reads the measurements table."""
        return self.start_position["topic"] if self.start_position["source"] == KAFKA else None


class LineageSegment(NamedTuple):
    """A generation and the last of its micro-batches whose estimates are live; None means all its micro-batches."""

    generation: str
    last_batch: int | None


def read_generations(warehouse: Tables, model: str | None = None) -> list[Generation]:
    """Return the generations of a model, or of all models, sorted by number, because clocks may be set back."""
    if not warehouse.exists("generations"):
        return []
    rows = warehouse.rows("generations", None if model is None else {"model": model})
    return sorted((_parse_generation(row) for row in rows), key=lambda one: (one.model, one.number))


def find_live(warehouse: Tables, model: str) -> Generation | None:
    """Return the model's live generation, or None."""
    return select_live(read_generations(warehouse, model))


def select_live(known: Iterable[Generation]) -> Generation | None:
    """Return the live generation among a model's generations, or None."""
    return next((one for one in known if one.status == LIVE), None)


def find_shadow(known: Iterable[Generation], spec: ModelSpec) -> str | None:
    """Return the name of the newest shadow that runs a spec, or None."""
    mine = [one.generation for one in known if (one.status, one.fingerprint) == (SHADOW, spec.fingerprint())]
    return mine[-1] if mine else None


def read_live_lineage(warehouse: Tables, model: str) -> list[LineageSegment]:
    """Return the lineage of a model's live estimates (`trace_live_lineage`)."""
    return trace_live_lineage(read_generations(warehouse, model))


def no_live_estimates_error(warehouse: Tables, model: str, exit_code: int = INPUT_ERROR) -> UserError:
    """Return the error that a model has no live estimates, with what makes some."""
    none = f"model {model} has no live estimates in {warehouse.root}"
    stream = f"`kalman-pipeline stream --model {model}`"
    live = {"model": model, "status": LIVE}
    if not warehouse.has_rows("generations", live):
        return UserError(f"{none}: make them with {stream}", exit_code)
    return UserError(
        f"{none} yet: its stream has read no row after its snapshot; land newer rows and run {stream} again, or "
        f"estimate the rows before with `kalman-pipeline estimate --model {model}`",
        exit_code,
    )


def trace_live_lineage(known: Sequence[Generation]) -> list[LineageSegment]:
    """Return the lineage of the live estimates, the live generation first; empty if no generation is live."""
    segments: list[LineageSegment] = []
    last: int | None = None
    for one in walk_ancestors(known, select_live(known)):
        segments.append(LineageSegment(one.generation, last))
        last = one.parent_batch
    return segments


def walk_ancestors(known: Sequence[Generation], of: Generation | None) -> Iterator[Generation]:
    """Yield a generation of a model, then its ancestors from parent to oldest, each once."""
    by_name = {one.generation: one for one in known}
    while of is not None and by_name.pop(of.generation, None) is not None:
        yield of
        of = by_name.get(of.parent or "")


def read_named(warehouse: Tables, model: str, name: str | None = None) -> Generation:
    """Return the generation with the given name, or the live generation if no name is given.

    Raises:
        UserError: the model has no such generation.
    """
    return select_named(read_generations(warehouse, model), model, name)


def find_named(known: Iterable[Generation], name: str | None) -> Generation | None:
    """Return the generation of this name, if there is one."""
    return next((one for one in known if one.generation == name), None)


def select_named(known: Sequence[Generation], model: str, name: str | None = None) -> Generation:
    """Return the result of `read_named` from generations that are already known.

    Raises:
        UserError: the model has no such generation.
    """
    found = select_live(known) if name is None else find_named(known, name)
    if found is None:
        if name is None:
            raise UserError(
                f"model {model} has no live generation: start one with `kalman-pipeline stream --model {model}`"
            )
        have = ", ".join(one.generation for one in known) or "none"
        raise UserError(f"model {model} has no generation {name} (it has {have})")
    return found


def find_predecessor(known: Sequence[Generation], live: Generation) -> str | None:
    """Return the name of the generation that the live generation replaced, or else the name of its parent.

    The replaced generation is not the parent if the live generation adopted a snapshot from before the start of the
    replaced generation. One commit retired the replaced generation and made the new generation live, so the rows of
    both have the same time.
    """
    for one in known:
        if one.status == RETIRED and one.retired_at is not None and one.retired_at == live.created_at:
            return one.generation
    return live.parent


def suggest_rollback(known: Sequence[Generation], model: str, fingerprint: str) -> str:
    """Return the command, after "or", that makes the last retired generation of a spec live; empty without one."""
    mine = [one.generation for one in known if (one.status, one.fingerprint) == (RETIRED, fingerprint)]
    return f", or run `kalman-pipeline rollback --model {model} --to {mine[-1]}`" if mine else ""


def read_origin_manifest(warehouse: Tables, generation: Generation) -> Manifest:
    """Return the manifest of the snapshot from which a generation began.

    Raises:
        UserError: the manifest is missing.
    """
    manifest = record(warehouse, generation.snapshot_id)
    if manifest is None:
        raise UserError(
            f"the manifest of snapshot {generation.snapshot_id}, from which {generation.generation} began, is missing",
            RUN_FAILED,
        )
    return manifest


def compute_progress_rank(warehouse: Tables, generation: Generation) -> int:
    """Return the rank of the position reached: a version of the measurements, or the sum of a topic's offsets."""
    return rank(read_position(warehouse, generation))


def has_reached(warehouse: Tables, generation: Generation, other: Generation) -> bool:
    """Return whether a generation reflects all rows that another generation reflects."""
    return is_reached(read_position(warehouse, generation), read_position(warehouse, other))


def read_position(warehouse: Tables, generation: Generation) -> dict[str, Any]:
    """Return the position that a generation has reached in its source."""
    checkpoint = Checkpoint(warehouse, generation.checkpoint)
    batch = checkpoint.find_last_commit()
    if batch is None:
        return generation.start_position
    return checkpoint.position(batch, generation.start_position)


def begin(
    warehouse: Tables,
    manifest: Manifest,
    partitions: int,
    blocks: int,
    beside: Generation | None,
    status: str = LIVE,
    parent: tuple[str, int] | None = None,
    *,
    numerics: int,
) -> Generation:
    """Make a new shadow or live generation from a snapshot, in one commit; a new live generation retires the former.

    After a kill before the commit, nothing has changed. After a kill later, the new generation has no checkpoint yet,
    and the next start begins the generation from its snapshot.

    Args:
        warehouse: warehouse of the generations.
        manifest: manifest of the snapshot.
        partitions: number of shuffle partitions.
        blocks: number of blocks of keys per partition.
        beside: the live generation at the time of the decision, or None. If another command has made another generation
            live since then, this command must not replace that generation.
        status: LIVE or SHADOW.
        parent: the generation to continue, and its last micro-batch whose estimates stay live.
        numerics: version of the filters' numerics (`kalman.NUMERICS`). The caller passes the version because importing
            `kalman` takes longer than a command that only reads may run.

    Raises:
        UserError: another command has changed the model's generations meanwhile.
    """
    warehouse.create("generations", GENERATIONS)
    known = read_generations(warehouse, manifest.model)
    if [one.generation for one in known if one.status == LIVE] != [
        one.generation for one in (beside,) if one
    ]:
        raise stream_taken_error(manifest.model, _CHANGED)
    name = f"{manifest.model}-g{max((one.number for one in known), default=0) + 1:04d}"
    made = Generation(
        generation=name,
        model=manifest.model,
        model_version=manifest.model_version,
        fingerprint=manifest.fingerprint,
        snapshot_id=manifest.snapshot_id,
        checkpoint=checkpoint_of(name),
        start_position=manifest.position,
        partitions=partitions,
        blocks=blocks,
        status=status,
        parent=parent and parent[0],
        parent_batch=parent and parent[1],
        numerics=numerics,
    )
    retired = [one for one in known if one.status == LIVE] if status == LIVE else []
    _commit(warehouse, known, begun=[made], statuses={one.generation: RETIRED for one in retired})
    return made


def switch(warehouse: Tables, model: str, to: Generation, last_seen: list[Generation]) -> Generation:
    """Make a generation live and retire the former live one, in one commit, so that readers always see exactly one.

    Args:
        warehouse: warehouse of the generations.
        model: name of the model.
        to: the generation that becomes live.
        last_seen: the model's generations on which the decision was based.

    Raises:
        UserError: another command changed the model's generations meanwhile.
    """
    statuses = {one.generation: RETIRED for one in last_seen if one.status == LIVE}
    _commit(warehouse, last_seen, begun=[], statuses={**statuses, to.generation: LIVE})
    return read_named(warehouse, model)


def retire(warehouse: Tables, one: Generation, last_seen: list[Generation]) -> None:
    """Retire a generation, in one commit; the generation's driver loses its lease.

    Raises:
        UserError: another command changed the model's generations meanwhile.
    """
    _commit(warehouse, last_seen, begun=[], statuses={one.generation: RETIRED})


def remove(warehouse: Tables, names: list[str], last_seen: list[Generation]) -> None:
    """Mark retired generations as removed, in one commit; afterwards a roll-back to these generations is impossible.

    Raises:
        UserError: another command changed the model's generations meanwhile.
    """
    if names:
        _commit(warehouse, last_seen, begun=[], statuses=dict.fromkeys(names, REMOVED))


def _commit(
    warehouse: Tables, known: list[Generation], begun: list[Generation], statuses: dict[str, str]
) -> None:
    """Add generations and change statuses in one commit, unless another command has changed the model's generations.

    A retired generation loses its lease, so its driver stops at the driver's next heartbeat.
    """
    model = (begun or known)[0].model

    def changed(there: list[dict[str, Any]]) -> list[dict[str, Any]]:
        now = {row["generation"]: _parse_generation(row) for row in there if row["model"] == model}
        _check_unchanged(model, now.values(), known)
        rows = [
            {**build_generation_row(now[name]), **_build_status_columns(status)}
            for name, status in statuses.items()
        ]
        return [*rows, *({**build_generation_row(one), "created_at": NOW} for one in begun)]

    with raise_conflict_as_taken(model):
        put_rows(warehouse, "generations", KEYS, changed)


def _build_status_columns(status: str) -> dict[str, Any]:
    """Return the columns that change with a generation's status."""
    if status == RETIRED:
        return {"status": status, "retired_at": NOW, "owner": None}
    return {"status": status, "retired_at": None} if status == LIVE else {"status": status}


def _check_unchanged(model: str, now: Iterable[Generation], known: Iterable[Generation]) -> None:
    if {one.generation: one.status for one in now} != {one.generation: one.status for one in known}:
        raise stream_taken_error(model, _CHANGED)


def stream_taken_error(model: str, who: str, what: str = "stream") -> UserError:
    """Return the error of a second driver. what: stream, monitor or skill; who: a clause about the first driver."""
    return UserError(f"the {what} of {model} already has a driver: {who}", ALREADY_RUNNING)


@contextmanager
def raise_conflict_as_taken(model: str) -> Iterator[None]:
    """Turn the conflict of two commits into the error of `stream_taken_error`."""
    try:
        yield
    except Conflict as error:
        raise stream_taken_error(model, "another driver has just changed its generations") from error


def update(warehouse: Tables, rows: Rows, values: Mapping[str, Any]) -> None:
    """Set columns of the generations that `rows` selects, in one commit (`row_changes.update_rows`)."""
    update_rows(warehouse, "generations", KEYS, rows, values)


def adopt_topic_id(warehouse: Tables, one: Generation, topic_id: str) -> Generation:
    """Record the so far unknown id of a generation's topic in its row; return the generation with the id."""
    adopted = replace(one, start_position={**one.start_position, "topic_id": topic_id})
    update(
        warehouse,
        {"generation": one.generation},
        {"start_position": build_generation_row(adopted)["start_position"]},
    )
    return adopted


def build_generation_row(one: Generation) -> dict[str, Any]:
    """Return a generation as a row of its table, with the start position as JSON."""
    fields = {name: getattr(one, name) for name in Generation.__dataclass_fields__ if name != "numerics"}
    stored = with_numerics(one.start_position, one.generation, one.numerics)
    return {**fields, "start_position": json.dumps(stored)}


def _parse_generation(values: dict[str, Any]) -> Generation:
    start, numerics = split_numerics(json.loads(values["start_position"]), values["generation"])
    made = Generation(**{**values, "start_position": start, "numerics": numerics})
    return replace(made, epoch=made.epoch or 0)


AnyTables = TypeVar("AnyTables", bound=Tables, covariant=True)


@dataclass(frozen=True)
class DeployedModel(Generic[AnyTables]):
    """A model's deployed spec, and the warehouse with its tables.

    A function with a parameter `DeployedModel[Tables]` needs no Spark. `DeployedModel[Warehouse]` starts Spark on first
    use.
    """

    spec: ModelSpec
    warehouse: AnyTables

    @property
    def name(self) -> str:
        """Return the model's name."""
        return self.spec.name

    def with_spec(self, spec: ModelSpec) -> Self:
        """Return this model with another spec, for example the spec of a generation or a snapshot."""
        return replace(self, spec=spec)
