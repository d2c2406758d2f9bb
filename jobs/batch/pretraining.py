"""Filter history up to a cut, commit the snapshot, and summarize the learning of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark.sql import functions as F

from jobs.batch.batch_filter import (
    Interval,
    build_batch,
    compute_final_states,
    count_bucket_gaps,
    count_keys,
    count_shared_buckets,
    find_lost_keys,
)
from jobs.batch.file_rows import RowSource
from jobs.batch.history_rows import read_measurements
from jobs.batch.key_learning import Populations, learn_key_states, learn_populations
from jobs.batch.learning import learn_pooled
from jobs.batch.snapshot_ids import TableVersion, find_earlier_id, find_position, snapshot_id
from jobs.core.progress import Progress
from jobs.core.report import format_count, suggest_other_model
from jobs.lineage import replayed_late_rows
from jobs.lineage.generations import DeployedModel
from jobs.lineage.inputs_table import InputsTable
from jobs.lineage.source_ranges import is_before
from jobs.offline.filtering import MANY, find_misfits
from jobs.offline.row_faults import FEWEST, format_gaps, format_lost, list_row_step_kinds
from jobs.snapshots import learned_rows
from jobs.snapshots.learned_rows import GROUP, KEY, POOLED
from jobs.snapshots.manifests import Manifest
from jobs.snapshots.model_runtime import ModelRuntime
from jobs.snapshots.row_ids import extract_from_rows
from jobs.snapshots.state_rows import StateRows
from jobs.snapshots.store import find_whole, write
from jobs.snapshots.verified_rows import read_rows
from jobs.snapshots.waiting_rows import Held, build_from_measurements
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding.keys import ALL_ROWS, format_key
from jobs.state.encoding.packets import NEVER
from jobs.state.encoding.routing import make_routing
from jobs.storage.measurements_table import TOPIC_ID
from jobs.storage.positions import Cut, find_first_topic_id, to_datetime
from kalman.filters.numerics import NUMERICS
from kalman.learning.key_fits import FitOutcome
from kalman.learning.learners import learnable

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from jobs.batch.batch_filter import Batch
    from jobs.batch.learning import LearningResult
    from jobs.state.encoding.rows import RowFormat


class PretrainedSnapshot(NamedTuple):
    """A snapshot, whether this call made it, and the result of the search over all keys if this call made one.

    notes: sentences about rows that the model may use differently than intended (`jobs.offline.row_faults`).
    """

    manifest: Manifest
    learned: LearningResult | None
    made: bool
    notes: tuple[str, ...] = ()


Beside = Callable[[Manifest, "DataFrame"], None]
"""A function that gets a new snapshot's manifest and the packets of its rows by bucket, while they are cached."""


