"""Export the states of a monitor's rules, and begin the query of changed rules with them.

An export has the states at the end of a micro-batch that completes a version of the estimates. First its rows are
committed to the table `rule_states/<model>`. Then a file records the rows that the query has counted so far: from then
on the export exists. The query of the changed rules begins with its states, and counts the following rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql import functions as F

from jobs.core.errors import RUN_FAILED, UserError
from jobs.downstream.queries import (
    CHECKPOINTS,
    MONITOR,
    Query,
    export_file,
    find_query,
    list_queries,
    open_adopted_file,
)
from jobs.downstream.rule_operator import (
    KIND,
    RulePlan,
    build_function_rules,
    build_rules,
    list_function_readings,
)
from jobs.downstream.rule_states import (
    STATES,
    Changes,
    build_rule_state_rows,
    compare_rules,
    parse_rule_state_rows,
)
from jobs.downstream.views import Begin, SeenPosition, follow_view, parse_view, read_view
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.specs.monitor import Monitor, Rule
from jobs.state.encoding.keys import build_identity_arrays, build_identity_columns
from jobs.state.encoding.routing import compute_buckets
from jobs.state.encoding.rows import RowFormat
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.tables import rule_states
from jobs.streaming.state_reader import read_state_variable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PACKETS = "bucket int, payload binary"


class RuleExport(NamedTuple):
    """Export: its id, the query and its micro-batch, the number of keys, and whether this call made it."""

    id: str
    query: str
    batch: int
    keys: int
    made: bool


class Adopted(NamedTuple):
    """Initial states and views of a rules query that begins with an export, and the changes of rules."""

    begin: Begin
    seeds: Callable[[RulePlan, int], DataFrame]
    changes: Changes


def export_rules(warehouse: Warehouse, spec: ModelSpec) -> RuleExport:
    """Export the states of a model's rules: the spec's rules if they have run, or else the last that ran. Idempotent.

    Raises:
        UserError: no rules have run, their states cannot be read, or the rules that define them are unknown.
    """
    query, rules = _find_last_query(warehouse, spec)
    checkpoint = Checkpoint(warehouse, query.checkpoint)
    batch = next((one for one in reversed(checkpoint.commits()) if _complete(checkpoint, one)), None)
    if batch is None:
        raise UserError(
            f"no micro-batch of {query.name} completes a version of the estimates: run `kalman-pipeline monitor "
            f"--model {spec.name}` first",
            RUN_FAILED,
        )
    identity, table = f"{query.name}-{batch}", rule_states(spec.name)
    files = _open_files(warehouse, spec.name)
    file = export_file(query.name, batch)
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
    """Return how a query of rules begins with an export; None if it has no export, or has already begun.

    wanted: the export; None: the export of an earlier start that ended before its first micro-batch.

    Raises:
        UserError: the export does not exist, or the query has begun without it.
    """
    kept = open_adopted_file(warehouse, query)
    content = kept.read()
    given = None if content is None else json.loads(content)["export"]
    checkpoint = Checkpoint(warehouse, query.checkpoint)
    if wanted is not None and wanted != given:
        if checkpoint.find_last_planned() is not None:
            raise UserError(
                f"--adopt {wanted}: the rules of {spec.name} have begun already, "
                f"{'with ' + given if given else 'at the first estimate'}: states are adopted at their first start"
            )
        _read_detail(warehouse, spec.name, wanted)  # checks that it exists
        kept.write(json.dumps({"export": wanted}).encode())
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
        return rows.mapInArrow(_build_packer(plan, rules, changes, buckets), PACKETS)

    return Adopted(lambda lineage: follow_view(view, lineage, seen), seeds, changes)


def _read_detail(warehouse: Warehouse, model: str, identity: str) -> dict[str, Any]:
    content = _open_files(warehouse, model).read(f"export-{identity}.json")
    if content is None:
        raise UserError(
            f"--adopt {identity}: there is no such export of rules of {model}: make one with `kalman-pipeline export "
            f"--model {model} --monitor`"
        )
    return json.loads(content)


def _open_files(warehouse: Warehouse, model: str) -> Any:
    return warehouse.files(f"_monitor/{model}")


def _find_last_query(warehouse: Warehouse, spec: ModelSpec) -> tuple[Query, list[Rule]]:
    """Return the query of the spec's rules if it has run, or else the last query that ran, with its rules."""
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
        checkpoint, note = (
            Checkpoint(warehouse, query.checkpoint),
            _open_files(warehouse, spec.name).read(f"{query.name}.json"),
        )
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


def build_rule_plan(spec: ModelSpec, monitor: Monitor) -> RulePlan:
    """Return the plan of rules without their readings: it defines the meaning of their states."""
    width = len(monitor.rules) + len(list_function_readings(monitor))
    fmt = RowFormat(KIND, "event_time", tuple(f"r{number}" for number in range(width)), ())
    return RulePlan(build_rules(monitor), fmt, build_function_rules(spec, monitor))


def _complete(checkpoint: Checkpoint, batch: int) -> bool:
    return checkpoint.has(batch) and checkpoint.ends_with(batch) is not None


def _build_unpacker(
    plan: RulePlan, rules: list[Rule]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for packet in batch.column("packet"):
                records = plan.layout.decode(packet.as_py())
                if records.size:
                    yield build_rule_state_rows(plan, rules, records)

    return unpack


def _build_packer(
    plan: RulePlan, rules: list[Rule], changes: Changes, buckets: int
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows == 0:
                continue
            identity = build_identity_arrays(
                {name: batch.column(name).to_numpy() for name in ("identity", "check")}
            )
            records = parse_rule_state_rows(plan, rules, changes, batch, identity)
            bucket = compute_buckets(records.arrays["route"], buckets)
            for number in np.unique(bucket):
                part = records.take(np.flatnonzero(bucket == number))
                packet = pa.array([plan.layout.encode(part)], pa.binary())
                yield pa.RecordBatch.from_arrays(
                    [pa.array([number], pa.int32()), packet], ["bucket", "payload"]
                )

    return pack
