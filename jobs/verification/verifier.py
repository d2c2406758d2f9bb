"""Verify a model's live estimates and state: plan, recompute part by part, and sum up."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql import functions as F

from jobs.core.errors import UserError
from jobs.core.times import parse_duration_us
from jobs.lineage import generations
from jobs.lineage.compatibility import select_spec
from jobs.lineage.generations import DeployedModel
from jobs.lineage.inputs_table import InputsTable, read_pinned_version
from jobs.snapshots import manifests
from jobs.snapshots.model_runtime import ModelRuntime, hash_meaning, is_importing_new_keys
from jobs.spark.job_labels import label_jobs
from jobs.spark.warehouse import Warehouse
from jobs.state.encoding.estimates import EstimateFormat
from jobs.state.encoding.packets import NEVER
from jobs.state.encoding.table_columns import find_extra_widths
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.measurements_table import new_keys
from jobs.storage.tables import estimates
from jobs.verification import gathering, runs, snapshot_check
from jobs.verification.chain import STATE, Chain, Segment, find_chain
from jobs.verification.gathering import ALL, CannotVerify, End, KeySample, Sources, copy_state, end_of, forget
from jobs.verification.recomputing import Kind, Recipe, check, collect_findings
from jobs.verification.runs import (
    DIFFERENT,
    EQUAL,
    NOT_VERIFIED,
    NOTHING,
    Findings,
    describe_difference,
    sum_findings,
)
from kalman.filters.numerics import NUMERICS
from kalman.filters.rounded import find_storage_dtype

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from jobs.snapshots.manifests import Manifest
    from jobs.snapshots.waiting_rows import Held
    from jobs.specs.model_spec import ModelSpec

ROWS_A_CHUNK = 5_000_000
"""The number of sampled rows of a segment that are recomputed at a time; each finished part is recorded."""
ROWS_A_PARTITION = 250_000
MIN_PARTITIONS = 4


@dataclass(frozen=True, slots=True)
class Options:
    """The scope of a verification, from the command's options.

    since: microseconds; earlier estimates are recomputed but not compared.
    chunk_rows: see `ROWS_A_CHUNK`.
    """

    share: int = ALL
    seed: str = ""
    keys: tuple[str, ...] = ()
    since: int | None = None
    tolerance: float = 0.0
    chunk_rows: int = ROWS_A_CHUNK

    @property
    def sample(self) -> KeySample:
        """Return the keys to verify."""
        return KeySample(self.share, self.seed, self.keys)


class Result(NamedTuple):
    """The outcome of a run, its findings, its unverified parts, and its pinned plan."""

    run_id: str
    outcome: str
    findings: Findings
    not_verified: list[str]
    plan: dict[str, Any]
    continued: bool


class Verifier:
    """A run of `verify`: it takes no lease, pins everything that it reads, and writes only to verification tables."""

    def __init__(
        self,
        model: DeployedModel[Warehouse],
        options: Options,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.model, self.options, self.note = model, options, note
        self.reasons: list[str] = []

    def run(self, run_id: str | None = None) -> Result:
        """Verify the model, or continue a killed run.

        Raises:
            UserError: the run with this id has ended.
        """
        warehouse, name = self.model.warehouse, self.model.name
        if run_id is not None and runs.is_finished(warehouse, name, run_id):
            raise UserError(f"verify {name}: run {run_id} has ended; give another --run-id, or none")
        options = json.loads(json.dumps(asdict(self.options)))
        run = runs.find_unfinished_run(warehouse, name, options, run_id)
        continued = run is not None
        if run is None:
            run_id = run_id or uuid.uuid4().hex[:12]
            run = runs.begin(warehouse, name, {"options": options, **self._plan(run_id)}, run_id)
        plan = run.plan
        self.reasons = list(plan["not_verified"])
        segments = [Segment(**one) for one in plan["segments"]]
        # After these hand-overs, two generations have estimated the same rows.
        overlaps = list(map(describe_difference, plan["overlaps"]))
        self._do(run, "hand-overs", lambda: Findings.of(*overlaps, uncounted=len(overlaps)))
        for one in plan["snapshots"]:
            self._do(run, f"snapshot {one}", partial(self._snapshot, one, segments))
            self._tell_numerics(run, f"snapshot {one}")
        for segment in segments:
            self._verify_segment(run, segment)
            self._tell_numerics(run, segment.generation)
        found = run.findings
        if found.counts["undecided"]:
            self._leave_out(
                f"{found.counts['undecided']:,} keys: late rows came at the time of rows that had left the replay "
                f"window, so in which order the stream took them is not known"
            )
        outcome = _judge_outcome(found, self.reasons)
        runs.end(warehouse, run, outcome, self.reasons)
        forget(self.model, run.run_id)
        return Result(run.run_id, outcome, found, self.reasons, plan, continued)

    def _plan(self, run_id: str) -> dict[str, Any]:
        """Pin the chain and the versions of the tables, and copy the state at the end."""
        self.note("pinning the position")
        chain: Chain = find_chain(self.model)
        live = next((one for one in chain.segments if one.end == STATE), None)
        sample = self.options.sample
        return {
            **asdict(chain),
            "end": None if live is None else copy_state(self.model, live, sample, run_id),
            "versions": gathering.read_table_versions(self.model),
            "begun_at": datetime.now(UTC).isoformat(),
        }

    def _do(self, run: runs.VerificationRun, part: str, work: Callable[[], Findings]) -> None:
        """Do a part of the run and record it, unless it is already recorded."""
        if part in run.done:
            return
        self.note(part)
        try:
            with label_jobs(self.model.warehouse.spark, f"verify {self.model.name}", part):
                found = work()
        except CannotVerify as reason:
            self._leave_out(str(reason))
            return
        runs.record_part(self.model.warehouse, run, part, found)

    def _leave_out(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)

    def _tell_numerics(self, run: runs.VerificationRun, name: str) -> None:
        """Add the reason why differences in a generation or snapshot may come from other numerics."""
        found = sum_findings(done for part, done in run.done.items() if name in part.split())
        if name.startswith("snapshot "):
            found = run.done.get(name, Findings())
        estimates, states = (found.counts.get(one, 0) for one in ("numerics", "states_numerics"))
        if estimates or states:
            self._leave_out(
                f"other numerics: {estimates:,} estimates and {states:,} states of {name} differ from those of this "
                f"release, which begins diffuse keys with numerics {NUMERICS}, and it was begun with others: only the "
                f"release that began it can tell if they are right; what a new generation writes (`upgrade`, "
                f"or `stream --adopt`) is compared to the bit"
            )

    def _snapshot(self, snapshot: str, segments: list[Segment]) -> Findings:
        manifest = manifests.record(self.model.warehouse, snapshot)
        assert manifest is not None
        compared = {one.end for one in segments}
        return snapshot_check.check_snapshot(
            self.model,
            manifest,
            self.options.sample,
            self.options.tolerance,
            compared,
        )

    def _verify_segment(self, run: runs.VerificationRun, segment: Segment) -> None:
        """Verify a segment: first the counts of all its rows, then the sampled keys in chunks."""
        try:
            work = SegmentCheck.of(self, segment, run)
            rows = gathering.read_landed_rows(work.sources)
        except CannotVerify as reason:
            self._leave_out(str(reason))
            return
        name = f"{segment.generation} to micro-batch {segment.last_batch}"
        if work.end is None:
            self._leave_out(
                f"{name}: the state at its end was not exported, so its estimates alone were compared"
            )
        self._do(run, f"counts of {name}", partial(work.counts, rows))
        total = run.done[f"counts of {name}"].counts["landed"] if f"counts of {name}" in run.done else 0
        share = 1.0 if self.options.keys else self.options.share / ALL
        chunks = max(1, -(-int(total * share) // self.options.chunk_rows))
        for chunk in range(chunks):
            size = int(total * share / chunks)
            part = f"rows of {name}, {chunk + 1} of {chunks}"
            self._do(run, part, partial(work.chunk, rows, chunk, chunks, size))


@dataclass(frozen=True)
class SegmentCheck:
    """A segment, its initial states, its end, and the settings to recompute it."""

    sources: Sources
    manifest: Manifest
    recipe: Recipe
    begin: Held | None
    end: End | None
    options: Options

    @classmethod
    def of(cls, verifier: Verifier, segment: Segment, run: runs.VerificationRun) -> SegmentCheck:
        """Read the start and the end of a segment.

        Raises:
            CannotVerify: the model uses a feature that cannot be recomputed.
        """
        warehouse, deployed = verifier.model.warehouse, verifier.model.spec
        generation = generations.read_named(warehouse, deployed.name, segment.generation)
        manifest = manifests.record(warehouse, segment.snapshot)
        if manifest is None or manifest.status == manifests.REMOVED:
            raise CannotVerify(f"{segment.generation}: snapshot {segment.snapshot}, its start, was removed")
        built = manifest.model_spec(deployed.folder)
        spec = select_spec(built, deployed)
        _refuse_what_cannot_be_recomputed(spec, built, segment)
        runtime = ModelRuntime.of(warehouse, spec, manifest.parameters)
        runtime.ship(warehouse.spark)
        takes = is_importing_new_keys(warehouse, Checkpoint(warehouse, generation.checkpoint), spec)
        versions = run.plan["versions"]
        sources = Sources(
            warehouse, generation, runtime, segment, versions["estimates"], versions["quarantine"], takes
        )
        begin = gathering.read_waiting_rows(warehouse, manifest) if spec.timed else None
        end = end_of(warehouse, runtime, segment, run.run_id, run.plan["end"])
        begun, kept = generation.created_at, parse_duration_us(deployed.retention.quarantine)
        old = begun is not None and (datetime.now(UTC) - begun).total_seconds() * 1e6 > kept
        recipe = _build_recipe(sources, end, verifier.options, old)
        return cls(sources, manifest, recipe, begin, end, verifier.options)

    def counts(self, rows: DataFrame) -> Findings:
        """Compare the counts of all keys: accepted, quarantined and waiting rows must add up to the landed rows."""
        landed = rows.count()
        accepted = 0
        if self.sources.estimates is not None:
            table = self.sources.warehouse.read(
                estimates(self.sources.generation.model), self.sources.estimates
            )
            mine = gathering.select_segment(table, self.sources)
            if "correction" in mine.columns:
                mine = mine.filter(~F.coalesce("correction", F.lit(False)))
            accepted = mine.count()
        refused = gathering.read_refused_rows(self.sources)
        quarantined = 0 if refused is None else refused.count()
        waiting = 0 if self.end is None else self.end.waiting
        waiting -= 0 if self.begin is None else self.begin.rows.count()
        gap = landed - accepted - quarantined - waiting
        if gap == 0 or gap > 0 and self.recipe.forgets:
            return Findings.of(landed=landed)
        what = (
            f"{landed:,} rows were landed, and {accepted:,} estimates, {quarantined:,} rows in quarantine and "
            f"{waiting:,} that wait make {landed - gap:,}"
        )
        segment = self.sources.segment
        first = {**describe_difference(what, batch=segment.last_batch), "generation": segment.generation}
        return Findings.of(first, landed=landed, uncounted=abs(gap))

    def chunk(self, rows: DataFrame, chunk: int, chunks: int, size: int) -> Findings:
        """Recompute and compare the sampled keys of one chunk."""
        both = self._gather_rows(rows)
        sample = self.options.sample.has(F.col("key"))
        if chunks > 1:
            sample = sample & (F.pmod(F.xxhash64(F.lit("chunk"), F.col("key")), F.lit(chunks)) == chunk)
        partitions = max(MIN_PARTITIONS, -(-size // ROWS_A_PARTITION))
        parts = both.filter(sample).repartition(partitions, "key")
        name = self.sources.segment.generation
        found = collect_findings(parts, partial(check, self.recipe), name)
        if found.counts["unrecorded"] and not self.recipe.forgets:
            found.counts["missing"] += found.counts["unrecorded"]
            found.counts["unrecorded"] = 0
            late = describe_difference("a late row is neither estimated nor in quarantine")
            found.firsts.append({**late, "generation": name})
        return found

    def _gather_rows(self, rows: DataFrame) -> DataFrame:
        """Return all rows and states of the segment's keys, with the checker's columns."""
        sources, runtime = self.sources, self.sources.runtime
        warehouse = sources.warehouse
        parts = [
            gathering.convert_rows(sources, self._add_inputs(rows)),
            gathering.convert_states(
                Kind.SEED, gathering.read_snapshot_states(warehouse, self.manifest), runtime
            ),
            gathering.read_refused_rows(sources),
            gathering.read_estimates(sources, self.recipe.estimates.extra),
        ]
        if self.begin is not None:
            parts.append(gathering.convert_waiting_rows(Kind.ROW, self.begin.rows))
        if self.end is not None:
            parts.append(self.end.rows)
        if sources.imports_keys and warehouse.exists(new_keys(sources.generation.model)):
            parts.append(gathering.convert_states(Kind.OFFER, self._read_offers(), runtime))
        both, *others = (part for part in parts if part is not None)
        for part in others:
            both = both.unionByName(part)
        return both

    def _read_offers(self) -> DataFrame:
        """Return the states that were offered to the stream, one for each key."""
        sources = self.sources
        meaning = hash_meaning(sources.runtime.spec.fingerprint(), sources.runtime.parameters)
        rows = sources.warehouse.read(new_keys(sources.generation.model)).filter(F.col("meaning") == meaning)
        best = F.max_by(F.struct(*rows.columns), F.struct("state_index", "event_time")).alias("row")
        return rows.groupBy(F.col("key").alias("_key")).agg(best).select("row.*")

    def _add_inputs(self, rows: DataFrame) -> DataFrame:
        """Return rows with the inputs of their keys, if the model has inputs."""
        sources, spec = self.sources, self.sources.runtime.spec
        if spec.inputs is None:
            return rows
        generation, segment = sources.generation, sources.segment
        first = self.manifest.inputs
        last = read_pinned_version(sources.warehouse, generation, segment.last_batch)
        if first is None or last is None or (first["id"], first["version"]) != (last["id"], last["version"]):
            raise CannotVerify(
                f"{segment.generation}: the table of inputs has changed since its snapshot, and which micro-batch used "
                f"which version is kept for the last ones only"
            )
        table = InputsTable(DeployedModel(spec, sources.warehouse))
        return table.joined(rows, sources.runtime.kind, last["version"])


def _refuse_what_cannot_be_recomputed(spec: ModelSpec, built: ModelSpec, segment: Segment) -> None:
    """Raise CannotVerify if the spec has a feature whose result the rows alone do not determine."""
    name = segment.generation
    if spec.expiry is not None and (spec.idle_us is None or not spec.order.waits):
        raise CannotVerify(
            f"{name}: when its keys expire depends on when rows came (only with order.kind: strict, clock: event and "
            f"returns: prior do the rows alone decide it)"
        )
    if spec.duplicates is not None and spec.duplicates.action == "drop":
        raise CannotVerify(
            f"{name}: duplicates are dropped, so which row of several was taken is not recorded"
        )
    if spec.late != built.late:
        raise CannotVerify(
            f"{name}: `late` has changed since its snapshot, and from which micro-batch on is not recorded"
        )


def _build_recipe(sources: Sources, end: End | None, options: Options, forgets: bool) -> Recipe:
    """Return the settings to recompute a segment.

    forgets: whether maintenance may have removed the segment's rows from quarantine.
    """
    runtime, segment = sources.runtime, sources.segment
    spec, rows = runtime.spec, runtime.rows.joined
    extra = {**runtime.kernel.outputs, **find_extra_widths(runtime.kernel)}
    have = [] if sources.estimates is None else sources.warehouse.read(estimates(spec.name)).columns
    expired = NEVER
    if spec.idle_us is not None and end is not None and end.watermark != NEVER:
        expired = end.watermark - spec.idle_us
    return Recipe(
        kernel=runtime.kernel,
        unit=spec.unit_us,
        kind=runtime.kind,
        estimates=EstimateFormat(
            runtime.kind,
            len(spec.states),
            False,
            tuple((name, width) for name, width in extra.items() if name in have),
        ),
        measured=len(rows.measurement),
        controls=len(rows.control),
        landed=len(runtime.rows.numbers),
        stored=find_storage_dtype(runtime.kernel),
        begin=runtime.begin,
        idle=spec.idle_us,
        in_order=spec.order.kind in ("strict", "replay"),
        replays=spec.order.kind == "replay",
        forgets=forgets,
        apply_late=spec.late == "apply" and spec.order.kind == "as-arrived",
        has_end=segment.end is not None,
        expired_before=expired,
        since=NEVER if options.since is None else options.since,
        tolerance=options.tolerance,
        numerics=sources.generation.numerics,
    )


def _judge_outcome(found: Findings, reasons: list[str]) -> str:
    if found.differences:
        return DIFFERENT
    if reasons:
        return NOT_VERIFIED
    return EQUAL if found.counts["rows"] else NOTHING


def choose_exit_code(outcome: str) -> int:
    """Return the exit code of an outcome.

    A difference gets a code that stops retries, because a retry would find it again. A part that is not verified is not
    a success.
    """
    return {EQUAL: 0, DIFFERENT: 2}.get(outcome, 3)