def pretrain_snapshot(
    model: DeployedModel[Warehouse],
    table: str,
    cut: Cut,
    window: Interval,
    progress: Progress,
    beside: Beside | None = None,
) -> PretrainedSnapshot:
    """Return the snapshot of a model at a cut; `beside` is called if this call makes the snapshot."""
    warehouse, spec = model.warehouse, model.spec
    rows = _read_history(model, table, cut)
    waits = spec.timed and cut.before is None
    warehouse.in_process = rows.is_few(len(spec.states)) and not waits
    window = _find_window(spec, rows, window)
    inputs = None if spec.inputs is None else InputsTable(model)
    version = None if inputs is None else inputs.newest()
    of_table = TableVersion.of(warehouse, table, cut.version)
    made_of = spec, table, cut, window, version
    earlier = find_earlier_id(warehouse, snapshot_id(*made_of), of_table)
    identity = earlier or snapshot_id(*made_of, of_table)
    if (found := find_whole(warehouse, identity)) is not None:
        return PretrainedSnapshot(found, None, False)
    runtime, landed = ModelRuntime(spec, {}, rows.schema), 0
    if inputs is not None and version is not None:
        landed = rows.frame.count()
        frame = inputs.complete_rows(rows.frame, runtime.kind, version.version)
        rows = RowSource.of_frame(warehouse, frame, "the inputs of the keys are joined")
    warehouse.moves_rows = waits or _learns_by_key(spec) or rows.moves_rows
    doing = f"pretrain {spec.name}"
    with warehouse.label(doing, "count the rows"):
        count = rows.count(spec.time)
    progress.note(f"{count:,} rows")
    batch, held = build_batch(runtime), None
    if waits:
        rows, held = _split_waiting_rows(spec, rows, batch.rows)
    packed = pack_history(spec, rows, batch, count, waits or beside is not None)
    try:
        if held is not None and batch.rows.row_id is not None:
            floor = runtime.build_event_time_policy().late_before(held.watermark)
            held = held._replace(ids=extract_from_rows(packed, batch.rows, floor))
        learned: LearningResult | Populations | None = None
        if spec.learn is not None and count:
            with warehouse.label(doing, "learn"):
                learned = _learn_parameters(runtime, packed, batch, window, progress.note)
        runtime = replace(runtime, parameters=_select_parameters(runtime, learned))
        progress.note(f"filtering {count:,} rows")
        runtime.kernel.initial(1)  # raises here if an initial state needs a parameter that was not learned
        runtime.ship_to(warehouse)
        given = None if version is None else {**version._asdict(), "left_out": landed - count}
        position = cut.place or find_position(model, table, cut.version, of_table)
        manifest = _build_manifest(runtime, identity, position, cut, window, given)
        with warehouse.label(doing, "filter and write the snapshot"):
            manifest = write_filtered(warehouse, manifest, runtime, packed, window, learned, held)
        if beside is not None:
            beside(manifest, packed)
        fit = None if isinstance(learned, Populations) else learned
        notes = _list_notes(model, manifest, batch, rows, packed, count)
        return PretrainedSnapshot(manifest, fit, True, notes)
    finally:
        packed.unpersist()


def _learns_by_key(spec: ModelSpec) -> bool:
    return spec.learn is not None and spec.learn.scope == "key"


def pack_history(spec: ModelSpec, rows: RowSource, batch: Batch, count: int, again: bool) -> DataFrame:
    """Return packets of the rows by bucket; they are cached if `again`, or if the spec lets several jobs read them."""
    buckets = count_shared_buckets(spec, count, rows.warehouse.in_process)
    packed = rows.pack(batch.rows, make_routing(buckets, 1)).repartition(buckets, "bucket")
    again = again or spec.learn is not None or bool(list_row_step_kinds(spec.definition()))
    return packed.persist() if again else packed


def _list_notes(
    model: DeployedModel[Warehouse],
    manifest: Manifest,
    batch: Batch,
    history: RowSource,
    packed: DataFrame,
    count: int,
) -> tuple[str, ...]:
    """Return notes on unequal time steps, and on keys whose states stop before their last rows.

    Args:
        model: the deployed model.
        manifest: the manifest of the written snapshot.
        batch: settings of the pass that filtered.
        history: the rows that the pass filtered.
        packed: the packets of these rows.
        count: the number of these rows and of the rows that wait for the watermark.
    """
    notes, kinds = list[str](), list_row_step_kinds(model.spec.definition())
    waiting = 0 if manifest.waiting is None else int(manifest.waiting["rows"])
    with model.warehouse.label(f"pretrain {model.name}", "look for gaps and flagged rows"):
        if kinds:
            notes += format_gaps(kinds, count_bucket_gaps(packed, batch))
        if count - waiting - manifest.rows >= FEWEST:
            frame = history.frame  # starts Spark, if this process has filtered the rows itself
            states = read_rows(
                model.warehouse, manifest.snapshot_id, manifest.model, manifest.snapshots_version
            )
            lost = find_lost_keys(frame, batch.rows, states)
            notes += [] if lost is None else [format_lost(lost, format_key(str(lost.worst)), manifest.model)]
    return tuple(notes)


