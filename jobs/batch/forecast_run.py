"""Forecast from the states of the live generation or of a snapshot into a table, exactly once for each run's id.

Spark's workers forecast the keys, with their inputs: a row for each key and future time.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from jobs.core.errors import RUN_FAILED, UserError, extract_python_error
from jobs.core.input_files import open_input
from jobs.core.report import format_count, format_span
from jobs.core.times import now
from jobs.lineage import generations
from jobs.lineage.generation_checkpoint import refuse_damaged
from jobs.lineage.generations import DeployedModel
from jobs.lineage.generations import read_origin_manifest as origin_of
from jobs.lineage.inputs_table import INPUTS, InputsTable
from jobs.offline.ahead import ForecastKeys, Future, forecast_ahead, list_forecasts, read_future
from jobs.offline.horizon import ForecastRequest, Horizon
from jobs.offline.stored_keys import refuse_absent_keys
from jobs.snapshots import manifests
from jobs.snapshots.manifests import GOOD
from jobs.snapshots.model_runtime import ModelRuntime
from jobs.snapshots.state_rows import find_state_extras_widths, parse_states, split_extras
from jobs.snapshots.store import verify
from jobs.spark.job_labels import label_jobs
from jobs.spark.warehouse import Warehouse, format_ddl
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding.arrow import build_integers, build_lists, build_matrix, build_vectors
from jobs.state.encoding.estimates import find_flag_names
from jobs.state.encoding.keys import KeyKind, build_key_columns, build_key_text
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.positions import describe, to_datetime
from jobs.storage.tables import forecasts
from jobs.storage.warehouse import find_home
from jobs.streaming.exporting import read_states
from kalman.run import KeyStates
from kalman.types import Filter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.snapshots.manifests import Manifest


ROWS = (
    "key string, made_at bigint, event_time bigint, step bigint, mean array<double>, covariance array<double>, "
    "lower array<double>, upper array<double>, measurement_mean array<double>, measurement_covariance array<double>, "
    "measurement_lower array<double>, measurement_upper array<double>, flag string"
)
"""The columns of a forecast. `made_at` is the time of the key's newest row, `step` the number of the forecast; the
others are the same as in the files that `forecast` writes.
"""
FUTURE = "future"
"""The column with the key's future rows, beside the states and `INPUTS`: array<struct<time bigint, control
array<double>, inputs array<double>>>.
"""
_FUTURE = f"struct<time: bigint, control: array<double>, {INPUTS}: array<double>>"
NUMBERS_AT_ONCE = 8_000_000
"""The number of values in the forecasts of one call: some tens of megabytes."""


class ForecastPlan(NamedTuple):
    """The settings for the workers: the model, its filter, the horizon, and the source of future rows, if any.

    own_inputs: future rows have inputs that replace the inputs of their keys.
    """

    spec: ModelSpec
    kernel: Filter
    horizon: Horizon
    probability: float
    future: str | None = None
    own_inputs: bool = False


class FutureRows(NamedTuple):
    """Future rows by key (`key` and `FUTURE`), their digest, and whether they have inputs."""

    rows: DataFrame
    digest: str
    own_inputs: bool


def join_inputs(
    model: DeployedModel[Warehouse], kind: KeyKind, states: DataFrame
) -> tuple[DataFrame, int | None]:
    """Return states with their keys' inputs, and the version of the table of inputs (None if the model has no inputs).

    A key that is not in the table gets the defaults; without defaults it gets NaN, so its forecasts have a flag.
    """
    if model.spec.inputs is None:
        return states, None
    inputs, version = InputsTable(model).by_key(states.select("key"), kind)
    return states.join(inputs, "key"), version


def read_future_rows(model: DeployedModel[Warehouse], kind: KeyKind, file: str) -> FutureRows:
    """Read a file of future rows (`read_future`) and group the rows by key.

    Raises:
        UserError: the file cannot be read, or has a row that cannot be used.
    """
    future = read_future(model.spec, file)
    names = [f"k{i}" for i in range(len(model.spec.key))]
    none = pa.nulls(len(future.time), pa.list_(pa.float64()))
    columns = [
        *future.keys,
        build_integers(future.time),
        build_lists(future.control) if model.spec.control else none,
        none if future.inputs is None else build_lists(future.inputs),
    ]
    table = pa.table(columns, names=[*names, "time", "control", INPUTS])
    typed = (F.col(a).cast(t).alias(b) for a, b, t in zip(names, kind.columns, kind.types, strict=True))
    frame = model.warehouse.spark.createDataFrame(table).select(*typed, "time", "control", INPUTS)
    row = F.struct(F.col("time"), F.col("control"), F.col(INPUTS)).cast(_FUTURE)
    grouped = frame.select(build_key_text(kind).alias("key"), row.alias("row")).groupBy("key")
    found = grouped.agg(F.collect_list("row").alias(FUTURE))
    with open_input(file) as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()[:16]
    return FutureRows(found, digest, future.inputs is not None)


def forecast_rows(states: DataFrame, plan: ForecastPlan) -> DataFrame:
    """Forecast the keys of a snapshot's rows (with `INPUTS` and `FUTURE`, if the model takes them); return `ROWS`."""
    columns = states.select(
        "key",
        F.unix_micros("event_time").alias("event_time"),
        F.col("state_index").alias("count"),
        "mean",
        "covariance",
        *split_extras(find_state_extras_widths(plan.kernel)),
        *(name for name in (INPUTS, FUTURE) if name in states.columns),
    )
    return columns.mapInArrow(build_forecaster(plan), ROWS)


