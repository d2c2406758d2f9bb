"""Forecast from the states of the live generation or of a snapshot into a table, exactly once for each run's id.

Spark's workers forecast the keys, with their inputs: a row for each key and future time.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import Schema
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from jobs.batch.file_rows import SMALL
from jobs.core.errors import RUN_FAILED, UserError, extract_python_error
from jobs.core.input_files import open_input
from jobs.core.report import format_count, format_span
from jobs.core.times import now
from jobs.lineage import generations
from jobs.lineage.generation_checkpoint import refuse_damaged
from jobs.lineage.generations import DeployedModel
from jobs.lineage.generations import read_origin_manifest as origin_of
from jobs.lineage.inputs_table import INPUTS, InputsTable
from jobs.offline.ahead import (
    ForecastKeys,
    Future,
    forecast_ahead,
    format_flawed,
    list_forecasts,
    read_future,
)
from jobs.offline.horizon import ForecastRequest, Horizon
from jobs.offline.stored_keys import refuse_absent_keys
from jobs.snapshots import manifests
from jobs.snapshots.manifests import GOOD
from jobs.snapshots.model_runtime import ModelRuntime
from jobs.snapshots.state_rows import StateRows, build_untyped_columns, parse_states, read_stored_rows
from jobs.snapshots.store import find_whole_states
from jobs.spark.local_frame import Make
from jobs.spark.warehouse import Warehouse
from jobs.spark.written_rows import write_made_rows
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding import arrow
from jobs.state.encoding.arrow import build_integers, build_lists, build_matrix, build_vectors
from jobs.state.encoding.estimates import build_table_batch, find_flag_names
from jobs.state.encoding.keys import KeyKind, build_key_text
from jobs.state.encoding.rows import map_batches
from jobs.state.encoding.table_columns import parse_key_columns
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.columns import parse_arrow_schema
from jobs.storage.positions import describe, to_datetime
from jobs.storage.row_changes import ReplacingTable
from jobs.storage.tables import forecasts
from jobs.storage.warehouse import find_home
from jobs.streaming.exporting import read_states
from kalman.run import KeyStates
from kalman.types import Filter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.snapshots.manifests import Manifest


ROWS = (
    "made_at timestamp, event_time timestamp, step bigint, mean array<double>, covariance array<double>, "
    "lower array<double>, upper array<double>, measurement_mean array<double>, measurement_covariance array<double>, "
    "measurement_lower array<double>, measurement_upper array<double>, flag string, model_version int, "
    "snapshot_id string, generation string, batch_id bigint"
)
"""The columns of a forecast after its run and its key. `made_at` is the time of the key's newest row, `step` the number
of the forecast; the other numbers are the same as in the files that `forecast` writes.
"""
FUTURE = "future"
"""The column with the key's future rows, beside the states and `INPUTS`: array<struct<time bigint, control
array<double>, inputs array<double>>>.
"""
_FUTURE = f"struct<time: bigint, control: array<double>, {INPUTS}: array<double>>"
NUMBERS_AT_ONCE = 8_000_000
"""The number of values in the forecasts of one call: some tens of megabytes."""
FEW_KEYS, FEW_FORECASTS = 100_000, 1_000_000
"""The numbers of keys and of forecasts up to which this process is done before Spark has started."""


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


def build_forecaster(
    plan: ForecastPlan, kind: KeyKind, schema: pa.Schema, constants: Mapping[str, Any]
) -> Make:
    """Return the function that forecasts keys, given batches of a snapshot's state rows with `INPUTS` and `FUTURE`.

    Args:
        plan: the settings; `INPUTS` and `FUTURE` are there if the model takes them.
        kind: the kind of the keys.
        schema: the columns of the table of forecasts.
        constants: the columns with the same value in all rows.
    """

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for part in _split_batch(batch, plan):
                columns = _forecast_batch(part, plan)
                columns |= {} if kind.is_plain_key else parse_key_columns(kind, columns["key"])
                yield build_table_batch(pa.RecordBatch.from_pydict(columns), schema, constants)

    return work


def build_table_schema(kind: KeyKind) -> pa.Schema:
    """Return the columns of the table of forecasts for a kind of keys."""
    names = [] if kind.is_plain_key else [name.replace("`", "``") for name in kind.columns]
    keys = "".join(f"`{name}` {type_}, " for name, type_ in zip(names, kind.types, strict=False))
    return parse_arrow_schema(f"{RUN} string, key string, {keys}{ROWS}")


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


def _forecast_batch(batch: pa.RecordBatch, plan: ForecastPlan) -> dict[str, pa.Array]:
    spec, kernel, size = plan.spec, plan.kernel, batch.num_rows
    values = kernel.restore(*parse_states(batch, kernel))
    made, count = (batch.column(name).to_numpy() for name in ("event_time", "state_index"))
    own = len(spec.input_names)
    inputs = build_matrix(batch.column(INPUTS), own, INPUTS) if own else np.empty((0, size))
    names = batch.column("key").cast(pa.string())
    keys = ForecastKeys([names], KeyStates(values, made, count, np.zeros(size)), inputs)
    future = None if plan.future is None else _build_future(batch, plan)
    found = forecast_ahead(spec, kernel, keys, plan.horizon, future)
    rows = list_forecasts(spec, found, plan.probability)
    return {
        "key": names.take(build_integers(rows.key)),
        "made_at": build_integers(made[rows.key]),
        "event_time": build_integers(rows.time),
        "step": build_integers(rows.step),
        **{column.name: build_vectors(column.values, rows.flag == 0) for column in rows.columns},
        "flag": find_flag_names(rows.flag).cast(pa.string()),
    }


def _build_future(batch: pa.RecordBatch, plan: ForecastPlan) -> Future:
    """Return the future rows of the keys of a batch."""
    assert plan.future is not None
    column = batch.column(FUTURE)
    counts = column.value_lengths().fill_null(0).to_numpy()
    rows = column.flatten()
    controls, own = len(plan.spec.control), len(plan.spec.input_names)
    names = batch.column("key").cast(pa.string())
    names = names.take(build_integers(np.repeat(np.arange(batch.num_rows), counts)))
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
    states: StateRows
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

    @property
    def constants(self) -> dict[str, Any]:
        """Return the columns of the forecasts that describe the states."""
        return {
            "model_version": self.manifest.model_version,
            "snapshot_id": self.manifest.snapshot_id,
            "generation": self.generation,
            "batch_id": self.batch,
        }


def find_origin(model: DeployedModel[Warehouse], wanted: ForecastRequest) -> ForecastOrigin:
    """Return the states to forecast from; decide whether this process forecasts (`Warehouse.in_process`).

    Args:
        model: the deployed model.
        wanted: the request; its snapshot None means the live generation or, if none is live, the newest snapshot.

    Raises:
        UserError: the snapshot does not exist, the model has no snapshot, or the states are damaged.
    """
    warehouse, spec = model.warehouse, model.spec
    generation = None if wanted.snapshot is not None else generations.find_live(warehouse, spec.name)
    if generation is None:
        return _read_snapshot(model, _choose_snapshot(model, wanted.snapshot), wanted)
    refuse_damaged(warehouse, generation)
    began = origin_of(warehouse, generation)
    checkpoint = Checkpoint(warehouse, generation.checkpoint)
    batch = checkpoint.find_last_commit()
    if batch is None:
        return _read_snapshot(model, began, wanted)
    return ForecastOrigin(
        began,
        began.model_spec(spec.folder),
        read_states(model, generation, began, batch),
        generation.generation,
        batch,
        checkpoint.committed_at(batch),
        describe(checkpoint.position(batch, generation.start_position)),
    )


def _read_snapshot(
    model: DeployedModel[Warehouse], manifest: Manifest, wanted: ForecastRequest
) -> ForecastOrigin:
    warehouse, spec = model.warehouse, manifest.model_spec(model.spec.folder)
    cost = manifest.key_count * max(1, len(spec.states) ** 2 // SMALL)
    warehouse.in_process = spec.inputs is None and wanted.future is None and cost <= FEW_KEYS
    version = find_whole_states(warehouse, manifest)
    states = read_stored_rows(warehouse, manifest, version)
    if warehouse.in_process and _count_steps(states, wanted.horizon) * manifest.key_count > FEW_FORECASTS:
        warehouse.in_process = False
        states = read_stored_rows(warehouse, manifest, version)
    position = describe(manifest.position)
    return ForecastOrigin(manifest, spec, states, None, None, manifest.committed_at, position)


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
    """The numbers of a run's forecasts, keys, flagged rows and rows with an infinite bound of a measurement, and the
    newest row of any key (microseconds).
    """

    forecasts: int
    keys: int
    flagged: int
    unbounded: int
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
    source = find_origin(model, wanted)
    used = source.spec
    runtime = ModelRuntime.of(warehouse, used, source.manifest.parameters)
    runtime.ship_to(warehouse)
    chosen = _select_states(source, wanted.keys)
    states, inputs, future = _join_rows(model.with_spec(used), runtime.kind, chosen, wanted.future)
    run = wanted.run or _run_id(source, wanted, future, inputs)
    own_inputs = future is not None and future.own_inputs
    plan = ForecastPlan(used, runtime.kernel, wanted.horizon, wanted.probability, wanted.future, own_inputs)
    home, table = find_home(warehouse, wanted.output or forecasts(model.name))
    age = None if source.taken_at is None else max(began - source.taken_at, timedelta())
    facts = {"run": run, "state": source.name, "position": source.position, "inputs": inputs}
    schema = build_table_schema(runtime.kind)
    make = build_forecaster(plan, runtime.kind, schema, {RUN: run, **source.constants})
    with warehouse.label(f"forecast {model.name}", f"from {source.name}"):
        written = replace_run(home, table, run, states, make, schema, json.dumps(facts))
        bounded = wanted.horizon.end is not None or future is not None
        past = len(_list_keys(chosen)) - written.keys if bounded else None
    return ForecastRun(run, home.path(table), source, written, age, inputs, past)


class _ForecastSums:
    """The numbers of `WrittenForecasts` that a task has written."""

    def __init__(self) -> None:
        self._sums = {"forecasts": 0, "keys": 0, "flagged": 0, "unbounded": 0}
        self._newest: list[int] = []

    def add(self, rows: pa.RecordBatch) -> None:
        """Add rows of the table."""
        self._sums["forecasts"] += rows.num_rows
        self._sums["keys"] += int(np.count_nonzero(rows.column("step").to_numpy() == 1))
        self._sums["flagged"] += rows.num_rows - rows.column("flag").null_count
        upper, functions = rows.column("measurement_upper"), cast(Any, pc)
        place = functions.list_parent_indices(upper).to_numpy()
        self._sums["unbounded"] += len(np.unique(place[np.isinf(arrow.to_numpy(upper.flatten(), np.nan))]))
        if rows.num_rows:
            self._newest.append(int(rows.column("made_at").view(pa.int64()).to_numpy().max()))

    def numbers(self) -> dict[str, int]:
        """Return the numbers by name; the newest row is absent if there are no rows."""
        return {**self._sums, **({"newest": max(self._newest)} if self._newest else {})}


def replace_run(
    home: Warehouse, table: str, run: str, states: StateRows, make: Make, schema: pa.Schema, facts: str
) -> WrittenForecasts:
    """Write the rows of a run in one commit, in place of the rows that the table has from this run.

    Args:
        home: the warehouse with the table.
        table: the name of the table, which is created if it does not exist.
        run: the id of the run.
        states: the states to forecast from.
        make: the function that forecasts them (`build_forecaster`).
        schema: the columns of the forecasts.
        facts: facts about the run as JSON, for the metadata of the commit.

    Raises:
        UserError: a worker has found an error in the given data, or the table is not a table of forecasts.
    """
    home.create(table, Schema.from_arrow(schema), (RUN,))
    files = ReplacingTable(home, table)
    if RUN not in files.columns().names:
        raise UserError(f"--output {home.path(table)}: is a table of something else; give another one")
    made = states.then(make)
    try:
        parts, sums = write_made_rows(made.source, made.make, schema, files, True, _ForecastSums)
        home.replace_by(parts, files, [[(RUN, "=", run)]], facts)
    except (PySparkException, Py4JJavaError, pa.ArrowException) as error:
        # Some failing jobs raise Py4JJavaError.
        said = extract_python_error(error)
        if _OURS in str(error):
            raise UserError(said) from error
        raise UserError(f"the forecasts failed: {said}", RUN_FAILED) from error
    total = {name: sum(one[name] for one in sums) for name in _ForecastSums().numbers()}
    newest = max((one["newest"] for one in sums if "newest" in one), default=None)
    return WrittenForecasts(**total, newest=newest)


def _count_steps(states: StateRows, horizon: Horizon) -> int:
    """Return the largest number of steps of a key whose state this process reads."""
    times = [batch.column("event_time").to_numpy() for batch in states.batches if batch.num_rows]
    return horizon.count_steps(min(int(one.min()) for one in times)) if times else 0


def _select_states(source: ForecastOrigin, keys: Sequence[str]) -> StateRows:
    """Return the states of the wanted keys; a wanted key without a state is an error."""
    if not keys:
        return source.states
    wanted, functions = pa.array(list(keys)), cast(Any, pc)

    def choose(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            text = batch.column("key").cast(pa.string())
            yield batch.set_column(0, "key", text).filter(functions.is_in(text, wanted))

    states = source.states.then(choose)
    refuse_absent_keys(source.spec, keys, set(_list_keys(states)), source.text)
    return states


def _list_keys(states: StateRows) -> list[str]:
    keys = map_batches(lambda one: pa.RecordBatch.from_pydict({"key": one.column("key").cast(pa.string())}))
    return [row["key"] for row in states.through(keys, "key string").collect()]


def _join_rows(
    model: DeployedModel[Warehouse], kind: KeyKind, states: StateRows, file: str | None
) -> tuple[StateRows, int | None, FutureRows | None]:
    """Return states with `INPUTS` and `FUTURE`, if the model has inputs and a file of future rows is given.

    Also return the version of the table of inputs (None if the model has no inputs), and the future rows. A key that is
    not in the table of inputs gets the defaults; without defaults it gets NaN, so its forecasts have a flag.
    """
    if model.spec.inputs is None and file is None:
        return states, None, None
    frame, version, future = states.frame, None, None
    if model.spec.inputs is not None:
        inputs, version = InputsTable(model).by_key(frame.select("key"), kind)
        frame = frame.join(inputs, "key")
    if file is not None:
        future = read_future_rows(model, kind, file)
        frame = frame.join(future.rows, "key", "left")
    more = [name for name in (INPUTS, FUTURE) if name in frame.columns]
    return StateRows(frame.select("key", *build_untyped_columns(), *more), iter, False), version, future


def _run_id(
    source: ForecastOrigin, wanted: ForecastRequest, future: FutureRows | None, inputs: int | None
) -> str:
    """Return the run's id, which is the same for the same states and the same requested forecasts."""
    asked: list[Any] = [
        source.manifest.snapshot_id,
        # Without the calendar the id is that of earlier releases.
        wanted.horizon[: None if wanted.horizon.calendar else -1],
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
    lines += format_flawed(done.written.flagged, done.written.unbounded)
    return [*lines, f"run {done.run}: a repeated run replaces these rows ({RUN} = '{done.run}')"]
