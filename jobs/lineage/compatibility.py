"""Decide, before Spark starts, if a stream may resume: compare its state's spec and settings with the deployed ones.

Spark compares shapes but not meanings, and silently restores some settings from the checkpoint. This module therefore
finds every difference itself. A rule gives a verdict on each difference: the difference is allowed, it waits for an
upgrade or a hand-over while the stream continues unchanged, or it is refused. `RULES` has a rule for each field of a
spec; `check` applies the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from jobs.core.errors import UserError
from jobs.core.report import suggest_new_start
from jobs.lineage.generation_checkpoint import ReachedCommits, find_half_written_batch
from jobs.lineage.generations import (
    DeployedModel,
    find_shadow,
    read_generations,
    read_position,
    suggest_rollback,
)
from jobs.spark.kafka import read_topic_id
from jobs.specs.model_spec import DEFINITION, NUMERIC, ModelSpec, as_floats
from jobs.specs.sections import PRETRAINED
from jobs.state.encoding.routing import count_blocks
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.positions import DELTA, commit_id, describe, is_same_if_known, parse_offsets
from jobs.storage.tables import measurements

if TYPE_CHECKING:
    from jobs.lineage.generations import Generation
    from jobs.snapshots.manifests import Manifest
    from jobs.spark.warehouse import Warehouse
    from jobs.storage.warehouse import Tables

ALLOWED, MIGRATION, HAND_OVER, REFUSED = "allowed", "migration", "hand-over", "refused"
STORE = "spark.sql.streaming.stateStore."
"""Prefix of the state store's settings. Spark restores their values from the checkpoint."""
PARTITIONS = "spark.sql.shuffle.partitions"


class CompatibilityRule(NamedTuple):
    """The verdict on changes of some fields of a spec between two starts, and the effect of such a change."""

    verdict: str
    fields: tuple[str, ...]
    effect: str


STATELESS_OUTPUTS = ("innovation", "measured", "control", "residual", "matrices", "state_index")
"""The options of `outputs` that need no additional fields in the state."""

RULES = (
    CompatibilityRule(
        ALLOWED,
        ("stream.max_files_per_batch", "stream.max_bytes_per_batch", "source.max_offsets_per_batch"),
        "limits the next micro-batch",
    ),
    CompatibilityRule(ALLOWED, ("quarantine",), "limits the next micro-batch, also one that had failed"),
    CompatibilityRule(
        ALLOWED,
        ("late", *(f"outputs.{name}" for name in ("covariance", *STATELESS_OUTPUTS))),
        "from the next micro-batch on; a half-written one is finished first",
    ),
    CompatibilityRule(
        ALLOWED,
        (
            "time_zone",
            "time_format",
            "time_range",
            "key_from_name",
            "line_pattern",
            "files",
            "missing_values",
            "source.format",
            "source.avro_schema",
            "source.framing",
        )
        + ("source.whole_keys", "source.message_key", "source.tombstones")
        + ("source.topics", "source.pattern", "source.table", "source.clones", "source.rate"),
        "applies to rows that are landed, or read from a topic, from now on",
    ),
    CompatibilityRule(
        ALLOWED,
        ("inputs.table", "inputs.clones", "inputs.key", "inputs.defaults"),
        "from the next micro-batch on; a half-written one is finished first",
    ),
    CompatibilityRule(
        ALLOWED,
        ("source.partitions",),
        "a partition that is added is read from its beginning; one that has been read may not be left out",
    ),
    CompatibilityRule(ALLOWED, ("sinks",), "the next micro-batch goes to the sinks that are named now"),
    CompatibilityRule(
        ALLOWED,
        ("description", "airflow", "upgrade", "migrate", "monitor", "forecast", "retention", "source.start"),
        "not part of the stream",
    ),
    CompatibilityRule(
        HAND_OVER,
        ("stream.partitions", "stream.keys_per_block", "stream.expected_keys", "stream.new_keys"),
        "the stream keeps its layout until `upgrade --mode repartition`",
    ),
    CompatibilityRule(
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
            "outputs.sliding_log_likelihood",
            "version",
        ),
        "under a higher version the stream continues as the old one until `upgrade`; under the same one it is refused",
    ),
    CompatibilityRule(
        REFUSED, ("name", "source.kind", "source.topic"), "the state reflects rows of one source only"
    ),
)
"""The rule for each field of a spec."""
_SPLIT = ("stream", "source", "inputs", "outputs")
_RULE_OF = {field: rule for rule in RULES for field in rule.fields}


