"""Decide, before Spark is asked, if a stream may go on: what its state was made with, against what is asked for now.

Spark compares shapes and never meanings, and some settings it takes silently from the checkpoint. So every difference
is found here, and each has a rule: it is allowed; it waits for an upgrade or a hand-over, and the stream goes on as it
was made until then; or it is refused. `RULES` says it for each field of a spec, `judge` for a stream as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.errors import PySparkException

from jobs.core.errors import UserError
from jobs.encoding.routing import blocks_for
from jobs.lineage.damage import half_written
from jobs.lineage.generations import position_of
from jobs.specs.model_spec import DEFINITION, NUMERIC, ModelSpec, as_floats
from jobs.specs.sections import PRETRAINED
from jobs.warehouse.checkpoints import Checkpoint
from jobs.warehouse.positions import DELTA, said
from jobs.warehouse.tables import measurements

if TYPE_CHECKING:
    from jobs.lineage.generations import Generation
    from jobs.snapshots.manifests import Manifest
    from jobs.warehouse.delta import Warehouse

ALLOWED, MIGRATION, HAND_OVER, REFUSED = "allowed", "migration", "hand-over", "refused"
STORE = "spark.sql.streaming.stateStore."
"""What the names of the state store's settings begin with. Spark goes on with those that the checkpoint says."""
PARTITIONS = "spark.sql.shuffle.partitions"


class Rule(NamedTuple):
    """What a restart may do with fields of a spec, and what that means."""

    verdict: str
    fields: tuple[str, ...]
    then: str


RULES = (
    Rule(
        ALLOWED,
        ("stream.max_files_per_batch", "stream.max_bytes_per_batch", "source.max_offsets_per_batch"),
        "the next micro-batch takes in as much as is said now",
    ),
    Rule(ALLOWED, ("quarantine",), "the next micro-batch is judged by it, also one that had failed"),
    Rule(
        ALLOWED, ("late", "outputs"), "from the next micro-batch on; one that is half written is ended first"
    ),
    Rule(
        ALLOWED,
        (
            "time_zone",
            "time_format",
            "missing_values",
            "source.format",
            "source.avro_schema",
            "source.framing",
        )
        + ("source.whole_keys", "source.message_key", "source.tombstones"),
        "what is landed, or comes from a topic, is read so from now on",
    ),
    Rule(
        ALLOWED,
        ("inputs.table", "inputs.key", "inputs.defaults"),
        "the next micro-batch takes its keys' inputs so; one that is half written is ended first",
    ),
    Rule(ALLOWED, ("sinks",), "the next micro-batch is handed to those that are named now"),
    Rule(
        ALLOWED,
        ("description", "airflow", "upgrade", "migrate", "monitor", "forecast", "retention", "source.start"),
        "no part of the stream",
    ),
    Rule(
        HAND_OVER,
        ("stream.partitions", "stream.keys_per_block", "stream.expected_keys", "stream.new_keys"),
        "the stream goes on as it is laid out until `upgrade --mode repartition`",
    ),
    Rule(
        MIGRATION,
        (
            *DEFINITION,
            "form",
            "learn",
            "key",
            "time",
            "time_unit",
            "order",
            "duplicates",
            "expiry",
            "inputs.columns",
            "version",
        ),
        "under a higher version the stream goes on as the old one until `upgrade`; under the same one it is refused",
    ),
    Rule(REFUSED, ("name", "source.kind", "source.topic"), "the state reflects rows of that very source"),
)
"""For each field of a spec, what becomes of a change between two starts of a stream."""
_SPLIT = ("stream", "source", "inputs")
_RULE_OF = {field: rule for rule in RULES for field in rule.fields}


class BuiltWith(NamedTuple):
    """What a state was made with.

    what: the generation or snapshot, in words; reached: the position that its rows are reflected up to; table: the id
    of the Delta table that it reads, None where it is not known; partitions and blocks: of a generation; stored: the
    settings that Spark wrote into its checkpoint; takes_keys: it takes newly pretrained keys, None before that is
    fixed.
    """

    what: str
    spec: ModelSpec
    fingerprint: str
    reached: Mapping[str, Any]
    keys: int
    table: str | None = None
    partitions: int | None = None
    blocks: int | None = None
    stored: Mapping[str, str] = {}
    takes_keys: bool | None = None


