"""Watch the live estimates by windows and rules, and export the states of rules for a changed monitor."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark.sql import functions as F

from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.report import Report
from jobs.downstream.queries import (
    MONITOR,
    Query,
    begin_query,
    find_query,
    list_queries,
    open_monitor_files,
)
from jobs.downstream.rule_operator import (
    KIND,
    Alerts,
    RulePlan,
    build_rule_plan,
    fix_bucket_count,
    start_rules,
)
from jobs.downstream.rules import NEVER, Field
from jobs.downstream.runner import LiveQueries
from jobs.downstream.views import Begin, SeenPosition, follow_view, parse_view, read_view
from jobs.downstream.windows import Windows, align_readings
from jobs.lineage.catalog import Catalog
from jobs.spark.kafka import read_topic
from jobs.spark.local_frame import Make
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.specs.monitor import Monitor, Rule
from jobs.state.encoding.arrow import look_up_entries
from jobs.state.encoding.keys import build_identity_arrays, build_identity_columns, build_key_kind
from jobs.state.encoding.packets import ROW_PACKETS, Records
from jobs.state.encoding.routing import Routing
from jobs.state.encoding.rows import map_batches, pack_buckets
from jobs.storage.checkpoints import CHECKPOINTS, Checkpoint
from jobs.storage.tables import estimates, rule_states
from jobs.streaming.exporting import read_state_variable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery


STATES = (
    "key string, event_time timestamp, numbers map<string,array<double>>, integers map<string,array<bigint>>"
)
"""Columns of a rule state, as DDL."""
_COUNTS = ("run", "since", "calm", "active")
_LAST = "last"


class Changes(NamedTuple):
    """Mapping from the states of former rules to the states of other rules.

    kept: names of the rules that continue. again: names of the changed rules that keep alerts and last readings, but
    count from zero. fresh: names of the rules that begin anew. dropped: names of the rules that no longer exist.
    fields: names of the function fields that begin anew.
    """

    kept: tuple[str, ...]
    again: tuple[str, ...]
    fresh: tuple[str, ...]
    dropped: tuple[str, ...]
    fields: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return the changes as lines of text for a user."""
        said = (
            ("continue with their states", self.kept),
            ("differ: their alerts continue, their counts of readings begin again", self.again),
            ("are new: they begin without states", self.fresh),
            ("are no more, and their states are left out", self.dropped),
        )
        lines = [f"rules that {what}: {', '.join(names)}" for what, names in said if names]
        if self.fields:
            lines.append(
                f"fields that begin anew, as they are new or of another type: {', '.join(self.fields)}"
            )
        return lines


def compare_rules(former: Sequence[Rule], rules: Sequence[Rule]) -> Changes:
    """Compare former rules with new rules by name, and compare the state of functions field by field."""
    known, kept, again, fresh, fields = {rule.name: rule for rule in former}, [], [], [], []
    for rule in rules:
        was = known.get(rule.name)
        if (
            was is None
            or was.kind != rule.kind
            or _find_built_in_reading(was) != _find_built_in_reading(rule)
        ):
            fresh.append(rule.name)
        elif rule.function is not None:
            kept.append(rule.name)
            fields += [
                f"{rule.name}.{field}" for field, kind in rule.keeps.items() if was.keeps.get(field) != kind
            ]
        else:
            (kept if was == rule else again).append(rule.name)
    dropped = [name for name in known if name not in {rule.name for rule in rules}]
    return Changes(tuple(kept), tuple(again), tuple(fresh), tuple(dropped), tuple(fields))


def _find_built_in_reading(rule: Rule) -> Any:
    """Return the reading of a built-in rule; None for a function rule, whose state may outlive its readings."""
    return None if rule.function is not None else (rule.state, rule.measurement)


def build_rule_state_rows(plan: RulePlan, rules: Sequence[Rule], records: Records) -> pa.RecordBatch:
    """Return the states of a bucket as rows (`STATES`)."""
    numbers: dict[str, NDArray] = {}
    integers: dict[str, NDArray] = {}
    functions = {rule.name: rule for rule in plan.functions}
    for place, rule in enumerate(rules):
        own = functions.get(rule.name)
        if own is None:
            for name in _COUNTS:
                integers[f"{rule.name}.{name}"] = records.arrays[name][place]
            numbers[f"{rule.name}.{_LAST}"] = records.arrays[_LAST][place]
            continue
        for one in own.fields:
            into = numbers if one.type == "float64" else integers
            into[own.place(one)] = records.arrays[own.place(one)]
    assert records.text is not None
    time = records.arrays["time"]
    at = pa.array(time, pa.timestamp("us", "UTC"), mask=time == NEVER)
    size = records.size
    maps = [_build_maps(numbers, size, pa.float64()), _build_maps(integers, size, pa.int64())]
    return pa.RecordBatch.from_arrays(
        [records.text.cast(pa.string()), at, *maps], ["key", "event_time", "numbers", "integers"]
    )


