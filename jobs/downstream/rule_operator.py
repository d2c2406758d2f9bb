"""Apply rules to each key's readings in a stateful Spark operator, with one group per bucket of keys and NumPy.

If a rule is about silence, every micro-batch sends its newest event time to every bucket. So the silence of a key is
noticed as soon as other keys have rows.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from jobs.core.times import parse_duration_us
from jobs.downstream.queries import open_monitor_files
from jobs.downstream.rules import (
    FAILED,
    NEVER,
    Events,
    Field,
    FunctionRule,
    Rules,
    RuleStates,
    apply_rules,
    build_empty_states,
    concatenate_events,
    raise_silence_alerts,
)
from jobs.downstream.windows import build_reading_column, list_group_readings
from jobs.snapshots.model_runtime import ship_named
from jobs.spark.local_frame import Make
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.specs.monitor import Monitor, Rule, parse_field_type
from jobs.state.encoding.keys import KeyKind, build_key_columns, match
from jobs.state.encoding.packets import Layout, PacketColumn, Records, join_records
from jobs.state.encoding.routing import Routing
from jobs.state.encoding.rows import (
    RowFormat,
    map_batches,
    pack_buckets,
    parse_records,
    read_times,
    select_columns,
    unpack_rows,
)
from jobs.storage.tables import alerts
from jobs.streaming.publishing import TopicSink, add_ordinals, write_to_sink
from kalman.models.named import Named

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.stateful_processor import TimerValues, ValueState

PACKED = "bucket int, payload binary, clock bigint"
OUTPUT = "key string, rule int, raised boolean, time bigint, value double, since bigint, readings bigint"
BUCKETS_A_PARTITION = 4
KIND = KeyKind(("key",), ("string",), False)
RAISED, CLEARED, NOT_DECIDED = "raised", "cleared", "failed"


def fix_bucket_count(warehouse: Warehouse, spec: ModelSpec, name: str) -> int:
    """Return the number of buckets of keys, which the first start of the query `name` fixes.

    The file `_monitor/<model>/<name>.json` stores this number and the rules that give the states their meaning.
    """
    files = open_monitor_files(warehouse, spec.name)
    kept = files.read(f"{name}.json")
    assert spec.monitor is not None
    note = {} if kept is None else json.loads(kept)
    partitions = spec.stream.partitions or warehouse.spark.sparkContext.defaultParallelism
    found = {"buckets": BUCKETS_A_PARTITION * partitions, **note}
    found["rules"] = [rule.model_dump() for rule in spec.monitor.rules]
    if found != note:
        files.write(f"{name}.json", json.dumps(found).encode())
    return int(found["buckets"])


class RulePlan(NamedTuple):
    """Rules and formats of the operator, sent to the executors once per query.

    functions: function rules; their readings follow the readings of all other rules in a row.
    """

    rules: Rules
    rows: RowFormat
    functions: tuple[FunctionRule, ...] = ()

    @property
    def layout(self) -> Layout:
        """Return the layout of a bucket's states."""
        r = len(self.rules.high)
        columns = [
            *KIND.identity_columns,
            PacketColumn("time", "<i8"),
            *(PacketColumn(name, "<i8", r) for name in ("run", "since", "calm")),
            PacketColumn("last", "<f8", r),
            PacketColumn("active", "|u1", r),
        ]
        own = [column for rule in self.functions for column in rule.columns]
        columns[-1:-1] = [column for column in own if column.dtype != "|u1"]
        columns += [column for column in own if column.dtype == "|u1"]  # columns of one-byte values go last
        return Layout(tuple(columns), text=True)

    def fresh(self, keys: int) -> dict[str, Any]:
        """Return the arrays for `keys` keys without readings."""
        arrays = _build_arrays(build_empty_states(self.rules, keys))
        for rule in self.functions:
            arrays |= rule.fresh(keys)
        return arrays