class Deployed(NamedTuple):
    """What is asked for now: the deployed spec, the measurements table as it is, and the session's settings."""

    spec: ModelSpec
    table: str | None = None
    newest: int | None = None
    settings: Mapping[str, str] = {}


class Finding(NamedTuple):
    """A difference: what becomes of it, and the sentence that says what it is and what to do."""

    verdict: str
    said: str


def differences(made: BuiltWith, asked: Deployed) -> list[Finding]:
    """Return what differs between what a state was made with and what is asked for now, but for what is allowed."""
    return [finding for check in _CHECKS for finding in check(made, asked)]


def check(made: BuiltWith, asked: Deployed) -> list[str]:
    """Return what a person should know of differences that wait for an upgrade or a hand-over.

    Raises:
        UserError: the stream may not go on; a line for each reason.
    """
    found = differences(made, asked)
    refused = [one.said for one in found if one.verdict == REFUSED]
    if refused:
        raise UserError("\n".join(f"the stream of {asked.spec.name} cannot go on: {one}" for one in refused))
    return [one.said for one in found]


def changes(made: ModelSpec, asked: ModelSpec) -> dict[str, str]:
    """Return the fields in which two specs differ, and the verdict of each; 1 and 1.0 are one number."""
    old, new = _fields(made), _fields(asked)
    names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    same = made.fingerprint() == asked.fingerprint()
    return {name: _verdict(name, same) for name in names}


def spec_to_run(made: ModelSpec, asked: ModelSpec) -> ModelSpec:
    """Return the spec that a state goes on with: the deployed one, or its own where that is of another version.

    How a stream takes in its rows, and when it fails, is always as the deployed one says.
    """
    if made.fingerprint() == asked.fingerprint():
        return asked
    return made.model_copy(update={"stream": asked.stream, "quarantine": asked.quarantine})