def _build_maps(fields: Mapping[str, NDArray], size: int, kind: pa.DataType) -> pa.Array:
    """Return N maps, one for each key, from the name of each field to its values; fields: (N,) or (width, N)."""
    tables = [np.atleast_2d(values) for values in fields.values()]
    widths = np.tile([len(one) for one in tables], size)
    values = np.concatenate(tables).T.ravel() if tables else np.zeros(0)
    ends = np.concatenate([[0], np.cumsum(widths)]).astype(np.int32)
    items = pa.ListArray.from_arrays(pa.array(ends), pa.array(values, kind))
    names = pa.array(list(fields) * size, pa.string())
    return pa.MapArray.from_arrays(
        pa.array(np.arange(size + 1, dtype=np.int32) * np.int32(len(fields))), names, items
    )


def parse_rule_state_rows(
    plan: RulePlan, rules: Sequence[Rule], changes: Changes, batch: pa.RecordBatch, identity: dict[str, Any]
) -> Records:
    """Return the states of a plan's rules from exported rows (`STATES`).

    Args:
        plan: plan of the new rules.
        rules: definitions of the new rules.
        changes: changes from the rules of the exported rows to the new rules (`compare_rules`).
        batch: exported rows.
        identity: arrays that identify the keys, such as `route`.
    Raises:
        UserError: the rows lack a field.
    """
    size = batch.num_rows
    arrays = plan.fresh(size)
    time = batch.column("event_time").cast(pa.timestamp("us")).cast(pa.int64())
    arrays["time"] = np.asarray(pc.fill_null(time, NEVER), np.int64)
    functions = {rule.name: rule for rule in plan.functions}
    for place, rule in enumerate(rules):
        own = functions.get(rule.name)
        if own is not None:
            known = [] if rule.name in changes.fresh else own.fields
            for field in known:
                if own.place(field) not in changes.fields:
                    arrays[own.place(field)] = _read_field(batch, own.place(field), field)
        elif rule.name not in changes.fresh:
            names = ("active",) if rule.name in changes.again else _COUNTS
            for name in names:
                kind = "bool" if name == "active" else "int64"
                arrays[name][place] = _read_field(batch, f"{rule.name}.{name}", Field(name, kind))
            arrays[_LAST][place] = _read_field(batch, f"{rule.name}.{_LAST}", Field(_LAST, "float64"))
    return Records({**identity, **arrays}, batch.column("key"))


def _read_field(batch: pa.RecordBatch, name: str, field: Field) -> NDArray:
    """Return a state field of the rows as an array (N,) or (width, N)."""
    maps = batch.column("numbers" if field.type == "float64" else "integers")
    values = look_up_entries(maps, name)
    flat, width = values.flatten(), field.width or 1
    if values.null_count or len(flat) != batch.num_rows * width:
        raise UserError(f"the exported states of rules lack {name}, or have another number of it", RUN_FAILED)
    table = np.array(flat.to_numpy(zero_copy_only=False)).reshape(batch.num_rows, width).T
    if field.type == "bool":
        table = table.astype(np.uint8)
    return np.ascontiguousarray(table if field.width is not None else table[0])


class RuleExport(NamedTuple):
    """An export: its id, its query and micro-batch, the number of its keys, and whether this call made the export."""

    id: str
    query: str
    batch: int
    keys: int
    made: bool


class Adopted(NamedTuple):
    """Initial states and views for a query of rules that begins with an export, and the changes of the rules."""

    begin: Begin
    seeds: Callable[[RulePlan, int], DataFrame]
    changes: Changes


