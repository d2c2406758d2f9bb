"""Estimate every row of an interval: read, pack by bucket, filter, and commit one range of key slices after another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from jobs.batch.batch_filter import Interval, count_buckets, count_shared_buckets
from jobs.batch.bucket_estimates import SLICES, EstimatingPlan, list_smoothed_widths
from jobs.batch.file_rows import FEW_ROWS, RowSource
from jobs.batch.history_rows import (
    HistoryCounts,
    HistoryRows,
    HistoryStart,
    StartRequest,
    find_start,
    read_history_rows,
)
from jobs.batch.history_table import HistoryRun, HistoryTable, ReplacedPart, Slices, write_estimates
from jobs.core.errors import UserError, extract_python_error
from jobs.lineage.generations import DeployedModel
from jobs.lineage.inputs_table import InputsTable
from jobs.snapshots.model_runtime import ModelRuntime
from jobs.snapshots.state_rows import pack_seeds
from jobs.snapshots.store import read_whole_states
from jobs.spark.conf import COMPILED_FROM
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.state.block_format import build_state_layout
from jobs.state.encoding.estimates import EstimateFormat, estimate_schema
from jobs.state.encoding.packets import NEVER, RowPacket
from jobs.state.encoding.routing import Routing, compute_partition, make_routing
from jobs.storage.columns import parse_arrow_schema
from jobs.storage.quarantine import PAYLOAD, REASON
from jobs.storage.tables import estimates_history, run_name
from jobs.storage.warehouse import find_home
from kalman.filters.own_parameters import find_key_parameters
from kalman.filters.rounded import find_storage_dtype
from kalman.types import ModelError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.lineage.inputs_table import Version
    from jobs.snapshots.manifests import Manifest
    from jobs.storage.positions import Cut

ROWS_A_COMMIT = 16_000_000
"""The approximate number of rows that one commit writes. A killed run repeats at most this number of rows."""
_LABELS = 1 << 20
"""The number of labels from which the buckets of one commit get theirs."""


class EstimateRequest(NamedTuple):
    """The request for a run: see the options of `estimate`."""

    interval: Interval
    snapshot: str | None = None
    smooth: bool = False
    input: str | None = None
    output: str | None = None
    version: int | None = None


class RejectedRows(NamedTuple):
    """The number of rows that were rejected for one reason, and an example row as JSON."""

    rows: int
    example: str


class EstimateResult(NamedTuple):
    """The result of a run.

    written: number of rows of estimates.
    commits: number of commits that this call made.
    rejected: the rows that `ingest` would quarantine, by reason.
    """

    run: str
    table: str
    version: int | None
    start: HistoryStart
    counts: HistoryCounts
    written: int
    commits: int
    continued: bool
    rejected: Mapping[str, RejectedRows] = MappingProxyType({})


@dataclass(frozen=True)
class Question:
    """Everything that decides a run's estimates."""

    spec: ModelSpec
    request: EstimateRequest
    rows: HistoryRows
    start: HistoryStart
    inputs: Version | None

    @property
    def digest(self) -> str:
        """Return the digest of this question; it does not depend on the version of a Delta table with the rows."""
        of_rows = self.rows.identity if self.rows.version is None else [self.rows.name, self.rows.identity[2]]
        return self._digest(of_rows)

    @property
    def run(self) -> str:
        """Return the id of the run; the same rows, parameters and options give the same id."""
        return run_name(self.spec.name, self.spec.version, self._digest(self.rows.identity))

    @property
    def mark(self) -> HistoryRun:
        """Return the description of the run in the metadata of its commits."""
        made = self.start.manifest
        return HistoryRun(
            run=self.run,
            question=self.digest,
            version=self.rows.version,
            snapshot=None if made is None else made.snapshot_id,
            model_version=self.spec.version,
            fingerprint=self.spec.fingerprint(),
        )

    def _digest(self, of_rows: list[Any]) -> str:
        parts = {
            "fingerprint": self.spec.fingerprint(),
            "outputs": self.spec.outputs.model_dump(mode="json"),
            "rows": of_rows,
            "interval": self.request.interval.data,
            "start": self.start.identity,
            "smooth": self.request.smooth,
            "inputs": self.spec.inputs and [self.spec.inputs.model_dump(), self.inputs],
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:10]


