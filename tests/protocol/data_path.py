"""The model of a filter, in place of numerics and formats: a key's state is the list of rows that it reflects.

A row is named by its measurement, a number that no other row has. An estimate carries the name of its row, and a
snapshot's `mean` the names of all rows of the key. So it can be told which rows are reflected, where, and how often.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

from jobs.lineage.inputs_table import PROPERTY, InputsTable
from jobs.lineage.source_ranges import RangeWriter
from jobs.snapshots.model_runtime import hash_meaning
from jobs.snapshots.state_rows import CommittedStates, Measured
from jobs.snapshots.verified_rows import PARTITION, STATES, read_rows
from jobs.state.encoding.packets import OutputPacket
from jobs.storage.measurements_table import create_new_keys_table
from jobs.storage.part_files import PartFile
from jobs.storage.table_log import FileTable
from jobs.storage.tables import SNAPSHOTS, SOURCE_RANGE, estimates, measurements
from jobs.streaming.estimate_files import PROPERTY as FILES_PROPERTY
from jobs.streaming.estimate_files import EstimateTarget
from jobs.streaming.refused_rows import REASONS
from jobs.streaming.written_files import EstimateFiles
from tests.protocol import memory_columns as F
from tests.protocol import world
from tests.protocol.memory_frame import Frame, parse_schema
from tests.protocol.memory_state import States, read_states
from tests.protocol.memory_stream import StreamFrame

STATE_ROWS = parse_schema(
    "key string, state_index bigint, event_time timestamp, mean array<double>, covariance array<double>, "
    "log_likelihood double, extras map<string, array<double>>"
)


ESTIMATES = (
    "key string, event_time timestamp, y double, inputs bigint, flags string, batch_id bigint, model_version int, "
    f"generation string, {SOURCE_RANGE} string"
)


class Kind(NamedTuple):
    """What is asked of `jobs.state.encoding.keys.KeyKind`: keys are one column of text."""

    is_plain_key: bool = True
    integer: bool = False


@dataclass(frozen=True)
class MemoryRuntime:
    """`jobs.snapshots.model_runtime.ModelRuntime` without numerics."""

    spec: Any
    parameters: Any
    schema: Any

    kernel = SimpleNamespace(initial=lambda size: None)
    kind = Kind()
    rows = SimpleNamespace(joined=None, row_id=None)
    state = SimpleNamespace(layout=None)
    estimates = SimpleNamespace(diagonal=False, kind=kind, extra=(), states=1)
    definition = SimpleNamespace()
    begin = None

    @classmethod
    def of(cls, warehouse: Any, spec: Any, parameters: Any) -> MemoryRuntime:
        """Return the runtime of a model whose measurements are in the warehouse."""
        return cls(spec, parameters, warehouse.read(measurements(spec.name)).schema)

    def ship(self, spark: Any) -> None:
        """There are no functions to send to workers."""

    def ship_to(self, warehouse: Any) -> None:
        """There are no functions to send to workers."""


def packing(context: Any) -> Any:
    """Stand in for the packer of rows: rows stay rows."""

    def pack(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return rows

    pack.of_rows = True  # pyright: ignore[reportFunctionMemberAccess]
    return pack


def operator(context: Any) -> Any:
    """Stand in for the stateful operator: apply rows to states, and return a packet for each row."""
    spec = context.spec
    (key,), time, (value, *_) = spec.key, spec.time, spec.measurement

    def process(
        states: States, rows: list[dict[str, Any]], seeds: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        packets: list[dict[str, Any]] = []
        for seed in seeds:
            states[seed["key"]] = _state_of(seed)
        for seed in (row for row in rows if "mean" in row):
            held = seed["key"] in states
            if not held:
                states[seed["key"]] = _state_of(seed)
            kind = OutputPacket.KEYS_HELD if held else OutputPacket.KEYS_TAKEN
            packets.append(_packet(kind, seed["key"], 0, 0.0))
        measured = [row for row in rows if "mean" not in row]
        for row in sorted(measured, key=lambda one: (one[key], one[time])):
            at = micros(row[time])
            state = states.setdefault(row[key], {"at": -(2**62), "ids": []})
            used = _version_of_inputs(context)
            late = at <= state["at"]
            if not late:
                state["at"], state["ids"] = at, [*state["ids"], row[value]]
                if used is not None:
                    state["inputs"] = {**state.get("inputs", {}), str(row[value]): used}
            kind = OutputPacket.LATE if late else OutputPacket.ESTIMATES
            packets.append({**_packet(kind, row[key], at, row[value]), "inputs": used})
        return _in_files(context, packets)

    return process


def _version_of_inputs(context: Any) -> int | None:
    """Return the version of the inputs that this micro-batch was told to use, by the name of its packet."""
    path = context.model.warehouse.spark.sparkContext.getLocalProperty(PROPERTY)
    return None if path is None else int(path.removesuffix(".packet").rsplit("-", 2)[1])


class MemoryInputs(InputsTable):
    """`jobs.lineage.inputs_table.InputsTable`, of whose rows nothing is read but their version."""

    def load(self, kind: Any, version: int) -> Any:
        return None

    def packet(self, kind: Any, version: int) -> bytes:
        return str(version).encode()

    def joined(self, frame: Any, kind: Any, version: int) -> Any:
        return frame.withColumns({name: F.lit(1.0) for name in self.inputs.columns})


def micros(at: Any) -> int:
    """Return a time as microseconds since 1970."""
    return (at - F.EPOCH) // timedelta(microseconds=1)


def _packet(kind: OutputPacket, key: str, at: int, value: float) -> dict[str, Any]:
    return {"kind": kind.value, "rows": 1, "key": key, "at": at, "y": value, "inputs": None, "payload": None}


def _state_of(seed: dict[str, Any]) -> dict[str, Any]:
    return {"at": micros(seed["event_time"]), "ids": list(seed["mean"])}


class MemoryEstimateFiles(EstimateFiles):
    """`EstimateFiles` whose rows are those of this model; the operator puts them aside as the tasks write files."""

    @classmethod
    def of(cls, warehouse: Any, generation: Any, fmt: Any, corrects: bool) -> MemoryEstimateFiles:
        """Return the files of a generation's estimates."""
        table: Any = FileTable(warehouse, estimates(generation.model))
        rows: Any = None
        return cls(warehouse, generation, RangeWriter(warehouse, generation), table, ESTIMATES, rows)

    def begin(self, spark: Any, batch_id: int) -> None:
        """Make the table, and tell the operator which files to write."""
        self.warehouse.create(self.table.name, self.columns)
        self.attempt, self.table.tried = world.current().new_id(), False
        spark.sparkContext.setLocalProperty(FILES_PROPERTY, self._build_target(batch_id).encode())

    def remove_unnamed(self) -> None:
        """A file that no commit names is seen by nobody."""

    def reading(self, spark: Any, parts: Any) -> Any:
        """Return the rows of files as the other sinks take them."""
        return MemoryEstimates(spark, self.table.path, [one.file.path for one in parts])