def export_rules(warehouse: Warehouse, spec: ModelSpec) -> RuleExport:
    """Export the states of the spec's rules if these rules have run, or else of the last rules that ran. Idempotent.

    Raises:
        UserError: no rules have run, their states cannot be read, or the rules that define them are unknown.
    """
    query, rules = _find_last_query(warehouse, spec)
    checkpoint = Checkpoint(warehouse, query.checkpoint)
    whole = (one for one in reversed(checkpoint.commits()) if checkpoint.has(one))
    batch = next((one for one in whole if checkpoint.ends_with(one) is not None), None)
    if batch is None:
        raise UserError(
            f"no micro-batch of {query.name} completes a version of the estimates: run `kalman-pipeline monitor "
            f"--model {spec.name}` first",
            RUN_FAILED,
        )
    identity, table = f"{query.name}-{batch}", rule_states(spec.name)
    files, file = open_monitor_files(warehouse, spec.name), f"export-{identity}.json"
    known = files.read(file)
    if known is not None:
        return RuleExport(identity, query.name, batch, json.loads(known)["keys"], False)
    view = read_view(warehouse, query, batch)
    if view is None:
        raise UserError(
            f"what {query.name} has counted up to its micro-batch {batch} is not known: its estimates are gone, or an "
            f"earlier release began it",
            RUN_FAILED,
        )
    monitor = Monitor(rules=rules)
    plan = build_rule_plan(spec, monitor)
    packets = read_state_variable(warehouse, query.name, query.checkpoint, "states", batch).select(
        "value.packet"
    )
    rows = packets.mapInArrow(_build_unpacker(plan, rules), STATES)
    rows = rows.withColumn("export", F.lit(identity))
    warehouse.append(rows.coalesce(1), table, (f"export-{identity}", 0), more_columns=True)
    count = warehouse.read(table).filter(F.col("export") == identity).count()
    detail = {
        "query": query.name,
        "batch": batch,
        "keys": count,
        "rules": [rule.model_dump() for rule in rules],
        "view": asdict(view[0]),
        "seen": {name: list(one) for name, one in view[1].items()},
    }
    files.write(file, json.dumps(detail).encode())
    return RuleExport(identity, query.name, batch, count, True)


def adopt(warehouse: Warehouse, spec: ModelSpec, query: Query, wanted: str | None) -> Adopted | None:
    """Return how a query of rules begins with an export; None without an export, or if the query has already begun.

    wanted: id of the export; None means the export that an earlier start adopted before it ended without a micro-batch.

    Raises:
        UserError: the export does not exist, or the query has begun without it.
    """
    files = open_monitor_files(warehouse, spec.name)
    content = files.read(query.adopted_file)
    given = None if content is None else json.loads(content)["export"]
    checkpoint = Checkpoint(warehouse, query.checkpoint)
    if wanted is not None and wanted != given:
        if checkpoint.find_last_planned() is not None:
            raise UserError(
                f"--adopt {wanted}: the rules of {spec.name} have begun already, "
                f"{'with ' + given if given else 'at the first estimate'}: states are adopted at their first start"
            )
        _read_detail(warehouse, spec.name, wanted)  # raises an error if the export does not exist
        files.write(query.adopted_file, json.dumps({"export": wanted}).encode())
        given = wanted
    if given is None or checkpoint.find_last_commit() is not None:
        return None
    detail = _read_detail(warehouse, spec.name, given)
    former = [Rule(**rule) for rule in detail["rules"]]
    assert spec.monitor is not None
    rules, identity = spec.monitor.rules, given
    changes = compare_rules(former, rules)
    view = parse_view(detail["view"])
    seen = {name: SeenPosition(*one) for name, one in detail["seen"].items()}

    def seeds(plan: RulePlan, buckets: int) -> DataFrame:
        rows = warehouse.read(rule_states(spec.name)).filter(F.col("export") == identity)
        rows = rows.select(
            "key", "event_time", "numbers", "integers", *build_identity_columns(KIND, F.col("key"))
        )
        return rows.mapInArrow(_build_packer(plan, rules, changes, buckets), ROW_PACKETS)

    return Adopted(lambda lineage: follow_view(view, lineage, seen), seeds, changes)


def _read_detail(warehouse: Warehouse, model: str, identity: str) -> dict[str, Any]:
    content = open_monitor_files(warehouse, model).read(f"export-{identity}.json")
    if content is None:
        raise UserError(
            f"--adopt {identity}: there is no such export of rules of {model}: make one with `kalman-pipeline export "
            f"--model {model} --monitor`"
        )
    return json.loads(content)