def row_rules(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields that may change between micro-batches and that decide what becomes of a row."""
    names = {"late", "outputs", "order", "duplicates"}
    if spec.inputs:
        names |= {"inputs.table", "inputs.key", "inputs.columns", "inputs.defaults"}
    if spec.source:
        names |= {"time_zone", "time_format", "missing_values"}
    return {
        name: value
        for name, value in _fields(spec).items()
        if name in names
        or name.startswith("source.")
        and name not in ("source.max_offsets_per_batch", "source.start")
    }


def refuse_half_written(
    warehouse: Warehouse, generation: Generation, before: Mapping[str, Any] | None, now: Mapping[str, Any]
) -> None:
    """Refuse to end a micro-batch that is half written under other rules of rows than those that it was begun under.

    Raises:
        UserError: the rules have changed, and rows of it were written by the old ones.
    """
    changed = [] if before is None else sorted(name for name in now if before.get(name) != now[name])
    batch = half_written(warehouse, generation) if changed else None
    if batch is not None:
        raise UserError(
            f"the stream of {generation.model} cannot go on: micro-batch {batch} of {generation.generation} is half "
            f"written, and {', '.join(changed)} has changed since. Put it back and start once, which ends the "
            f"micro-batch; then change it"
        )


def blocks_of(spec: ModelSpec, keys: int, partitions: int) -> int:
    """Return how many blocks a partition has in a generation that begins with so many keys."""
    return blocks_for(max(keys, spec.stream.expected_keys or 0), partitions, spec.stream.keys_per_block)


def generation_built_with(
    warehouse: Warehouse, generation: Generation, manifest: Manifest, folder: str | None
) -> BuiltWith:
    """Return what a generation was made with: its row, its snapshot's spec, and what its checkpoint says.

    folder: of the model's functions (`ModelSpec.folder`).
    """
    checkpoint = Checkpoint(warehouse, generation.checkpoint)
    stored, sources = checkpoint.settings(), checkpoint.sources()
    reached = position_of(warehouse, generation)
    return BuiltWith(
        what=generation.generation,
        spec=manifest.model_spec(folder),
        fingerprint=generation.fingerprint,
        reached=reached,
        keys=manifest.key_count,
        table=reached.get("id"),
        partitions=generation.partitions,
        blocks=generation.blocks,
        stored=stored,
        takes_keys=None if sources is None else sources > 1,
    )


def snapshot_built_with(manifest: Manifest) -> BuiltWith:
    """Return what a snapshot was made with."""
    return BuiltWith(
        what=f"snapshot {manifest.snapshot_id}",
        spec=manifest.model_spec(),
        fingerprint=manifest.fingerprint,
        reached=manifest.position,
        keys=manifest.key_count,
        table=manifest.position.get("id"),
    )


def deployed(warehouse: Warehouse, spec: ModelSpec, stored: Mapping[str, str] = {}) -> Deployed:
    """Return what is asked for now, with the session's values of the settings that a checkpoint has stored."""

    table = measurements(spec.name)
    settings: dict[str, str] = {}
    for name in stored:
        if name.startswith(STORE):
            try:
                settings[name] = str(warehouse.spark.conf.get(name))
            except PySparkException:  # this Spark does not know it
                continue
    return Deployed(spec, warehouse.table_id(table), warehouse.latest_version(table), settings)


def _fields(spec: ModelSpec) -> dict[str, Any]:
    """Return a spec's fields, those of the sections in `_SPLIT` one by one, with all numbers as floats."""
    fields: dict[str, Any] = {}
    for name, value in spec.model_dump(mode="json", by_alias=True).items():
        if name in _SPLIT:
            fields |= {f"{name}.{part}": inner for part, inner in (value or {}).items()}
        else:
            fields[name] = as_floats(value) if name in NUMERIC else value
    return fields


def _verdict(name: str, same: bool) -> str:
    rule = _RULE_OF.get(name)
    verdict = MIGRATION if rule is None else rule.verdict
    return ALLOWED if same and verdict == MIGRATION else verdict  # `form: covariance` is what none is, say


def _meaning(made: BuiltWith, asked: Deployed) -> Iterator[Finding]:
    name, old, new = asked.spec.name, made.spec.version, asked.spec.version
    if made.spec.name != name:
        yield Finding(REFUSED, f"{made.what} holds the state of model {made.spec.name}, not of {name}")
    elif made.fingerprint != made.spec.fingerprint():
        yield Finding(
            REFUSED,
            f"{made.what} and the snapshot that it began from are not of one model: start a new generation with "
            f"`stream --model {name} --adopt SNAPSHOT`",
        )
    elif new < old:
        yield Finding(
            REFUSED,
            f"the deployed spec is version {new}, older than the version {old} of {made.what}, so its state would mean "
            f"something else. Put version {old} back, or go back with `kalman-pipeline rollback --model {name}`",
        )
    elif new > old:
        yield Finding(
            MIGRATION,
            f"version {new} is deployed, and {made.what} goes on as version {old} until `kalman-pipeline upgrade "
            f"--model {name}`",
        )
    elif asked.spec.fingerprint() != made.fingerprint:
        fields = [field for field, verdict in changes(made.spec, asked.spec).items() if verdict == MIGRATION]
        yield Finding(
            REFUSED,
            f"its spec has changed since {made.what} began, under the same version {old} ({', '.join(fields)}), so "
            f"its state would mean something else. Put the spec back; or raise its version and run `kalman-pipeline "
            f"upgrade --model {name}`; or pretrain it and start a new generation with `stream "
            f"--model {name} --adopt SNAPSHOT`",
        )


def other_source(made: BuiltWith, spec: ModelSpec) -> str | None:
    """Return what is wrong if a spec reads another source than the one that a state reflects rows of."""
    source = spec.source
    if made.reached["source"] != spec.source_kind:
        return (
            f"{made.what} has come to {said(made.reached)}, and the spec "
            + ("reads the measurements table" if source is None else f"reads topic {source.topic}")
            + " now. Put `source` back as it was, or begin anew from the new source: `ingest`, `pretrain`, and `stream "
            f"--model {spec.name} --adopt` the new snapshot"
        )
    if source is not None and made.reached["topic"] != source.topic:
        return (
            f"{made.what} has come to {said(made.reached)}, and the spec reads topic {source.topic} now. Put the topic "
            f"back, or give the model of the other topic a name of its own"
        )
    return None


def _source(made: BuiltWith, asked: Deployed) -> Iterator[Finding]:
    # Under a higher version it goes on with its own spec, which has its own source.
    other = None if asked.spec.version > made.spec.version else other_source(made, asked.spec)
    if other is not None:
        yield Finding(REFUSED, other)


def _table(made: BuiltWith, asked: Deployed) -> Iterator[Finding]:
    if made.reached["source"] != DELTA:
        return
    name = asked.spec.name
    if made.table is not None and asked.table is not None and made.table != asked.table:
        yield Finding(
            REFUSED,
            f"the measurements table has been made anew since {made.what}, so its versions are others (table "
            f"{asked.table} now, {made.table} then). Put the old table back; or begin anew: `pretrain`, and `stream "
            f"--model {name} --adopt` the new snapshot",
        )
    elif asked.newest is not None and asked.newest < made.reached["version"]:
        yield Finding(
            REFUSED,
            f"{made.what} has come to {said(made.reached)}, and the table ends with version {asked.newest}: it was put "
            f"back to an older state. Put the newer one back; or begin anew: `pretrain`, and `stream --model {name} "
            f"--adopt` the new snapshot",
        )


def _layout(made: BuiltWith, asked: Deployed) -> Iterator[Finding]:
    if made.partitions is None or made.blocks is None:
        return
    name, wish = asked.spec.name, asked.spec.stream
    stored = made.stored.get(PARTITIONS)
    if stored is not None and int(stored) != made.partitions:
        yield Finding(
            REFUSED,
            f"the checkpoint of {made.what} has {stored} state partitions and its row in `generations` says "
            f"{made.partitions}, so its keys would not be found. Start a new generation with `stream --model {name} "
            f"--adopt SNAPSHOT`",
        )
        return
    command = f"`kalman-pipeline upgrade --model {name} --mode repartition`"
    if wish.partitions is not None and wish.partitions != made.partitions:
        yield Finding(
            HAND_OVER,
            f"the spec wants {wish.partitions} state partitions, and {made.what} keeps its {made.partitions} until "
            f"{command}",
        )
    blocks = blocks_of(asked.spec, made.keys, made.partitions)
    if blocks != made.blocks:
        yield Finding(
            HAND_OVER,
            f"the spec wants {blocks} blocks of keys in a partition, and {made.what} keeps its {made.blocks} until "
            f"{command}",
        )


def _new_keys(made: BuiltWith, asked: Deployed) -> Iterator[Finding]:
    if asked.spec.stream.new_keys == PRETRAINED and made.takes_keys is False:
        yield Finding(
            HAND_OVER,
            f"the spec wants stream.new_keys: {PRETRAINED}, and {made.what} takes no new keys until `kalman-pipeline "
            f"upgrade --model {asked.spec.name} --mode repartition`",
        )


def _store(made: BuiltWith, asked: Deployed) -> Iterator[Finding]:
    for setting, value in asked.settings.items():
        stored = made.stored.get(setting)
        if stored is not None and stored != value:
            yield Finding(
                HAND_OVER,
                f"{setting} is {value} here, and {made.what} keeps its {stored} until `kalman-pipeline upgrade --model "
                f"{asked.spec.name} --mode repartition`",
            )


_CHECKS: tuple[Callable[[BuiltWith, Deployed], Iterator[Finding]], ...] = (
    _meaning,
    _source,
    _table,
    _layout,
    _new_keys,
    _store,
)