class BucketLayout(NamedTuple):
    """How rows are divided: the number of buckets, a power of two, and of commits, each with equally many buckets."""

    buckets: int
    commits: int

    @property
    def a_commit(self) -> int:
        """Return the number of buckets that one commit writes."""
        return self.buckets // self.commits

    def slices(self, commit: int) -> Slices:
        """Return the slices of the keys in the buckets of a commit."""
        width = SLICES // self.commits
        return Slices(commit * width, (commit + 1) * width)

    def routing(self) -> Routing:
        """Return a label for each bucket, so that each bucket has its own partition and a commit's labels are
        contiguous.
        """
        labels: list[int] = []
        for commit in range(self.commits):
            first, found = commit * self.a_commit, {}
            label = commit * _LABELS
            while len(found) < self.a_commit:
                partition = compute_partition(label, self.buckets)
                if first <= partition < first + self.a_commit:
                    found.setdefault(partition, label)
                label += 1
            labels += [found[first + i] for i in range(self.a_commit)]
        return Routing(tuple(labels), 1)

    def select_commit(self, commit: int) -> Any:
        """Return the condition for the packets of a commit's buckets."""
        return (F.col("bucket") >= commit * _LABELS) & (F.col("bucket") < (commit + 1) * _LABELS)


def choose_layout(rows: int) -> BucketLayout:
    """Return the layout for this number of rows; the layout depends on nothing else."""

    def power_of_two(least: int) -> int:
        return 1 << max(0, least - 1).bit_length()

    buckets = min(SLICES, power_of_two(count_buckets(rows)))
    return BucketLayout(buckets, min(buckets, power_of_two(-(-rows // ROWS_A_COMMIT) or 1)))


def estimate(
    model: DeployedModel[Warehouse],
    request: EstimateRequest,
    note: Callable[[str], None],
    packed: DataFrame | None = None,
) -> EstimateResult:
    """Estimate every row of the request's interval, and replace the interval's rows in the table.

    packed: the packets of exactly the rows that the run reads (`jobs.batch.batch_filter.pack_buckets`), if the caller
    has them; their estimates are written in one commit.

    Idempotent: a killed run continues after its last commit, with the version of the rows with which it began. A
    finished run is not repeated.

    Raises:
        UserError: the rows, the snapshot or the options cannot be used.
    """
    home, name = model.warehouse, estimates_history(model.name)
    if request.output is not None:
        home, name = find_home(model.warehouse, request.output)
    table = HistoryTable(home, name)
    question = _build_question(model, request)
    done = table.find_unfinished_part(question.digest, request.interval)
    if done is not None and done.run != question.run and request.version is None:
        # Rows have landed since the run was killed, so it is completed with the version of the rows with which it
        # began.
        again = _build_question(model, request._replace(version=done.version))
        whole = Slices(0, SLICES).within(done.slices)
        question = again if again.run == done.run and not whole else question
    kept = done.slices if done is not None and done.run == question.run else []
    return _Run(model, table, question, note, packed).result(kept)


def estimate_reflected(
    model: DeployedModel[Warehouse],
    manifest: Manifest,
    cut: Cut,
    note: Callable[[str], None],
    packed: DataFrame | None = None,
) -> EstimateResult:
    """Estimate the rows that a snapshot of `pretrain` reflects, with the snapshot's parameters.

    Args:
        model: the deployed model.
        manifest: the manifest of the snapshot.
        cut: the cut at which the snapshot was made.
        note: a function that shows progress.
        packed: the packets of the snapshot's rows, if the caller has them.
    """
    last = cut.before
    if last is None and manifest.waiting is not None and model.spec.order.waits:
        last = manifest.waiting["watermark"]
    request = EstimateRequest(Interval(None, last), manifest.snapshot_id, version=cut.version)
    return estimate(model, request, note, packed)


def _build_question(model: DeployedModel[Warehouse], request: EstimateRequest) -> Question:
    rows = read_history_rows(model, request.input, request.version)
    inputs = None if model.spec.inputs is None else InputsTable(model).newest()
    start = find_start(model, StartRequest(rows, request.interval, request.snapshot, inputs))
    return Question(model.spec, request, rows, start, inputs)


@dataclass(frozen=True)
class _Run:
    model: DeployedModel[Warehouse]
    table: HistoryTable
    question: Question
    note: Callable[[str], None]
    given: DataFrame | None = None

    def result(self, kept: list[Slices]) -> EstimateResult:
        question, warehouse = self.question, self.model.warehouse
        whole = Slices(0, SLICES).within(kept)
        written = commits = 0
        counts = HistoryCounts(0, 0, 0, 0)
        rejected: dict[str, RejectedRows] = {}
        doing = f"estimate {question.spec.name}"
        if not whole:
            runtime = ModelRuntime(question.spec, question.start.parameters, question.rows.source.schema)
            plan = self._plan(runtime)
            if self.given is None:
                few = question.rows.source.is_few(len(question.spec.states))
                warehouse.in_process = few and FEW_ROWS <= ROWS_A_COMMIT
            self.table.warehouse.in_process = warehouse.in_process
            warehouse.moves_rows = question.rows.source.moves_rows or self._has_seeds(plan)
            with warehouse.label(doing, "count the rows"):
                rows, counts, rejected = self._choose_rows(runtime)
            runtime.ship_to(warehouse)
            layout = choose_layout(counts.rows + counts.before)
            if self.given is not None:
                buckets = count_shared_buckets(question.spec, counts.rows, warehouse.in_process)
                layout = BucketLayout(buckets, 1)
            self.note(f"estimating {counts.rows:,} rows")
            with warehouse.label(doing, "filter and write the estimates"):
                written, commits = self._write(runtime, plan, rows, counts, layout, kept)
        path = self.table.warehouse.path(self.table.name)
        return EstimateResult(
            question.run,
            self.table.name if self.table.warehouse.root == self.model.warehouse.root else path,
            question.rows.version,
            question.start,
            counts,
            written,
            commits,
            bool(kept) and not whole,
            rejected,
        )

    def _has_seeds(self, plan: EstimatingPlan) -> bool:
        """Return whether keys begin with states or parameters of a snapshot."""
        is_known = not plan.only_own or bool(find_key_parameters(plan.kernel).learned)
        return self.question.start.manifest is not None and is_known

    def _plan(self, runtime: ModelRuntime) -> EstimatingPlan:
        spec, request, start = runtime.spec, self.question.request, self.question.start
        kernel, fmt = runtime.kernel, runtime.rows.joined
        kernel.initial(1)  # raises here if an initial state needs a parameter that was not learned
        estimates: EstimateFormat = runtime.estimates
        if request.smooth:
            try:
                more = list_smoothed_widths(kernel, estimates.diagonal)
                estimates = estimates._replace(extra=(*estimates.extra, *more))
            except ModelError as error:
                raise UserError(f"--smooth: {spec.name}: {error}") from error
        return EstimatingPlan(
            kernel,
            spec.unit_us,
            fmt,
            build_state_layout(fmt.kind, kernel.size, find_storage_dtype(kernel)),
            estimates,
            runtime.begin,
            spec.idle_us,
            NEVER if request.interval.first is None else request.interval.first,
            request.smooth,
            start.before is None,
        )

    def _choose_rows(self, runtime: ModelRuntime) -> tuple[RowSource, HistoryCounts, dict[str, RejectedRows]]:
        """Return the rows that can be filtered, the counts, and the rejected rows.

        Raises:
            UserError: a file cannot be read.
        """
        source, wanted = self.question.rows.source, self.question.request.interval
        if isinstance(source.files, str):
            frame, counts, rejected = self._count_rows(self._frame(runtime))
            return RowSource.of_frame(source.warehouse, frame, source.files), counts, rejected
        files = source.files.between(Interval(self.question.start.before, wanted.last))
        rows, before = files.count(source.warehouse, runtime.spec.time, wanted.first)
        source = replace(source, choose=lambda: files, make_frame=lambda: self._frame(runtime))
        return source, HistoryCounts(rows, before, 0, 0), {}

    def _frame(self, runtime: ModelRuntime) -> DataFrame:
        """Return the rows to read, with the inputs of their keys."""
        question, spec = self.question, runtime.spec
        frame = question.rows.frame
        time = F.unix_micros(F.col(f"`{spec.time}`"))
        read = F.coalesce(question.request.interval.before_end(time), F.lit(True))
        if question.start.before is not None:
            read = read & (time >= question.start.before)
        frame = frame.filter(read)
        if question.inputs is not None:
            inputs = InputsTable(self.model)
            inputs.load(runtime.kind, question.inputs.version)  # an invalid table raises here
            frame = inputs.joined(frame, runtime.kind, question.inputs.version)
        return frame

    def _count_rows(self, frame: DataFrame) -> tuple[DataFrame, HistoryCounts, dict[str, RejectedRows]]:
        """Return the rows that can be filtered, the counts, and the rejected rows.

        Raises:
            UserError: a file cannot be read.
        """
        spec, first = self.question.spec, self.question.request.interval.first
        fits = F.col(REASON).isNull() if REASON in frame.columns else F.lit(True)
        has_inputs = F.lit(True)
        for name in spec.input_names:
            has_inputs = has_inputs & F.col(f"`{name}`").isNotNull()
        time = F.unix_micros(F.col(f"`{spec.time}`"))
        inside = F.lit(True) if first is None else time >= first
        good = fits & has_inputs
        counted = frame.agg(
            F.count_if(good & inside).alias("rows"),
            F.count_if(good & ~inside).alias("before"),
            F.count_if(~fits).alias("unfit"),
            F.count_if(fits & ~has_inputs).alias("without_inputs"),
        )
        try:
            row = counted.first()
        except (PySparkException, Py4JJavaError) as error:
            if UserError.__name__ not in str(error):
                raise
            raise UserError(extract_python_error(error)) from error
        assert row is not None
        counts = HistoryCounts(**{name: int(row[name]) for name in HistoryCounts._fields})
        return frame.filter(good), counts, _collect_rejected(frame) if counts.unfit else {}

    def _write(
        self,
        runtime: ModelRuntime,
        plan: EstimatingPlan,
        rows: RowSource,
        counts: HistoryCounts,
        layout: BucketLayout,
        kept: list[Slices],
    ) -> tuple[int, int]:
        """Commit the slices that are not in `kept`; return the number of rows and of commits."""
        question, total = self.question, counts.rows + counts.before
        missing = [one for one in range(layout.commits) if not layout.slices(one).within(kept)]
        packed = self._pack_rows(runtime, plan, rows, layout)
        if len(missing) > 1:
            packed = packed.persist()
        written = 0
        try:
            for number, commit in enumerate(missing):
                mine = packed if layout.commits == 1 else packed.filter(layout.select_commit(commit))
                if total < COMPILED_FROM:
                    mine = mine.coalesce(1)
                part = ReplacedPart(layout.slices(commit), question.request.interval)
                with self.model.warehouse.choose_codegen(total):
                    written += self._replaced(mine, plan, part)
                self.note(f"{written:,} rows, commit {number + 1} of {len(missing)}")
        finally:
            packed.unpersist()
        return written, len(missing)

    def _replaced(self, packed: DataFrame, plan: EstimatingPlan, part: ReplacedPart) -> int:
        """Replace a part of the table by the estimates of packets in one commit; return the number of rows written."""
        columns = f"{estimate_schema(plan.estimates, batch_id=True)}, model_version int, generation string"
        schema = parse_arrow_schema(columns)
        table = self.table.ready(columns, schema)
        written = write_estimates(packed, plan, table, schema, self._constants)
        return self.table.replace(table, written, self.question.mark, part)

    @property
    def _constants(self) -> dict[str, Any]:
        """Return the columns that have the same value in all rows of the run."""
        return {"model_version": self.question.spec.version, "generation": self.question.run}

    def _pack_rows(
        self, runtime: ModelRuntime, plan: EstimatingPlan, rows: RowSource, layout: BucketLayout
    ) -> DataFrame:
        """Return packets, by bucket, of the rows and of the states or parameters of their keys before these rows."""
        start = self.question.start
        routing = layout.routing() if self.given is None else make_routing(layout.buckets, 1)
        packed = rows.pack(plan.rows, routing, typed=True) if self.given is None else self.given
        if start.manifest is None or not self._has_seeds(plan):
            return packed if self.given is not None else packed.repartition(layout.buckets, "bucket")
        warehouse, manifest = self.model.warehouse, start.manifest
        states = read_whole_states(warehouse, manifest)
        seeds = pack_seeds(states, runtime.kernel, plan.rows.kind, plan.layout, routing, typed=True)
        if self.given is not None and not warehouse.in_process:
            packed = packed.select("bucket", F.lit(int(RowPacket.ROWS)).alias("kind"), "payload")
        both = packed.union(seeds.select("bucket", "kind", "payload"))
        return both.repartition(layout.buckets, "bucket")


def _collect_rejected(frame: DataFrame) -> dict[str, RejectedRows]:
    """Return the rejected rows of a frame by reason."""
    reasons = frame.filter(F.col(REASON).isNotNull()).groupBy(REASON)
    found = reasons.agg(F.count("*").alias("rows"), F.first(PAYLOAD).alias("example")).collect()
    return {row[REASON]: RejectedRows(int(row["rows"]), row["example"]) for row in found}
