"""Gather the rows that a verification compares in one table by key: landed rows, refusals, estimates and states.

Spark stores the state of the last 100 micro-batches, and a fast stream runs more than 100 before a verification has
ended. So a run copies the live generation's state of the sampled keys at its start, and removes the copy at its end.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql import functions as F

from jobs.core.errors import UserError
from jobs.lineage import generations, replayed_late_rows
from jobs.lineage.generations import DeployedModel, read_origin_manifest
from jobs.lineage.live import combine_conditions
from jobs.snapshots import manifests, waiting_rows
from jobs.snapshots.model_runtime import ModelRuntime
from jobs.snapshots.state_rows import find_state_extras_widths
from jobs.snapshots.store import verify
from jobs.spark.hadoop_files import convert_path
from jobs.spark.warehouse import Warehouse
from jobs.state.encoding.keys import build_key_text
from jobs.state.encoding.packets import NEVER
from jobs.state.encoding.table_columns import SCALARS
from jobs.storage import measurements_table
from jobs.storage.positions import find_landed_position, parse_offsets
from jobs.storage.quarantine import TABLE as QUARANTINE
from jobs.storage.row_changes import delete_rows
from jobs.storage.tables import VERIFIED_ENDS, estimates, measurements
from jobs.streaming.exporting import read_states, read_waiting
from jobs.streaming.publishing import JSON_TIME
from jobs.verification.chain import STATE, Segment, is_topic
from jobs.verification.recomputing import Kind
from jobs.verification.runs import CONTINUED_FOR

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from jobs.lineage.generations import Generation
    from jobs.snapshots.manifests import Manifest
    from jobs.snapshots.waiting_rows import Held


_STATE_REASON = "state:"
"""Prefix of the reason for a refused row that the filter has applied, after which the key had no valid state."""
_NAN = float("nan")
ALL = 1_000_000


class CannotVerify(Exception):
    """Raised if a part cannot be verified; the message is the reason in the report."""


def read_snapshot_states(warehouse: Warehouse, manifest: Manifest) -> DataFrame:
    """Return the state rows of a snapshot.

    Raises:
        CannotVerify: the snapshot is damaged; the check of the snapshot reports this damage as a difference.
    """
    try:
        return verify(warehouse, manifest)
    except UserError as damage:
        raise CannotVerify(damage.message) from damage


def read_waiting_rows(warehouse: Warehouse, manifest: Manifest) -> Held | None:
    """Return the waiting rows of a snapshot; None if its model has no watermark.

    Raises:
        CannotVerify: the waiting rows are damaged.
    """
    try:
        return waiting_rows.read_waiting_rows(warehouse, manifest)
    except UserError as damage:
        raise CannotVerify(damage.message) from damage


class KeySample(NamedTuple):
    """The keys to verify: a share per million, chosen by a hash of key and seed, or the listed `keys`."""

    share: int
    seed: str
    keys: tuple[str, ...] = ()

    def has(self, key: Column) -> Column:
        """Return the condition that a key, as text, is in the sample."""
        if self.keys:
            return key.isin(*self.keys)
        if self.share >= ALL:
            return F.lit(True)
        return F.pmod(F.xxhash64(key, F.lit(self.seed)), F.lit(ALL)) < self.share


class Sources(NamedTuple):
    """The pinned tables of a segment: the generation and its runtime, and the versions of estimates and quarantine."""

    warehouse: Warehouse
    generation: Generation
    runtime: ModelRuntime
    segment: Segment
    estimates: int | None
    quarantine: int | None
    imports_keys: bool = False


def read_landed_rows(sources: Sources) -> DataFrame:
    """Return the landed rows of a segment for all keys, with the version or offset of each row as `_place`.

    Raises:
        CannotVerify: the segment's rows cannot be separated from other rows.
    """
    rows = _read_topic(sources) if is_topic(sources.segment) else _read_versions(sources)
    if sources.imports_keys and "_origin" in rows.columns:
        rows = rows.filter(f"NOT {measurements_table.IS_HISTORY}")
    if is_topic(sources.segment):
        return rows
    return replayed_late_rows.drop_foreign_copies(sources.warehouse, rows, sources.generation)


def _read_versions(sources: Sources) -> DataFrame:
    warehouse, segment = sources.warehouse, sources.segment
    table = measurements(sources.generation.model)
    first, last = int(segment.first["version"]) + 1, int(segment.last["version"])
    rows = warehouse.read(table, last)
    if last < first:
        return rows.withColumn("_place", F.lit(0).cast("bigint")).limit(0)
    log = f"{table}/_delta_log"
    have = set(warehouse.files(log).names(""))
    names = [f"{number:020d}.json" for number in range(first, last + 1)]
    gone = [name for name in names if name not in have]
    if gone:
        raise CannotVerify(
            f"{segment.generation}: the log of {table} no longer has version {int(gone[0][:20])}, so which rows came "
            f"after {first - 1} cannot be told"
        )
    root = convert_path(warehouse.spark, warehouse.root)
    commits = warehouse.spark.read.schema("add struct<path string, dataChange boolean>").json(
        [f"{root}/{log}/{name}" for name in names]
    )
    files = commits.filter("add.dataChange").select(
        F.substring_index("add.path", "/", -1).alias("_file"),
        F.left(F.col("_metadata.file_name"), F.lit(20)).cast("bigint").alias("_place"),
    )
    placed = rows.withColumn("_file", F.col("_metadata.file_name"))
    return placed.join(F.broadcast(files), "_file").drop("_file")


def _read_topic(sources: Sources) -> DataFrame:
    warehouse, segment = sources.warehouse, sources.segment
    table, topic = measurements(sources.generation.model), segment.last["topic"]
    begin, end = parse_offsets(segment.first), parse_offsets(segment.last)
    landed = find_landed_position(warehouse, table, topic)
    have = {} if landed is None else parse_offsets(landed)
    behind = [number for number, offset in end.items() if have.get(number, 0) < offset]
    if behind:
        raise CannotVerify(
            f"{segment.generation}: `ingest` has not landed {topic} up to {end[behind[0]]} in partition {behind[0]}, "
            f"and only landed rows can be recomputed: run `kalman-pipeline ingest --model "
            f"{sources.generation.model}`, and verify again"
        )
    # Both bounds stand beside their partition, so that Delta's statistics leave files out.
    inside = combine_conditions(
        (F.col("_partition") == number)
        & (F.col("_offset") >= begin.get(number, 0))
        & (F.col("_offset") < offset)
        for number, offset in end.items()
    )
    return warehouse.read(table).filter(inside).withColumn("_place", F.col("_offset"))


def convert_rows(sources: Sources, rows: DataFrame) -> DataFrame:
    """Convert measurement rows to the checker's columns."""
    fmt = sources.runtime.rows.joined
    numbers = [F.col(f"`{name}`").cast("double") for name in (*fmt.measurement, *fmt.control)]
    return rows.select(
        *_build_row(
            Kind.ROW,
            build_key_text(fmt.kind),
            F.unix_micros(F.col(f"`{fmt.time}`")),
            _build_array(numbers),
            F.lit(0),
        ),
        F.col("_place").cast("bigint").alias("place"),
        *_build_empty_columns("flag", "count", "log_likelihood"),
    )