def build_forecaster(plan: ForecastPlan) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function that forecasts the keys in batches with the columns that `forecast_rows` selects."""

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for part in _split_batch(batch, plan):
                yield _forecast_batch(part, plan)

    return work


def _split_batch(batch: pa.RecordBatch, plan: ForecastPlan) -> Iterator[pa.RecordBatch]:
    """Cut a batch so that the forecasts of each part fit into memory; the cuts do not change the forecasts."""
    if batch.num_rows == 0:
        return
    n, m = len(plan.spec.states), len(plan.spec.measurement)
    if plan.future is not None:
        steps = max(int(batch.column(FUTURE).value_lengths().fill_null(0).to_numpy().max()), 1)
    else:
        steps = plan.horizon.count_steps(int(batch.column("event_time").to_numpy().min()))
    size = max(int(NUMBERS_AT_ONCE // (steps * (n + n * n + m + m * m))), 1)
    for start in range(0, batch.num_rows, size):
        yield batch.slice(start, size)


def _forecast_batch(batch: pa.RecordBatch, plan: ForecastPlan) -> pa.RecordBatch:
    spec, kernel, size = plan.spec, plan.kernel, batch.num_rows
    values = kernel.restore(*parse_states(batch, len(spec.states), find_state_extras_widths(kernel)))
    made, count = (batch.column(name).to_numpy() for name in ("event_time", "count"))
    own = len(spec.input_names)
    inputs = build_matrix(batch.column(INPUTS), own, INPUTS) if own else np.empty((0, size))
    names = batch.column("key")
    keys = ForecastKeys([names], KeyStates(values, made, count, np.zeros(size)), inputs)
    future = None if plan.future is None else _build_future(batch, plan)
    found = forecast_ahead(spec, kernel, keys, plan.horizon, future)
    rows = list_forecasts(spec, found, plan.probability)
    arrays = [
        names.take(build_integers(rows.key)),
        *map(build_integers, (made[rows.key], rows.time, rows.step)),
    ]
    arrays += [build_vectors(column.values, rows.flag == 0) for column in rows.columns]
    arrays.append(find_flag_names(rows.flag).cast(pa.string()))
    return pa.RecordBatch.from_arrays(arrays, [part.split()[0] for part in ROWS.split(", ")])


def _build_future(batch: pa.RecordBatch, plan: ForecastPlan) -> Future:
    """Return the future rows of the keys of a batch."""
    assert plan.future is not None
    column = batch.column(FUTURE)
    counts = column.value_lengths().fill_null(0).to_numpy()
    rows = column.flatten()
    controls, own = len(plan.spec.control), len(plan.spec.input_names)
    names = batch.column("key").take(build_integers(np.repeat(np.arange(batch.num_rows), counts)))
    time = rows.field("time").to_numpy()
    control = (
        build_matrix(rows.field("control"), controls, "control") if controls else np.empty((0, len(rows)))
    )
    inputs = build_matrix(rows.field(INPUTS), own, INPUTS) if plan.own_inputs else None
    return Future(plan.future, [names], time, control, inputs)


NEWEST = "newest"
"""The value in place of a snapshot's name that means the newest snapshot, even if a stream is live."""