def write_filtered(
    warehouse: Warehouse,
    manifest: Manifest,
    runtime: ModelRuntime,
    packed: DataFrame,
    window: Interval,
    found: LearningResult | Populations | None,
    held: Held | None = None,
) -> Manifest:
    """Filter packed rows and write the snapshot, with the parameters of all keys or groups, or of each key."""
    if isinstance(found, Populations):
        return _write_with_keys(warehouse, manifest, runtime, packed, window, found, held)
    states = compute_final_states(packed, runtime.kernel, build_batch(runtime), runtime.begin)
    told = None if found is None else learned_rows.build_driver_rows(warehouse, found.entries)
    return write(warehouse, manifest, states, held, told)


def _learn_parameters(
    runtime: ModelRuntime,
    packed: DataFrame,
    batch: Batch,
    window: Interval,
    note: Callable[[str], None],
) -> LearningResult | Populations:
    """Learn the parameters that all keys or groups of keys share, or the populations that are priors of single keys.

    Args:
        runtime: the runtime of the model.
        packed: the packets of the rows.
        batch: settings of the pass.
        window: the interval of the rows to learn from.
        note: a function that shows progress.
    """
    spec, learn = runtime.spec, runtime.spec.learn
    assert learn is not None
    by_key = _learns_by_key(spec)
    keys = count_keys(packed, batch) if by_key or learn.sample_keys is not None else None
    given = packed, runtime.definition, learn, batch, window
    if by_key:
        return learn_populations(*given, keys or 0, note)
    return learn_pooled(*given, keys, note)


def _select_parameters(runtime: ModelRuntime, found: LearningResult | Populations | None) -> dict[str, Any]:
    """Return the snapshot's parameters, for all keys or only for keys that the snapshot does not contain."""
    if isinstance(found, Populations):
        return found.parameters(learnable(runtime.definition))
    return {} if found is None else found.parameters


def _write_with_keys(
    warehouse: Warehouse,
    manifest: Manifest,
    runtime: ModelRuntime,
    packed: DataFrame,
    window: Interval,
    populations: Populations,
    held: Held | None,
) -> Manifest:
    """Learn and filter every key in one pass, and write the snapshot with a row for each key's fit."""
    problem = learnable(runtime.definition)
    both = learn_key_states(
        packed, runtime.definition, runtime.kernel, build_batch(runtime), window, populations
    ).persist()
    try:
        states = StateRows(both, _select_states, runtime.kind.integer)
        own = learned_rows.build_driver_rows(warehouse, populations.entries(problem))
        return write(warehouse, manifest, states, held, learned_rows.build_key_rows(both).union(own))
    finally:
        both.unpersist()