def read_refused_rows(sources: Sources) -> DataFrame | None:
    """Return the rows that a generation has refused up to the segment's end; None without a quarantine table."""
    warehouse, generation, fmt = sources.warehouse, sources.generation, sources.runtime.rows
    if sources.quarantine is None:
        return None
    rows = select_segment(warehouse.read(QUARANTINE, sources.quarantine), sources)
    rows = rows.filter(
        (F.col("model") == generation.model) & (F.col("source") == measurements(generation.model))
    )
    fields = [f"`{name}` {type_}" for name, type_ in zip(fmt.kind.columns, fmt.kind.types, strict=True)]
    fields += [f"`{fmt.time}` timestamp", *(f"`{name}` double" for name in fmt.numbers)]
    parsed = rows.select(
        F.from_json("payload", ", ".join(fields), {"timestampFormat": JSON_TIME}).alias("row"),
        F.col("batch_id").alias("_batch"),
        F.col("reason").alias("_reason"),
    ).select("row.*", "_batch", "_reason")
    bad = F.col("_reason").startswith(_STATE_REASON)
    kind = F.when(bad, Kind.REFUSED_STATE.value).otherwise(Kind.REFUSED.value)
    numbers = _build_array([F.col(f"`{name}`") for name in fmt.numbers])
    return parsed.select(
        *_build_row(
            kind, build_key_text(fmt.kind), F.unix_micros(F.col(f"`{fmt.time}`")), numbers, F.col("_batch")
        ),
        *_build_empty_columns("place", "flag", "count", "log_likelihood"),
    )