class ForecastOrigin(NamedTuple):
    """States of keys (the rows of a snapshot) and their origin.

    manifest: the manifest of the snapshot, or of the snapshot from which the generation began; it has the spec and the
        parameters.
    generation, batch: None if the states are those of a snapshot.
    taken_at: when the micro-batch or the snapshot was committed; None means that the time is unknown.
    position: the position in the source that the states reflect, in words.
    """

    manifest: Manifest
    spec: ModelSpec
    states: DataFrame
    generation: str | None
    batch: int | None
    taken_at: datetime | None
    position: str

    @property
    def name(self) -> str:
        """Return a name of the states; the same states always get the same name."""
        if self.generation is None:
            return self.manifest.snapshot_id
        return f"{self.generation}-b{self.batch}"

    @property
    def text(self) -> str:
        """Return the name of the states in words."""
        if self.generation is None:
            return f"snapshot {self.manifest.snapshot_id}"
        return f"micro-batch {self.batch} of {self.generation}"


def find_origin(model: DeployedModel[Warehouse], snapshot: str | None) -> ForecastOrigin:
    """Return the states to forecast from.

    Args:
        model: the deployed model.
        snapshot: a snapshot's id, or `newest`; None means the live generation or, if none is live, the newest snapshot.

    Raises:
        UserError: the snapshot does not exist, the model has no snapshot, or the states are damaged.
    """
    warehouse, spec = model.warehouse, model.spec
    generation = None if snapshot is not None else generations.find_live(warehouse, spec.name)
    if generation is None:
        return _read_snapshot(warehouse, _choose_snapshot(model, snapshot), spec.folder)
    refuse_damaged(warehouse, generation)
    began = origin_of(warehouse, generation)
    checkpoint = Checkpoint(warehouse, generation.checkpoint)
    batch = checkpoint.find_last_commit()
    if batch is None:
        return _read_snapshot(warehouse, began, spec.folder)
    return ForecastOrigin(
        began,
        began.model_spec(spec.folder),
        read_states(model, generation, began, batch).frame,
        generation.generation,
        batch,
        checkpoint.committed_at(batch),
        describe(checkpoint.position(batch, generation.start_position)),
    )


def _read_snapshot(warehouse: Warehouse, manifest: Manifest, folder: str | None) -> ForecastOrigin:
    states = verify(warehouse, manifest)
    spec = manifest.model_spec(folder)
    return ForecastOrigin(
        manifest, spec, states, None, None, manifest.committed_at, describe(manifest.position)
    )