class BuiltWith(NamedTuple):
    """The spec, source and settings of an existing state.

    name: name of the generation or snapshot, for messages. position: position in the source up to which the state
    reflects rows. keys: number of keys when the generation or snapshot was made. table: id of its measurements table;
    None if unknown. partitions, blocks: layout of a generation. settings: settings in the checkpoint. takes_keys:
    whether the generation imports newly pretrained keys; None before the first start has fixed this. commits: known
    commit ids of the versions of the measurements that the state reflects, by version.
    """

    name: str
    spec: ModelSpec
    fingerprint: str
    position: Mapping[str, Any]
    keys: int
    table: str | None = None
    partitions: int | None = None
    blocks: int | None = None
    settings: Mapping[str, str] = {}
    takes_keys: bool | None = None
    commits: Mapping[int, str] = {}


class Deployed(NamedTuple):
    """The deployed spec, the id and latest version of the measurements table, and the session's settings.

    commit_of: function that returns the id of the current commit of a version; None if the table's log lacks the
    version.
    topic_id: id of the spec's topic; None if the spec has no topic, or if the id is unknown.
    shadow: name of the shadow that runs the spec's version; None if there is none.
    rollback: the command, after "or", that makes a retired generation of the spec live; empty without one.
    """

    spec: ModelSpec
    table: str | None = None
    latest_version: int | None = None
    settings: Mapping[str, str] = {}
    commit_of: Callable[[int], str | None] = lambda version: None
    topic_id: str | None = None
    shadow: str | None = None
    rollback: str = ""


class Finding(NamedTuple):
    """The verdict on a difference, and a sentence that describes the difference and its remedy."""

    verdict: str
    text: str


def find_differences(built_with: BuiltWith, deployed: Deployed) -> list[Finding]:
    """Return the differences between an existing state and the deployment, except allowed differences."""
    return [finding for check in _CHECKS for finding in check(built_with, deployed)]


def check(built_with: BuiltWith, deployed: Deployed) -> list[str]:
    """Return a sentence for each difference that waits for an upgrade or a hand-over.

    Raises:
        UserError: the stream may not resume; the message has one line per reason.
    """
    found = find_differences(built_with, deployed)
    refused = [one.text for one in found if one.verdict == REFUSED]
    if refused:
        raise UserError(
            "\n".join(f"the stream of {deployed.spec.name} cannot resume: {one}" for one in refused)
        )
    return [one.text for one in found]


def compare_fields(built_with: ModelSpec, deployed: ModelSpec) -> dict[str, str]:
    """Return the fields in which two specs differ, with the verdict on each field; 1 and 1.0 count as equal."""
    old, new = _flatten_fields(built_with), _flatten_fields(deployed)
    names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    same = built_with.fingerprint() == deployed.fingerprint()
    return {name: _find_verdict(name, same) for name in names}


def select_spec(built_with: ModelSpec, deployed: ModelSpec) -> ModelSpec:
    """Return the spec with which a state runs: the deployed spec if it fits the state, else the spec of the state.

    The sections `stream` and `quarantine` always come from the deployed spec.
    """
    if built_with.fingerprint() == deployed.fingerprint():
        return deployed
    return built_with.model_copy(update={"stream": deployed.stream, "quarantine": deployed.quarantine})