def read_estimates(sources: Sources, extra: tuple[tuple[str, int], ...]) -> DataFrame | None:
    """Return the estimates of a generation up to the segment's end; None without a table of estimates."""
    if sources.estimates is None:
        return None
    table = sources.warehouse.read(estimates(sources.generation.model), sources.estimates)
    rows = select_segment(table, sources)
    correction = F.lit(0)
    if "correction" in rows.columns:
        correction = F.coalesce("correction", F.lit(False)).cast("int")
    n = len(sources.runtime.spec.states)
    variances = F.array(
        *(
            F.get("covariance", F.lit(i)) if i == j else F.lit(None).cast("double")
            for i in range(n)
            for j in range(n)
        )
    )
    covariance = F.when(F.size("covariance") == n, variances).otherwise(F.col("covariance"))
    beside = [
        F.array(F.coalesce(F.col(f"`{name}`").cast("double"), F.lit(_NAN)))
        if name in SCALARS
        else F.coalesce(F.col(f"`{name}`"), F.array_repeat(F.lit(_NAN), width))
        for name, width in extra
    ]
    numbers = F.concat(F.col("mean"), covariance, F.array("log_likelihood", "nis"), *beside)
    filled = F.transform(numbers, lambda one: F.coalesce(one, F.lit(_NAN)))
    return rows.select(
        *_build_row(Kind.ESTIMATE, F.col("key"), F.unix_micros("event_time"), filled, F.col("batch_id")),
        correction.cast("bigint").alias("place"),
        F.col("flags").alias("flag"),
        *_build_empty_columns("count", "log_likelihood"),
    )


def convert_states(kind: Kind, rows: DataFrame, runtime: ModelRuntime) -> DataFrame:
    """Convert state rows, with the columns of a snapshot, to the checker's columns."""
    beside = [F.col("extras")[name] for name in find_state_extras_widths(runtime.kernel)]
    numbers = F.concat(F.col("mean"), F.col("covariance"), *beside)
    return rows.select(
        *_build_row(kind, F.col("key"), F.unix_micros("event_time"), numbers, F.lit(0)),
        *_build_empty_columns("place", "flag"),
        F.col("state_index").alias("count"),
        "log_likelihood",
    )


def convert_waiting_rows(kind: Kind, rows: DataFrame) -> DataFrame:
    """Convert waiting rows, with a snapshot's columns, to the checker's columns.

    Their place is -1, before all landed rows.
    """
    numbers = F.transform(F.concat("measurement", "control"), lambda one: F.coalesce(one, F.lit(_NAN)))
    return rows.select(
        *_build_row(kind, F.col("key"), F.unix_micros("event_time"), numbers, F.lit(0)),
        F.lit(-1).cast("bigint").alias("place"),
        *_build_empty_columns("flag", "count", "log_likelihood"),
    )


def select_segment(rows: DataFrame, sources: Sources) -> DataFrame:
    """Return the rows of a table that belong to a segment; the table has columns for generation and micro-batch."""
    segment = sources.segment
    return rows.filter(
        (F.col("generation") == segment.generation) & (F.col("batch_id") <= segment.last_batch)
    )


def read_table_versions(model: DeployedModel[Warehouse]) -> dict[str, int | None]:
    """Return the versions of the tables that a verification reads; None for a table that does not exist."""

    def version(table: str) -> int | None:
        return model.warehouse.latest_version(table) if model.warehouse.exists(table) else None

    return {"estimates": version(estimates(model.name)), "quarantine": version(QUARANTINE)}