def build_rules(monitor: Monitor) -> Rules:
    """Return the rules of a spec as arrays."""

    def bounds(name: str, otherwise: str | None, none: float) -> Any:
        found = []
        for rule in monitor.rules:
            value = getattr(rule, name)
            value = getattr(rule, otherwise) if value is None and otherwise is not None else value
            found.append(none if value is None else value)
        return np.array(found, float)

    return Rules(
        high=bounds("at_least", None, math.inf),
        low=bounds("at_most", None, -math.inf),
        clear_high=bounds("clear_below", "at_least", math.inf),
        clear_low=bounds("clear_above", "at_most", -math.inf),
        readings=np.array([rule.readings for rule in monitor.rules]),
        clear_readings=np.array([rule.clear_readings for rule in monitor.rules]),
        rising=np.array([rule.rising for rule in monitor.rules]),
        after=np.array(
            [-1 if rule.after is None else parse_duration_us(rule.after) for rule in monitor.rules]
        ),
    )


class RuleProcessor(StatefulProcessor):
    """Apply the rules to the keys of a bucket."""

    def __init__(self, plan: RulePlan) -> None:
        self.plan = plan

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the only state variable, which is a packet with all keys of the bucket."""
        self.states: ValueState = handle.getValueState("states", "packet binary")

    def handleInitialState(self, key: Any, initialState: pd.DataFrame, timerValues: TimerValues) -> None:  # noqa: N802
        """Add initial states; each value of `payload` is a packet with the states of some keys of this bucket."""
        layout = self.plan.layout
        packets = [bytes(payload) for payload in initialState["payload"]]
        earlier = self.states.get()  # states from earlier packets of the bucket
        if earlier is not None:
            packets.append(bytes(earlier[0]))
        records = join_records([layout.decode(packet) for packet in packets])
        records = records.take(np.argsort(records.arrays["route"], kind="stable"))
        self.states.update((layout.encode(records),))

    def handleInputRows(  # noqa: N802
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: TimerValues
    ) -> Iterator[pd.DataFrame]:
        """Apply a micro-batch's readings to the bucket; yield the events that raise and clear alerts."""
        payloads: list[bytes] = []
        clock = NEVER
        for frame in rows:
            payloads += [payload for payload in frame["payload"] if payload is not None]
            clock = max(clock, int(frame["clock"].max()))
        held = self.states.get() if self.states.exists() else None
        known = self.plan.layout.decode(bytes(held[0])) if held is not None else self.plan.layout.empty()
        records, events = update_bucket(self.plan, known, payloads, clock)
        if records is not known:
            self.states.update((self.plan.layout.encode(records),))
        if len(events.key):
            yield pd.DataFrame(build_event_columns(records, events))


def build_event_columns(records: Records, events: Events) -> dict[str, Any]:
    """Return the events of a bucket as the columns `OUTPUT`; records: the states of the bucket."""
    assert records.text is not None
    raised = pd.array(events.raised, "boolean")
    raised[events.readings == FAILED] = pd.NA
    return {
        "key": records.text.take(pa.array(events.key)).to_pandas(),
        "rule": events.rule.astype(np.int32),
        "raised": raised,
        "time": events.time,
        "value": events.value,
        "since": events.since,
        "readings": events.readings,
    }


def update_bucket(
    plan: RulePlan, known: Records, payloads: list[bytes], clock: int
) -> tuple[Records, Events]:
    """Apply packed readings to the states of a bucket; return the states, ordered by route, and the events.

    clock: newest event time of the micro-batch, in microseconds.
    """
    rules, own, found = plan.rules, {}, []
    keyed = unpack_rows(payloads, plan.rows) if payloads else None
    if keyed is not None:
        at = match(known, keyed.keys)
        absent = np.flatnonzero(at < 0)
        if len(absent):
            new = keyed.keys.take(absent)
            added = Records({**new.arrays, **plan.fresh(len(absent))}, new.text)
            whole = join_records([known, added]) if known.size else added
            known = whole.take(np.argsort(whole.arrays["route"], kind="stable"))
            at = match(known, keyed.keys)
        states = _build_states(known)
        rows = keyed.rows
        # Both numberings follow the routes of the keys, so the rows stay ordered by key.
        key = at[rows.key]
        if plan.functions:
            kept = np.flatnonzero(rows.time >= states.time[key])  # the same rows that `apply_rules` uses
            for rule in plan.functions:
                changed, events = rule.apply(known.arrays, key[kept], rows.time[kept], rows.y[:, kept])
                own |= changed
                found.append(events)
        states, events = apply_rules(rules, states, key, rows.time, rows.y[: len(rules.high)])
        found.insert(0, events)
    else:
        states = _build_states(known)
    states, quiet = raise_silence_alerts(rules, states, clock)
    whole = concatenate_events([*found, quiet])
    if keyed is None and len(quiet.key) == 0:
        return known, whole
    return _drop_forgotten_keys(
        plan, Records({**known.arrays, **_build_arrays(states), **own}, known.text), whole, clock
    )


