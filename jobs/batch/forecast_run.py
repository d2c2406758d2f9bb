"""Forecast from the states of the live generation or of a snapshot into a table, exactly once for each run's id."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from jobs.batch.forecast_rows import ForecastPlan, FutureRows, forecast_rows, join_inputs, read_future_rows
from jobs.core.errors import RUN_FAILED, UserError, extract_python_error
from jobs.core.report import format_count, format_span
from jobs.core.times import now
from jobs.lineage import generations
from jobs.lineage.generation_checkpoint import refuse_damaged
from jobs.lineage.generations import DeployedModel
from jobs.lineage.generations import read_origin_manifest as origin_of
from jobs.offline.horizon import ForecastRequest
from jobs.offline.stored_keys import refuse_absent_keys
from jobs.snapshots import manifests
from jobs.snapshots.manifests import GOOD
from jobs.snapshots.model_runtime import ModelRuntime
from jobs.snapshots.store import verify
from jobs.spark.job_labels import label_jobs
from jobs.spark.warehouse import Warehouse, format_ddl
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding.keys import build_key_columns
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.positions import describe, to_datetime
from jobs.storage.tables import forecasts
from jobs.storage.warehouse import find_home
from jobs.streaming.exporting import read_states

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.snapshots.manifests import Manifest
    from jobs.state.encoding.keys import KeyKind


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