def _choose_snapshot(model: DeployedModel[Warehouse], snapshot: str | None) -> Manifest:
    known = [one for one in manifests.read_manifests(model.warehouse, model.name) if one.status == GOOD]
    if snapshot not in (None, NEWEST):
        found = next((one for one in known if one.snapshot_id == snapshot), None)
        if found is None:
            have = ", ".join(one.snapshot_id for one in known[-3:]) or "none"
            raise UserError(f"--snapshot {snapshot}: model {model.name} has no such snapshot (it has {have})")
        return found
    fitting = [one for one in known if one.fingerprint == model.spec.fingerprint() and not one.without_state]
    if not fitting:
        others = f" ({len(known)} are of other specs)" if known else ""
        raise UserError(
            f"model {model.name} has no live stream and no snapshot of version {model.spec.version} as its spec is "
            f"now{others}, so there is no state to forecast from: make one with `kalman-pipeline pretrain --model "
            f"{model.name}`, or give the rows of a file with --input"
        )
    return max(fitting, key=attrgetter("preference"))


RUN = "run"
"""The partition column: the id of the run that made a forecast."""
_OURS = "jobs.core.errors.UserError: "
_RUN = re.compile(r"[A-Za-z0-9_.:+~-]{1,250}")


class WrittenForecasts(NamedTuple):
    """The numbers of a run's forecasts, keys and flagged rows, and the newest row of any key (microseconds)."""

    forecasts: int
    keys: int
    flagged: int
    newest: int | None


class ForecastRun(NamedTuple):
    """A committed run: its id, its table, the states from which it began, and its rows.

    age: the age of the states when the run began.
    inputs: the version of the table of inputs.
    past: the number of keys without a forecast in the horizon; None means that these keys were not counted.
    """

    run: str
    table: str
    origin: ForecastOrigin
    written: WrittenForecasts
    age: timedelta | None
    inputs: int | None
    past: int | None


def forecast_live(model: DeployedModel[Warehouse], wanted: ForecastRequest) -> ForecastRun:
    """Forecast the keys of a model into a table, from the model's live state or a snapshot.

    Raises:
        UserError: the model or a wanted key has no state, a future input is missing, or the model cannot be forecast.
    """
    warehouse = model.warehouse
    if wanted.run is not None and not _RUN.fullmatch(wanted.run):
        raise UserError(f"--run: {wanted.run!r} is not an id: use letters, digits and . _ : + ~ -")
    began = now()
    source = find_origin(model, wanted.snapshot)
    used = source.spec
    runtime = ModelRuntime.of(warehouse, used, source.manifest.parameters)
    runtime.ship(warehouse.spark)
    states = _select_states(source, wanted.keys)
    states, inputs = join_inputs(model.with_spec(used), runtime.kind, states)
    future = None
    if wanted.future is not None:
        future = read_future_rows(model.with_spec(used), runtime.kind, wanted.future)
        states = states.join(future.rows, "key", "left")
    run = wanted.run or _run_id(source, wanted, future, inputs)
    plan = ForecastPlan(
        used,
        runtime.kernel,
        wanted.horizon,
        wanted.probability,
        wanted.future,
        future is not None and future.own_inputs,
    )
    rows = _label_forecasts(forecast_rows(states, plan), runtime.kind, source)
    home, table = find_home(warehouse, wanted.output or forecasts(model.name))
    age = None if source.taken_at is None else max(began - source.taken_at, timedelta())
    facts = {"run": run, "state": source.name, "position": source.position, "inputs": inputs}
    with label_jobs(warehouse.spark, f"forecast {model.name}", f"from {source.name}"):
        written = replace_run(home, table, run, rows, json.dumps(facts))
        bounded = wanted.horizon.end is not None or future is not None
        past = states.count() - written.keys if bounded else None
    return ForecastRun(run, home.path(table), source, written, age, inputs, past)