class MemoryEstimates(NamedTuple):
    """`FileEstimates`: the estimates of a micro-batch, from the files of its table."""

    spark: Any
    folder: str
    names: list[str]

    def rows(self) -> Frame:
        """Return all rows but without their source range."""
        return Frame(self.spark, self._found(), parse_schema(ESTIMATES)).drop(SOURCE_RANGE)

    def read_last_rows(self, corrections: bool) -> Frame:
        """Return the last row of each key, without the columns of the micro-batch."""
        last = {row["key"]: row for row in self._found()}
        rows = Frame(self.spark, last.values(), parse_schema(ESTIMATES))
        return rows.select("key", "event_time", "y", "inputs", "flags")

    def _found(self) -> list[dict[str, Any]]:
        parts = world.current().parts
        return [row for name in self.names for row in parts[f"{self.folder}/{name}"].detail]


def _in_files(context: Any, packets: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put estimates aside as a file of their table, and return a packet that names it in their place."""
    told = context.model.warehouse.spark.sparkContext.getLocalProperty(FILES_PROPERTY)
    target, here = EstimateTarget.decode(told), world.current()
    mine = [one for one in packets if one["kind"] == OutputPacket.ESTIMATES.value]
    rows = [
        {
            "key": one["key"],
            "event_time": F.EPOCH + timedelta(microseconds=one["at"]),
            "y": one["y"],
            "inputs": one["inputs"],
            "flags": None,
            **target.constants,
        }
        for one in mine
    ]
    if not rows:
        return packets
    name = f"part-00000-{here.new_id()}"
    here.parts[f"{target.folder}/{name}"] = world.Stored(b"", here.clock.now(), tuple(rows))
    file = {**_packet(OutputPacket.ESTIMATES_FILE, "", 0, 0.0), "rows": len(rows)}
    file["payload"] = PartFile(name, 0, len(rows), 0, "{}").encode()
    return [file, *(one for one in packets if one not in mine)]


def refused_rows(packets: Frame, fmt: Any, model: str, generation: str, batch_id: int) -> Frame:
    """Return refused rows as rows of the quarantine, with the columns that `refused_rows` of the stream gives."""
    found = [
        {
            "model": model,
            "payload": json.dumps({"k": row["key"], "t": row["at"] // 1_000_000, "y": row["y"]}),
            "reason": REASONS[OutputPacket(row["kind"])],
            "source": f"measurements/{model}",
            "position": json.dumps({"generation": generation, "batch_id": batch_id}),
            "batch_id": batch_id,
            "generation": generation,
            "quarantined_at": F.current_timestamp().value({}),
        }
        for row in packets.rows
    ]
    schema = "model string, payload string, reason string, source string, position string, batch_id bigint, "
    return Frame(
        packets.sparkSession, found, parse_schema(schema + "generation string, quarantined_at timestamp")
    )


def final_states(rows: Frame, *rest: Any) -> Frame:
    """Filter all rows in batch: the last state of each key, as rows of a snapshot."""
    states: States = {}
    for row in sorted(rows.rows, key=lambda one: (one["k"], one["t"])):
        state = states.setdefault(row["k"], {"at": 0, "ids": []})
        state["at"], state["ids"] = micros(row["t"]), [*state["ids"], row["y"]]
    return state_frame(rows.sparkSession, states)


def state_frame(session: Any, states: States) -> Frame:
    """Return states as rows of a snapshot."""
    found = [
        {
            "key": key,
            "state_index": len(state["ids"]),
            "event_time": F.EPOCH + timedelta(microseconds=state["at"]),
            "mean": list(state["ids"]),
            "covariance": [],
            "log_likelihood": 0.0,
            "extras": {},
        }
        for key, state in sorted(states.items())
    ]
    return Frame(session, found, STATE_ROWS)


def states_at(model: Any, generation: Any, origin: Any, batch: int) -> Frame:
    """Read the states after a micro-batch from a checkpoint."""
    warehouse = model.warehouse
    found = state_frame(warehouse.spark, read_states(warehouse.path(generation.checkpoint), batch))
    found.frame = found  # type: ignore[attr-defined]  # as `StateRows.frame`
    return found


def initial_state(warehouse: Any, runtime: Any, manifest: Any, states: Any, routing: Any) -> Any:
    """Return a snapshot's states as the initial state of a query."""
    seeds = Frame(warehouse.spark, states.frame.rows, states.frame.schema)
    seeds.groupBy = lambda *names: seeds  # type: ignore[method-assign]
    return seeds


def write_states(warehouse: Any, manifest: Any, states: Any) -> Any:
    """Write a snapshot's state rows in the place of its former ones, in one commit."""
    warehouse.create(STATES, SNAPSHOTS, PARTITION)
    names = {"snapshot_id": manifest.snapshot_id, "model": manifest.model}
    given = {**names, "model_version": manifest.model_version}
    rows = [{**row, **given} for row in getattr(states, "frame", states).rows]
    mine = [[(name, "=", value) for name, value in names.items()]]
    version = warehouse.replace(Frame(warehouse.spark, rows, parse_schema(SNAPSHOTS)), STATES, mine)
    return CommittedStates(version, Measured(*measure_stored(warehouse, manifest, version)))


def read_stored_rows(warehouse: Any, manifest: Any, version: int) -> Any:
    """Return a snapshot's rows at a version of their table."""
    return SimpleNamespace(frame=read_rows(warehouse, manifest.snapshot_id, manifest.model, version))


def measure_stored(warehouse: Any, manifest: Any, version: int) -> Any:
    """Return what `measure` does, of a snapshot's rows at a version of their table."""
    rows: Any = read_rows(warehouse, manifest.snapshot_id, manifest.model, version)
    return measure(rows)


def measure(rows: Frame) -> tuple[int, str, int]:
    """Return the number of keys, a checksum that the order of rows does not change, and the number of rows."""
    names = ("key", "state_index", "event_time", "mean")
    texts = sorted(repr([row[name] for name in names]) for row in rows.rows)
    return (
        len(texts),
        f"{zlib.crc32(repr(texts).encode()):016x}",
        sum(row["state_index"] for row in rows.rows),
    )


def offered(warehouse: Any, runtime: Any, routing: Any) -> StreamFrame:
    """Return the states offered to a stream of this model and these parameters, as a stream."""
    table = create_new_keys_table(warehouse, runtime.spec.name)
    reader = warehouse.spark.readStream.format("delta").option("maxFilesPerTrigger", 1_000_000)
    rows: StreamFrame = reader.load(warehouse.path(table))
    mine = F.col("meaning") == hash_meaning(runtime.spec.fingerprint(), runtime.parameters)
    return rows.filter(mine).select(*STATE_ROWS.names)