def _drop_forgotten_keys(
    plan: RulePlan, records: Records, events: Events, clock: int
) -> tuple[Records, Events]:
    """Remove the keys that have no events and whose state equals the state of a new key in every rule."""
    spans = [rule.forget for rule in plan.functions if rule.forget is not None]
    time = records.arrays["time"]
    if len(spans) < len(plan.rules.high) or not len(time) or clock == NEVER:
        return records, events
    kept = clock - time <= max(spans)
    kept[events.key] = True
    if kept.all():
        return records, events
    number = np.cumsum(kept) - 1
    return records.take(np.flatnonzero(kept)), events._replace(key=number[events.key])


def _build_states(records: Records) -> RuleStates:
    arrays = records.arrays
    kept = {name: arrays[name] for name in ("time", "run", "since", "calm", "last")}
    return RuleStates(**kept, active=arrays["active"].astype(bool))


def _build_arrays(states: RuleStates) -> dict[str, Any]:
    return {**states._asdict(), "active": states.active.astype(np.uint8)}


def start_rules(
    spec: ModelSpec,
    monitor: Monitor,
    estimates: DataFrame,
    buckets: int,
    seeds: Callable[[RulePlan, int], DataFrame] | None = None,
) -> DataFrame:
    """Return the stream of alerts for a stream of live estimates; seeds: function that returns the initial states."""
    plan, packed = build_rule_packets(spec, monitor, estimates, buckets)
    grouped = packed.groupBy("bucket")
    begin = None if seeds is None else seeds(plan, buckets).groupBy("bucket")
    return grouped.transformWithStateInPandas(RuleProcessor(plan), OUTPUT, "Append", "None", begin)


def build_rule_packets(
    spec: ModelSpec, monitor: Monitor, estimates: DataFrame, buckets: int
) -> tuple[RulePlan, DataFrame]:
    """Return the plan of the rules, and the readings of the estimates as packets by bucket (`PACKED`)."""
    plan = build_rule_plan(spec, monitor)
    ship_named(estimates.sparkSession, [rule.called for rule in plan.functions], spec.functions_folder)
    used = [find_rule_reading(spec, rule) for rule in monitor.rules]
    read = []
    for name, alias in zip([*used, *list_function_readings(monitor)], plan.rows.measurement, strict=True):
        column = F.lit(None).cast("double") if name is None else build_reading_column(spec, name)
        read.append(column.alias(alias))
    chosen = select_columns(estimates.select("key", "event_time", *read), plan.rows)
    pack = _build_reading_packer(plan.rows, buckets, bool((plan.rules.after >= 0).any()))
    return plan, chosen.mapInArrow(pack, PACKED)


def build_rule_plan(spec: ModelSpec, monitor: Monitor) -> RulePlan:
    """Return the plan of rules, which defines the meaning of the rules' states."""
    width = len(monitor.rules) + len(list_function_readings(monitor))
    fmt = RowFormat(KIND, "event_time", tuple(f"r{number}" for number in range(width)), ())
    return RulePlan(build_rules(monitor), fmt, build_function_rules(spec, monitor))


def list_function_readings(monitor: Monitor) -> list[str]:
    """Return the names of the readings of all functions, without duplicates."""
    return list(dict.fromkeys(name for rule in monitor.rules for name in rule.reads))


def build_function_rules(spec: ModelSpec, monitor: Monitor) -> tuple[FunctionRule, ...]:
    """Return the function rules of a spec."""
    place = {name: len(monitor.rules) + i for i, name in enumerate(list_function_readings(monitor))}
    found = []
    for number, rule in enumerate(monitor.rules):
        if rule.function is not None:
            fields = tuple(
                Field(name, *(parse_field_type(kind) or ("", None))) for name, kind in rule.keeps.items()
            )
            reads = tuple((name, place[name]) for name in rule.reads)
            function = Named(rule.function, spec.functions_folder)
            found.append(
                FunctionRule(
                    number,
                    rule.name,
                    rule.function,
                    function,
                    reads,
                    fields,
                    rule.parameters,
                    None if rule.forget is None else parse_duration_us(rule.forget),
                )
            )
    return tuple(found)