def _build_row(
    kind: Kind | Column, key: Column, time: Column, numbers: Column, batch: Column
) -> list[Column]:
    return [
        (F.lit(kind.value) if isinstance(kind, Kind) else kind).cast("int").alias("kind"),
        key.cast("string").alias("key"),
        time.alias("time"),
        batch.cast("bigint").alias("batch"),
        numbers.alias("numbers"),
    ]


_TYPES = {"place": "bigint", "flag": "string", "count": "bigint", "log_likelihood": "double"}


def _build_empty_columns(*names: str) -> list[Column]:
    return [F.lit(None).cast(_TYPES[name]).alias(name) for name in names]


def _build_array(numbers: list[Column]) -> Column:
    return F.array(*(F.coalesce(one, F.lit(_NAN)) for one in numbers))


TABLE = "verified_ends"


class End(NamedTuple):
    """The states and waiting rows at the end of a segment, in the checker's columns, and the watermark.

    waiting: the number of waiting rows of all keys.
    """

    rows: DataFrame
    waiting: int
    watermark: int


def copy_state(
    model: DeployedModel[Warehouse], segment: Segment, sample: KeySample, run_id: str
) -> dict[str, int]:
    """Copy the sampled states and waiting rows at the live generation's pinned micro-batch.

    Returns the number of waiting rows of all keys, and the watermark.
    """
    warehouse = model.warehouse
    generation = generations.read_named(warehouse, model.name, segment.generation)
    begun = read_origin_manifest(warehouse, generation)
    own = begun.model_spec(model.spec.folder)
    runtime = ModelRuntime.of(warehouse, own, begun.parameters)
    batch = segment.last_batch
    held = read_waiting(model, generation, begun, batch) if own.timed else None
    end = _build_end(runtime, read_states(model, generation, begun, batch).frame, held)
    columns = {
        "run_id": F.lit(run_id),
        "model": F.lit(model.name),
        "copied_at": F.current_timestamp(),
    }
    warehouse.create(TABLE, VERIFIED_ENDS)
    forget(model, None)
    warehouse.append(end.rows.filter(sample.has(F.col("key"))).withColumns(columns), TABLE)
    return {"waiting": end.waiting, "watermark": end.watermark}


def forget(model: DeployedModel[Warehouse], run_id: str | None) -> None:
    """Remove the copies of a finished run or, for None, of all runs that are too old to be continued."""
    old = ("copied_at", "<", datetime.now(UTC) - CONTINUED_FOR)
    of_run = old if run_id is None else ("run_id", "=", run_id)
    delete_rows(model.warehouse, TABLE, [[("model", "=", model.name), of_run]])


def end_of(
    warehouse: Warehouse, runtime: ModelRuntime, segment: Segment, run_id: str, copied: dict[str, Any] | None
) -> End | None:
    """Return the end of a segment; None if its states are not stored.

    copied: the result of `copy_state` in this run.

    Raises:
        CannotVerify: the states were removed, or the waiting rows are needed and unknown.
    """
    if segment.end == STATE:
        assert copied is not None
        rows = warehouse.read(TABLE).filter(F.col("run_id") == run_id)
        return End(rows.drop("run_id", "model", "copied_at"), copied["waiting"], copied["watermark"])
    if segment.end is None:
        if runtime.spec.order.waits:
            raise CannotVerify(f"{segment.generation}: which rows waited at its end was not exported")
        return None
    exported = manifests.find(warehouse, segment.end)
    if exported is None:
        raise CannotVerify(f"{segment.generation}: snapshot {segment.end}, its end, was removed")
    held = read_waiting_rows(warehouse, exported) if runtime.spec.timed else None
    return _build_end(runtime, read_snapshot_states(warehouse, exported), held)


def _build_end(runtime: ModelRuntime, states: DataFrame, held: Held | None) -> End:
    rows = convert_states(Kind.END, states, runtime)
    if held is None:
        return End(rows, 0, NEVER)
    waiting = convert_waiting_rows(Kind.WAITING, held.rows)
    return End(rows.unionByName(waiting), held.rows.count(), held.watermark)