def collect_row_rules(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields that decide how rows are processed and that may change between micro-batches."""
    names = {"late", "order", "duplicates"}
    if spec.inputs:
        names |= {"inputs.table", "inputs.key", "inputs.columns", "inputs.defaults"}
    if spec.streamed_source:
        names |= {"time_zone", "time_format", "time_range", "missing_values"}
    rules = {
        name: value
        for name, value in _flatten_fields(spec).items()
        if name in names
        or name.startswith("source.")
        and name not in ("source.max_offsets_per_batch", "source.start", "source.clones")
    }
    return {**rules, "outputs": spec.outputs.model_dump(mode="json", exclude=spec.outputs.left_out)}


def refuse_half_written(
    warehouse: Tables, generation: Generation, before: Mapping[str, Any] | None, now: Mapping[str, Any]
) -> None:
    """Refuse to finish a half-written micro-batch if the row rules have changed since the micro-batch began.

    before: row rules (`collect_row_rules`) of the last driver, or None if there was no driver. now: row rules of the
    driver that is about to start.

    Raises:
        UserError: the rules differ, and rows of the micro-batch were written under the old rules.
    """
    changed = [] if before is None else sorted(name for name in now if before.get(name) != now[name])
    batch = find_half_written_batch(warehouse, generation) if changed else None
    if batch is not None:
        raise UserError(
            f"the stream of {generation.model} cannot resume: micro-batch {batch} of {generation.generation} is half "
            f"written, and {', '.join(changed)} has changed since. Restore the old value and start the stream once, "
            f"which finishes the micro-batch; then change it"
        )


def compute_block_count(spec: ModelSpec, keys: int, partitions: int) -> int:
    """Return the number of blocks per partition of a generation that begins with this many keys."""
    return count_blocks(max(keys, spec.stream.expected_keys or 0), partitions, spec.stream.keys_per_block)


def describe_generation_build(
    model: DeployedModel[Tables], generation: Generation, manifest: Manifest
) -> BuiltWith:
    """Return the `BuiltWith` of a generation, from its row, its snapshot's spec and its checkpoint."""
    warehouse = model.warehouse
    checkpoint = Checkpoint(warehouse, generation.checkpoint)
    settings, sources = checkpoint.settings(), checkpoint.sources()
    position = read_position(warehouse, generation)
    return BuiltWith(
        name=generation.generation,
        spec=manifest.model_spec(model.spec.folder),
        fingerprint=generation.fingerprint,
        position=position,
        keys=manifest.key_count,
        table=position.get("id"),
        partitions=generation.partitions,
        blocks=generation.blocks,
        settings=settings,
        takes_keys=None if sources is None else sources > 1,
        commits=_find_reached_commits(warehouse, generation),
    )


def _find_reached_commits(warehouse: Tables, generation: Generation) -> dict[int, str]:
    """Return the known commits of the measurements that a generation has read, by version."""
    if generation.topic is not None:
        return {}
    found = _parse_stored_commit(generation.start_position)
    table = measurements(generation.model)
    newest = ReachedCommits(warehouse, generation.checkpoint, table).newest()
    return found if newest is None else {**found, newest.version: newest.commit}


def _parse_stored_commit(position: Mapping[str, Any]) -> dict[int, str]:
    return {int(position["version"]): position["commit"]} if "commit" in position else {}


def describe_snapshot_build(manifest: Manifest) -> BuiltWith:
    """Return the `BuiltWith` of a snapshot."""
    return BuiltWith(
        name=f"snapshot {manifest.snapshot_id}",
        spec=manifest.model_spec(),
        fingerprint=manifest.fingerprint,
        position=manifest.position,
        keys=manifest.key_count,
        table=manifest.position.get("id"),
        commits=_parse_stored_commit(manifest.position),
    )


def describe_deployment(model: DeployedModel[Warehouse], stored: Mapping[str, str] = {}) -> Deployed:
    """Return the deployed model, with the session's values of the settings that a checkpoint stores."""
    here = {name: model.warehouse.setting(name) for name in stored if name.startswith(STORE)}
    settings = {name: value for name, value in here.items() if value is not None}
    source = model.spec.streamed_source
    topic = None if source is None else read_topic_id(model.warehouse.spark, source.topic)
    return _build_deployed(model, settings, topic)


def _build_deployed(
    model: DeployedModel[Tables], settings: Mapping[str, str], topic: str | None = None
) -> Deployed:
    warehouse, table = model.warehouse, measurements(model.name)
    id_, latest = warehouse.table_id(table), warehouse.latest_version(table)
    known, commit_of = read_generations(warehouse, model.name), partial(commit_id, warehouse, table)
    rollback = suggest_rollback(known, model.name, model.spec.fingerprint())
    shadow = find_shadow(known, model.spec)
    return Deployed(model.spec, id_, latest, settings, commit_of, topic, shadow, rollback)


def refuse_other_measurements(warehouse: Tables, generation: Generation, manifest: Manifest) -> None:
    """Refuse a generation, begun from a snapshot, if the measurements table no longer has the rows that it has read.

    Raises:
        UserError: the table was recreated, or restored from a backup.
    """
    if generation.topic is not None or not warehouse.exists(measurements(generation.model)):
        return
    model = DeployedModel(manifest.model_spec(), warehouse)
    for finding in _check_table(
        describe_generation_build(model, generation, manifest), _build_deployed(model, {})
    ):
        raise UserError(f"{model.name}: {finding.text}")


def add_commit_to_position(
    warehouse: Tables, generation: Generation, position: dict[str, Any]
) -> dict[str, Any]:
    """Return a reached position with the id of the commit at this position, if the id is known.

    The measurements table still has the generation's rows (`refuse_other_measurements`), so it has every commit up to
    the position.
    """
    if (
        generation.topic is not None
        or max(_find_reached_commits(warehouse, generation), default=-1) < position["version"]
    ):
        return position
    commit = commit_id(warehouse, position["table"], position["version"])
    return position if commit is None else {**position, "commit": commit}


def _flatten_fields(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of a spec; the sections in `_SPLIT` are split into fields, and numeric values are floats."""
    fields: dict[str, Any] = {}
    for name, value in spec.model_dump(mode="json", by_alias=True).items():
        if name in _SPLIT:
            fields |= {f"{name}.{part}": inner for part, inner in (value or {}).items()}
        else:
            fields[name] = as_floats(value) if name in NUMERIC else value
    return fields


def _find_verdict(name: str, same: bool) -> str:
    rule = _RULE_OF.get(name)
    verdict = MIGRATION if rule is None else rule.verdict
    # For example, if `form: covariance` spells out the default.
    return ALLOWED if same and verdict == MIGRATION else verdict


def _check_meaning(built_with: BuiltWith, deployed: Deployed) -> Iterator[Finding]:
    name, old, new = deployed.spec.name, built_with.spec.version, deployed.spec.version
    if built_with.spec.name != name:
        yield Finding(
            REFUSED, f"{built_with.name} holds the state of model {built_with.spec.name}, not of {name}"
        )
    elif built_with.fingerprint != built_with.spec.fingerprint():
        yield Finding(
            REFUSED,
            f"{built_with.name} and the snapshot that it began from are not of one model: start anew: "
            f"{suggest_new_start(name)}",
        )
    elif new < old:
        yield Finding(
            REFUSED,
            f"the deployed spec is version {new}, older than the version {old} of {built_with.name}, so its "
            f"state would change its meaning. Deploy version {old} again{deployed.rollback}",
        )
    elif new > old:
        then = f"`kalman-pipeline upgrade --model {name}`"
        if deployed.shadow is not None:
            then = (
                f"its shadow {deployed.shadow} is promoted (`kalman-pipeline promote --model {name} --generation "
                f"{deployed.shadow}`; `kalman-pipeline retire --model {name} --generation {deployed.shadow}` drops it)"
            )
        yield Finding(
            MIGRATION,
            f"version {new} is deployed, and {built_with.name} continues as version {old} until {then}",
        )
    elif deployed.spec.fingerprint() != built_with.fingerprint:
        fields = [
            field
            for field, verdict in compare_fields(built_with.spec, deployed.spec).items()
            if verdict == MIGRATION
        ]
        yield Finding(
            REFUSED,
            f"its spec has changed since {built_with.name} began, under the same version {old} ({', '.join(fields)}), "
            f"so its state would change its meaning. Restore the spec; or raise its version and run `kalman-pipeline "
            f"upgrade --model {name}`; or start anew: {suggest_new_start(name)}",
        )


def explain_source_change(built_with: BuiltWith, spec: ModelSpec) -> str | None:
    """Return an error text if the source of the spec differs from the source of the state's rows, else None."""
    source = spec.streamed_source
    reached = f"{built_with.name} has reached {describe(built_with.position)}"
    if built_with.position["source"] != spec.source_kind:
        reads = "the measurements table" if source is None else f"topic {source.topic}"
        return (
            f"{reached}, and the spec reads {reads} now. Restore `source`, or start from the new source: "
            f"`kalman-pipeline ingest --model {spec.name}`, {suggest_new_start(spec.name)}"
        )
    if source is not None and built_with.position["topic"] != source.topic:
        return (
            f"{reached}, and the spec reads topic {source.topic} now. Restore the topic, or give the model of the "
            f"other topic a name of its own"
        )
    if source is not None and source.partitions:
        left_out = sorted(parse_offsets(built_with.position).keys() - set(source.partitions))
        if left_out:
            return (
                f"{reached}, and the spec reads only partitions {', '.join(map(str, source.partitions))} now: put back "
                f"partition {', '.join(map(str, left_out))} into source.partitions"
            )
    return None


def _check_source(built_with: BuiltWith, deployed: Deployed) -> Iterator[Finding]:
    # If the deployed version is higher, the stream continues with the spec and source of its state.
    other = (
        None
        if deployed.spec.version > built_with.spec.version
        else explain_source_change(built_with, deployed.spec)
    )
    known = built_with.position.get("topic_id")
    if other is not None:
        yield Finding(REFUSED, other)
    elif _has_same_topic(built_with, deployed.spec) and not is_same_if_known(known, deployed.topic_id):
        name = deployed.spec.name
        yield Finding(
            REFUSED,
            f"{built_with.name} has reached {describe(built_with.position)}, and that topic was deleted and made anew "
            f"since (its id is {deployed.topic_id} now, and was {known}), so these offsets mean other messages. Start "
            f"anew: `kalman-pipeline ingest --model {name} --accept-loss`, {suggest_new_start(name)}",
        )


def _has_same_topic(built_with: BuiltWith, spec: ModelSpec) -> bool:
    """Return whether a spec names the topic of a state; a spec of a higher version may name another topic."""
    source = spec.streamed_source
    return source is not None and built_with.position.get("topic") == source.topic


def _check_table(built_with: BuiltWith, deployed: Deployed) -> Iterator[Finding]:
    if built_with.position["source"] != DELTA:
        return
    anew = f"or start anew: {suggest_new_start(deployed.spec.name)}"
    if built_with.table is not None and deployed.table is not None and built_with.table != deployed.table:
        yield Finding(
            REFUSED,
            f"the measurements table has been recreated since {built_with.name}, so its versions differ (table "
            f"{deployed.table} now, {built_with.table} then). Restore the old table, {anew}",
        )
        return
    reached = max([int(built_with.position["version"]), *built_with.commits])
    if deployed.latest_version is not None and deployed.latest_version < reached:
        yield Finding(
            REFUSED,
            f"{built_with.name} has reached measurements version {reached}, and the table ends with version "
            f"{deployed.latest_version}: it was restored to an older state. Restore the newer one, {anew}",
        )
        return
    for version, commit in sorted(built_with.commits.items()):
        now = deployed.commit_of(version)
        if now not in (None, commit):
            yield Finding(
                REFUSED,
                f"{built_with.name} has read version {version} of the measurements when it was another commit "
                f"({commit} then, {now} now): the table was put back from a backup and has grown again, so rows "
                f"landed since are in no state. Put back the table that was read, {anew}",
            )
            return


def _check_layout(built_with: BuiltWith, deployed: Deployed) -> Iterator[Finding]:
    if built_with.partitions is None or built_with.blocks is None:
        return
    name, wish = deployed.spec.name, deployed.spec.stream
    stored = built_with.settings.get(PARTITIONS)
    if stored is not None and int(stored) != built_with.partitions:
        yield Finding(
            REFUSED,
            f"the checkpoint of {built_with.name} has {stored} state partitions and its row in "
            f"`generations` says {built_with.partitions}, so its keys would not be found. Start anew: "
            f"{suggest_new_start(name)}",
        )
        return
    command = f"`kalman-pipeline upgrade --model {name} --mode repartition`"
    if wish.partitions is not None and wish.partitions != built_with.partitions:
        yield Finding(
            HAND_OVER,
            f"the spec wants {wish.partitions} state partitions, and {built_with.name} keeps its "
            f"{built_with.partitions} until {command}",
        )
    blocks = compute_block_count(deployed.spec, built_with.keys, built_with.partitions)
    if blocks != built_with.blocks:
        yield Finding(
            HAND_OVER,
            f"the spec wants {blocks} blocks of keys in a partition, and {built_with.name} keeps its "
            f"{built_with.blocks} until {command}",
        )


def _check_new_keys(built_with: BuiltWith, deployed: Deployed) -> Iterator[Finding]:
    if deployed.spec.stream.new_keys == PRETRAINED and built_with.takes_keys is False:
        yield Finding(
            HAND_OVER,
            f"the spec wants stream.new_keys: {PRETRAINED}, and {built_with.name} takes no new keys until "
            f"`kalman-pipeline upgrade --model {deployed.spec.name} --mode repartition`",
        )


def _store(built_with: BuiltWith, deployed: Deployed) -> Iterator[Finding]:
    for setting, value in deployed.settings.items():
        stored = built_with.settings.get(setting)
        if stored is not None and stored != value:
            yield Finding(
                HAND_OVER,
                f"{setting} is {value} here, and {built_with.name} keeps its {stored} until `kalman-pipeline "
                f"upgrade --model {deployed.spec.name} --mode repartition`",
            )


_CHECKS: tuple[Callable[[BuiltWith, Deployed], Iterator[Finding]], ...] = (
    _check_meaning,
    _check_source,
    _check_table,
    _check_layout,
    _check_new_keys,
    _store,
)