def list_read_columns(spec: ModelSpec, monitor: Monitor) -> set[str]:
    """Return the columns of estimates that windows and rules read, besides the key, the time and the flags."""
    readings = [find_rule_reading(spec, rule) for rule in monitor.rules] + list_function_readings(monitor)
    readings += [*(one.of for one in monitor.aggregates), *list_group_readings(spec, monitor).values()]
    return {spec.readings.by_name[name].column for name in readings if name is not None}


def find_rule_reading(spec: ModelSpec, rule: Rule) -> str | None:
    """Return the name of the reading that a rule compares with its bounds; None if the rule compares no reading."""
    if rule.kind == "level":
        return f"mean.{rule.state or spec.states[0]}"
    if rule.kind == "measured":
        return f"measured.{rule.measurement or spec.measurement[0]}"
    return "nis" if rule.kind == "nis" else None


def build_alert_rows(events: DataFrame, monitor: Monitor, kind: KeyKind) -> DataFrame:
    """Return events (`OUTPUT`) as rows of the table of alerts."""
    names = F.array(*(F.lit(rule.name) for rule in monitor.rules))
    return events.select(
        "key",
        *([] if kind.is_plain_key else build_key_columns(kind, F.col("key"))),
        F.get(names, F.col("rule")).alias("rule"),
        F.when(F.col("raised").isNull(), NOT_DECIDED)
        .when(F.col("raised"), RAISED)
        .otherwise(CLEARED)
        .alias("status"),
        F.timestamp_micros("time").alias("event_time"),
        "value",
        F.timestamp_micros("since").alias("since"),
        F.when(F.col("raised").isNotNull(), F.col("readings")).alias("readings"),
        F.lit(monitor.definition("rules")).alias("definition"),
    )


def _build_reading_packer(fmt: RowFormat, buckets: int, to_all: bool) -> Make:
    routing = Routing(tuple(range(buckets)), 1)

    @map_batches
    def pack(batch: pa.RecordBatch) -> pa.RecordBatch:
        bucket, payload = pack_buckets(parse_records(batch, fmt), fmt.layout, routing, None).columns
        if to_all:
            others = np.setdiff1d(np.arange(buckets), bucket.to_numpy())
            bucket = pa.concat_arrays([bucket, pa.array(others, pa.int32())])
            payload = pa.concat_arrays([payload, pa.nulls(len(others), pa.binary())])
        clocks = pa.array(np.full(len(bucket), read_times(batch).max()))
        return pa.RecordBatch.from_arrays([bucket, payload, clocks], ["bucket", "payload", "clock"])

    return pack


@dataclass
class Alerts:
    """The `foreachBatch` function that stores and publishes alerts."""

    warehouse: Warehouse
    spec: ModelSpec
    monitor: Monitor
    application: str
    kind: KeyKind
    raised: int = 0
    cleared: int = 0
    failed: int = 0

    def __call__(self, events: DataFrame, batch_id: int) -> None:
        """Append the alerts of a micro-batch exactly once, and publish them to the topic, if any, at least once."""
        events = events.persist()
        try:
            counts = {row["raised"]: row["count"] for row in events.groupBy("raised").count().collect()}
            if not counts:
                return
            rows = build_alert_rows(events, self.monitor, self.kind)
            rows = rows.withColumn("batch_id", F.lit(batch_id).cast("bigint"))
            table = alerts(self.spec.name)
            self.warehouse.append(rows.coalesce(1), table, (self.application, batch_id), more_columns=True)
            if self.monitor.kafka is not None:
                topic = TopicSink(self.monitor.kafka.topic)
                messages = add_ordinals(rows).withColumn("query", F.lit(self.application))
                write_to_sink(topic.name, batch_id, lambda: topic.send(messages))
        finally:
            events.unpersist()
        self.raised += counts.get(True, 0)
        self.cleared += counts.get(False, 0)
        failed = counts.get(None, 0)
        if failed and self.failed == 0:
            print(
                f"{self.spec.name}: a rule's function failed at {failed:,} rows, which are left out and in "
                f"{alerts(self.spec.name)} with the status {NOT_DECIDED}; the executor's log says why",
                file=sys.stderr,
            )
        self.failed += failed