def replace_run(home: Warehouse, table: str, run: str, rows: DataFrame, facts: str) -> WrittenForecasts:
    """Write the rows of a run in one commit, in place of the rows that the table has from this run.

    Args:
        home: the warehouse with the table.
        table: the name of the table, which is created if it does not exist.
        run: the id of the run.
        rows: the rows of the run.
        facts: facts about the run as JSON, for the metadata of the commit.

    Raises:
        UserError: a worker has found an error in the given data, or the table is not a table of forecasts.
    """
    marked = rows.select(F.lit(run).alias(RUN), *rows.columns)
    home.create(table, format_ddl(marked.schema), (RUN,))
    if RUN not in home.read(table).columns:
        raise UserError(f"--output {home.path(table)}: is a table of something else; give another one")
    try:
        home.replace(marked, table, [[(RUN, "=", run)]], facts)
    except (PySparkException, Py4JJavaError) as error:  # some failing jobs raise Py4JJavaError
        said = extract_python_error(error)
        if _OURS in str(error):
            raise UserError(said) from error
        raise UserError(f"the forecasts failed: {said}", RUN_FAILED) from error
    return _count_forecasts(home.read(table).filter(F.col(RUN) == run))


def _count_forecasts(rows: DataFrame) -> WrittenForecasts:
    first = F.col("step") == 1
    row: Any = rows.agg(
        F.count("*").alias("forecasts"),
        F.count_if(first).alias("keys"),
        F.count("flag").alias("flagged"),
        F.max(F.unix_micros("made_at")).alias("newest"),
    ).first()
    return WrittenForecasts(row["forecasts"], row["keys"], row["flagged"], row["newest"])


def _select_states(source: ForecastOrigin, keys: Sequence[str]) -> DataFrame:
    """Return the states of the wanted keys; a wanted key without a state is an error."""
    if not keys:
        return source.states
    states = source.states.filter(F.col("key").isin(*keys))
    found = {row["key"] for row in states.select("key").collect()}
    refuse_absent_keys(source.spec, keys, found, source.text)
    return states


def _label_forecasts(rows: DataFrame, kind: KeyKind, source: ForecastOrigin) -> DataFrame:
    """Return forecasts with typed key columns, timestamps, and columns that describe their origin."""
    manifest = source.manifest
    times = {"made_at", "event_time"}
    columns = [
        F.timestamp_micros(name).alias(name) if name in times else F.col(name)
        for name in rows.columns
        if name != "key"
    ]
    return rows.select(
        "key",
        *([] if kind.is_plain_key else build_key_columns(kind, F.col("key"))),
        *columns,
        F.lit(manifest.model_version).cast("int").alias("model_version"),
        F.lit(manifest.snapshot_id).alias("snapshot_id"),
        F.lit(source.generation).cast("string").alias("generation"),
        F.lit(source.batch).cast("bigint").alias("batch_id"),
    )


def _run_id(
    source: ForecastOrigin, wanted: ForecastRequest, future: FutureRows | None, inputs: int | None
) -> str:
    """Return the run's id, which is the same for the same states and the same requested forecasts."""
    asked: list[Any] = [
        source.manifest.snapshot_id,
        wanted.horizon,
        wanted.probability,
        sorted(wanted.keys),
        None if future is None else future.digest,
        inputs,
    ]
    digest = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:10]
    return f"{source.name}-{digest}"


def report_lines(done: ForecastRun, spec: ModelSpec) -> list[str]:
    """Return report lines on the state that was used, its age, and the rows of the run."""
    source, newest = done.origin, to_datetime(done.written.newest)
    made = "" if source.taken_at is None else f", of {source.taken_at:%Y-%m-%d %H:%M:%S} UTC"
    old = "" if done.age is None else f" ({format_span(done.age.total_seconds())} ago)"
    lines = [f"state: {source.text}{made}{old}, {source.position}"]
    if newest is not None:
        lines.append(f"newest row of any key: {newest:%Y-%m-%d %H:%M:%S} UTC")
    if source.spec.version != spec.version:
        lines.append(
            f"the state is of version {source.spec.version} of {spec.name}; the spec is version {spec.version}"
        )
    if done.past:
        lines.append(f"omitted {format_count(done.past, 'key')} without a time in the horizon")
    if done.written.flagged:
        lines.append(f"flagged {done.written.flagged:,}")
    return [*lines, f"run {done.run}: a repeated run replaces these rows ({RUN} = '{done.run}')"]