def _find_last_query(warehouse: Warehouse, spec: ModelSpec) -> tuple[Query, list[Rule]]:
    """Return the query of the spec's rules if it has run, or else the last query that ran; also return its rules."""
    mine = [one for one in list_queries(spec, MONITOR) if one.part == "rules"]
    for query in mine:
        if Checkpoint(warehouse, query.checkpoint).find_last_commit() is not None:
            assert spec.monitor is not None
            return query, spec.monitor.rules
    found = []
    for folder in warehouse.files(CHECKPOINTS).names(""):
        query = find_query(spec.name, folder)
        if query is None or query.part != "rules":
            continue
        checkpoint = Checkpoint(warehouse, query.checkpoint)
        note = open_monitor_files(warehouse, spec.name).read(f"{query.name}.json")
        last, rules = checkpoint.find_last_commit(), None if note is None else json.loads(note).get("rules")
        if last is not None:
            found.append((checkpoint.committed_at(last), query, rules))
    if not found:
        raise UserError(f"no rules of {spec.name} have run: there are no states to export")
    _, query, rules = max(found, key=lambda one: one[0])
    if rules is None:
        raise UserError(
            f"the rules of {query.name}, which an earlier release ran, are not known: put them back into the spec, and "
            f"export before you change them"
        )
    return query, [Rule(**rule) for rule in rules]


def _build_unpacker(plan: RulePlan, rules: list[Rule]) -> Make:
    def unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for packet in batch.column("packet"):
                records = plan.layout.decode(packet.as_py())
                if records.size:
                    yield build_rule_state_rows(plan, rules, records)

    return unpack


def _build_packer(plan: RulePlan, rules: list[Rule], changes: Changes, buckets: int) -> Make:
    routing = Routing(tuple(range(buckets)), 1)

    @map_batches
    def pack(batch: pa.RecordBatch) -> pa.RecordBatch:
        identity = build_identity_arrays(
            {name: batch.column(name).to_numpy() for name in ("identity", "check")}
        )
        records = parse_rule_state_rows(plan, rules, changes, batch, identity)
        return pack_buckets(records, plan.layout, routing, None)

    return pack


@dataclass
class MonitorQueries(LiveQueries):
    """One run of a monitor."""

    monitor: Monitor
    adopted: str | None = None
    """Export of rule states with which new rules begin (`jobs.downstream.rule_exports`)."""
    notes: list[str] = field(default_factory=list, init=False)
    """Differences between the rules and the adopted states' rules."""
    windows: Windows | None = None
    alerts: Alerts | None = None

    label = "the monitor"

    def start(self) -> list[StreamingQuery]:
        """Start a query for the windows and one for the rules."""
        spec, monitor, warehouse = self.spec, self.monitor, self.warehouse
        for given in (monitor.kafka, monitor.windows_kafka):
            if given is not None:
                read_topic(warehouse.spark, given.topic)
        queries, specs = [], Catalog(warehouse).read_specs(spec.name, spec)
        for query in list_queries(spec, MONITOR):
            if query.part == "windows":
                self.windows = self.windows or Windows(
                    warehouse, spec, monitor, begin_query(warehouse, query).application
                )
                sink, rows = self.windows, align_readings(self.source(query), spec, specs)
            else:
                if self.alerts is None:
                    kind = build_key_kind(spec.key, warehouse.read(estimates(spec.name)).schema)
                    application = begin_query(warehouse, query).application
                    self.alerts = Alerts(warehouse, spec, monitor, application, kind)
                sink = self.alerts
                with_states = adopt(warehouse, spec, query, self.adopted)
                begin, seeds = (None, None) if with_states is None else with_states[:2]
                if with_states is not None:
                    self.notes = with_states.changes.lines()
                source = align_readings(self.source(query, begin=begin), spec, specs)
                rows = start_rules(
                    spec, monitor, source, fix_bucket_count(warehouse, spec, query.name), seeds
                )
            queries.append(self.start_query(rows, query, sink))
        return queries

    def format_progress(self) -> str:
        """Return the numbers of rows added to windows, and of alerts raised and cleared, as text."""
        parts = []
        if self.windows is not None:
            parts.append(f"{self.windows.rows:,} rows in windows")
        if self.alerts is not None:
            parts.append(f"{self.alerts.raised:,} alerts raised, {self.alerts.cleared:,} cleared")
        return ", ".join(parts)

    def report(self, seconds: float) -> Report:
        """Return the report of this run."""
        lines, data = [*self.notes], {}
        if self.windows is not None:
            rows, late = self.windows.rows, self.windows.late
            lines.append(f"added {rows:,} rows to the windows of {self.spec.name}, {late:,} were late")
            data |= {"window_rows": rows, "late": late}
        if self.alerts is not None:
            lines.append(f"raised {self.alerts.raised:,} alerts and cleared {self.alerts.cleared:,}")
            data |= {
                "raised": self.alerts.raised,
                "cleared": self.alerts.cleared,
                "failed": self.alerts.failed,
            }
            if self.alerts.failed:
                lines.append(f"functions of rules failed at {self.alerts.failed:,} rows, which they left out")
        return Report(lines, {"model": self.spec.name, **data, "seconds": seconds})