def _select_states(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Return the rows of `learn_key_states` that are states."""
    return (one.filter(one.column("fit").is_null()).drop_columns(["fit"]) for one in batches)


def _read_history(model: DeployedModel[Warehouse], table: str, cut: Cut) -> RowSource:
    """Return the model's measurements before a cut."""
    warehouse, spec = model.warehouse, model.spec
    whole = read_measurements(model, table, cut.version)
    if cut.place is not None:
        return RowSource.of_frame(
            warehouse, _read_before_place(model, table, cut), "a place in a topic ends the rows"
        )
    return whole if cut.before is None else whole.before(spec.time, cut.before)


def _read_before_place(model: DeployedModel[Warehouse], table: str, cut: Cut) -> DataFrame:
    """Return the model's measurements before a place in its topic."""
    assert cut.place is not None
    rows = replayed_late_rows.drop_late_copies(model.warehouse, model.warehouse.read(table, cut.version))
    if TOPIC_ID not in rows.columns:  # all rows landed with an earlier release
        rows = rows.withColumn(TOPIC_ID, F.lit(None).cast("string"))
    first = find_first_topic_id(model.warehouse, table, cut.place["topic"])
    rows = rows.filter(_build_before_condition(cut.place, first)).select(*model.spec.columns)
    at = F.unix_micros(F.col(f"`{model.spec.time}`"))
    return rows if cut.before is None else rows.filter(at < cut.before)


def _build_manifest(
    runtime: ModelRuntime,
    identity: str,
    position: dict[str, Any],
    cut: Cut,
    window: Interval,
    inputs: dict[str, Any] | None,
) -> Manifest:
    """Return the manifest of a snapshot whose states are not written yet."""
    spec = runtime.spec
    return Manifest(
        snapshot_id=identity,
        model=spec.name,
        model_version=spec.version,
        fingerprint=spec.fingerprint(),
        parameters=dict(runtime.parameters),
        position=position,
        cut=to_datetime(cut.before),
        learn_from=None if spec.learn is None else to_datetime(window.first),
        learn_to=None if spec.learn is None else to_datetime(window.last),
        key_count=0,
        checksum="",
        rows=0,
        snapshots_version=0,
        spec=spec.format_stored_text(),
        inputs=inputs,
        numerics=NUMERICS,
    )


def _split_waiting_rows(spec: ModelSpec, history: RowSource, fmt: RowFormat) -> tuple[RowSource, Held]:
    """Return the rows that a snapshot reflects, and the rows that wait for the watermark.

    The stream would wait with the same rows, so a row that comes after the snapshot is sorted among them.
    """
    found = history.find_newest(spec.time)
    newest = NEVER if found is None else found
    watermark = NEVER if newest == NEVER else newest - spec.order.delay_us
    frame = history.frame
    if not spec.order.waits:
        return history, Held(build_from_measurements(frame.limit(0), fmt), watermark, newest)
    waiting = frame.filter(F.unix_micros(F.col(f"`{spec.time}`")) >= watermark)
    return history.before(spec.time, watermark), Held(
        build_from_measurements(waiting, fmt), watermark, newest
    )


def _build_before_condition(place: dict[str, Any], first: str | None) -> Column:
    """Return the condition of rows before a position in a topic.

    Rows from files, and rows of a former topic of the same name, count as before the position. first: the id of the
    topic from which rows without an id come.
    """
    former = F.lit(False)
    if first is not None and place.get("topic_id") is not None:
        former = F.coalesce(F.col(TOPIC_ID), F.lit(first)) != place["topic_id"]
    return F.col("_partition").isNull() | is_before(place) | former


def _find_window(spec: ModelSpec, history: RowSource, window: Interval) -> Interval:
    """Return the window; if it has no start, it starts the spec's window length before its end or the last row."""
    if spec.learn is None or spec.learn.window_us is None or window.first is not None:
        return window
    end = history.find_newest(spec.time) if window.last is None else window.last
    return window if end is None else Interval(end - spec.learn.window_us, window.last)


WORST = 5
"""The maximum number of keys or groups that a summary names."""
_SHOWN = ["outcome", "reason", "rows", "log_likelihood_a_row", "nis", "ljung_box"]
"""Columns of learned rows that a summary shows."""
TOLD = {
    "converged": "converged",
    "at_bound": "at a bound",
    "too_few_rows": "with too few rows of their own",
    "failed": "failed",
}
"""Words for the outcomes, by their names in the table."""


class Summary(NamedTuple):
    """A summary for keys, for groups, or for all keys together (`of`): numbers by outcome, worst fits, and misfits.

    judged: number of keys or groups whose fit is known.
    far: the number whose mean NIS is far from 1.
    dependent: the number with autocorrelated innovations.
    """

    model: str
    of: str
    outcomes: dict[str, int]
    worst: list[dict[str, Any]]
    judged: int
    far: int
    dependent: int

    @property
    def total(self) -> int:
        """Return the number of keys or groups."""
        return sum(self.outcomes.values())

    @property
    def lines(self) -> list[str]:
        """Return the summary as lines of text."""
        counts = ", ".join(
            f"{self.outcomes[name]:,} {words}" for name, words in TOLD.items() if self.outcomes.get(name)
        )
        lines = [] if self.of == POOLED else [f"learned for {format_count(self.total, self.of)}: {counts}"]
        named = [
            f"  {format_key(one['name'])}: {TOLD[one['outcome']]}"
            + (f" ({one['reason']})" if one["reason"] else "")
            + _fit(one)
            for one in self.worst
        ]
        if named and self.of != POOLED:
            lines += [f"the worst {len(named)}:" if len(named) < self.total else "of these:", *named]
        return [*lines, *self._list_warnings()]

    def _list_warnings(self) -> list[str]:
        found: list[str] = []
        whom = ALL_ROWS if self.of == POOLED else None
        for count, what in (
            (self.far, "the mean NIS is far from 1: the noise is not as large as the model says"),
            (self.dependent, "the innovations are autocorrelated: the model leaves structure in the rows"),
        ):
            if count and count >= MANY * self.judged:
                of = whom or f"{count:,} of {format_count(self.judged, self.of)}"
                found.append(
                    f"warning: the model does not fit: of {of} {what} (columns nis and ljung_box of the table learned)"
                )
        return [*found, f"next: {suggest_other_model(self.model)}"] if found else []


def summarize_learning(warehouse: Warehouse, manifest: Manifest) -> Summary | None:
    """Return the summary of a snapshot's learning; None if nothing was learned, or if the snapshot has no record of it.

    Raises:
        UserError: the rows of learned parameters are damaged.
    """
    rows = learned_rows.read_learned_rows(warehouse, manifest, ["scope", "key", "key_group", *_SHOWN])
    if rows is None:
        return None
    scopes = rows["scope"].unique().to_pylist()
    of = next(scope for scope in (KEY, GROUP, POOLED) if scope in scopes)
    return _summarize_scope(rows.filter(pc.field("scope") == of), of, manifest.model)


def _summarize_scope(rows: pa.Table, of: str, model: str) -> Summary:
    count, nis, ljung_box = (
        rows[name].cast(pa.float64()).to_numpy() for name in ("rows", "nis", "ljung_box")
    )
    far, dependent = find_misfits(count, nis, ljung_box)
    judged = (count >= 10) & (np.isfinite(nis) | np.isfinite(ljung_box))
    counts = {row["values"]: row["counts"] for row in rows["outcome"].value_counts().to_pylist()}
    outcomes = {one.name.lower(): counts.get(one.name.lower(), 0) for one in FitOutcome}
    sums = (int(np.count_nonzero(one)) for one in (judged, far, dependent))
    return Summary(model, of, outcomes, _select_worst(rows, of, nis, far | dependent), *sums)


def _select_worst(
    rows: pa.Table, of: str, nis: NDArray[np.float64], misfit: NDArray[np.bool_]
) -> list[dict[str, Any]]:
    """Return the worst fits: first failed ones, then misfits, then those at a bound, then those with too few rows.

    nis: (N,) the mean NIS of each row; misfit: (N,) whether the model does not fit.
    """
    outcome = rows["outcome"].to_numpy()
    kinds = [outcome == "failed", misfit, outcome == "at_bound", outcome == "too_few_rows"]
    rank = np.select(kinds, range(len(kinds)), len(kinds))
    names = (
        pa.repeat("all keys", rows.num_rows) if of == POOLED else rows["key" if of == KEY else "key_group"]
    )
    shown = rows.select(_SHOWN)
    ranked = shown.add_column(0, "name", names).append_column("_rank", pa.array(rank))
    ranked = ranked.append_column("_away", pa.array(np.abs(np.log(np.fmax(nis, 1e-300)))))
    order = [("_rank", "ascending"), ("_away", "descending"), ("name", "ascending")]
    worst = ranked.filter(pa.array(rank < len(kinds))).sort_by(order).slice(0, WORST)
    return worst.drop_columns(["_rank", "_away"]).to_pylist()


def _fit(one: dict[str, Any]) -> str:
    parts = [format_count(one["rows"], "row")]
    if one["nis"] is not None:
        parts.append(f"NIS {one['nis']:.3g}")
    if one["ljung_box"] is not None:
        parts.append(f"Ljung-Box {one['ljung_box']:.2g}")
    return "; " + ", ".join(parts)
