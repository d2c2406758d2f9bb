"""Put the stand-ins in the place of Spark, Delta, the store, threads and clocks, in every module of `jobs`.

A replacement is found by the object that a module holds (`F`, `DeltaTable`, `HadoopFiles`, `threading`, ...), not by
lists of modules, so that a module which begins to use one of them gets the stand-in, too.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from delta.tables import DeltaTable
from pyspark.sql import functions
from pyspark.sql.types import StructType

from jobs.batch import batch_filter, pretraining
from jobs.core import times
from jobs.landing import written_pieces
from jobs.lineage import inputs_table as pins
from jobs.lineage import leases
from jobs.lineage.inputs_table import InputsTable
from jobs.snapshots import model_runtime, state_rows
from jobs.snapshots.model_runtime import ModelRuntime
from jobs.spark import written_rows
from jobs.spark.conf import set_codegen_for
from jobs.spark.queries import plan_once
from jobs.state.encoding.rows import select_columns
from jobs.storage import object_files, part_files, table_rows
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.files import LocalFiles
from jobs.storage.object_files import ObjectFiles
from jobs.storage.warehouse import Tables
from jobs.streaming import exporting, query, refused_rows
from jobs.streaming.driver import Driver
from jobs.streaming.recorder import build_recorder
from jobs.streaming.written_files import EstimateFiles
from jobs.supervision import driver_log
from jobs.supervision.driver_log import DriverIdentity
from tests.protocol import data_path, memory_columns, memory_delta, memory_log, world
from tests.protocol.memory_files import MemoryFiles
from tests.protocol.memory_frame import parse_schema
from tests.protocol.memory_state import FORMER

LOADED = ("batch", "landing", "lineage", "snapshots", "spark", "state", "storage", "streaming", "upgrades")
"""Rooms whose modules are loaded before the replacement, so that none is missed; the actors import `insight`."""


class Event:
    """`threading.Event` in simulated time."""

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        thread = world.current().thread
        if thread is None or self._set:
            return self._set
        return thread.wait(self.is_set, timeout)


class Thread:
    """`threading.Thread` as a coroutine of its process."""

    def __init__(self, target: Callable[[], Any], name: str = "thread", daemon: bool = False) -> None:
        self._build_target, self.name, self._thread = target, name, None

    def start(self) -> None:
        running = world.current().thread
        if running is not None:
            self._thread = running.scheduler.thread(running.process, self.name, self._build_target)

    def join(self, timeout: float | None = None) -> None:
        thread, other = world.current().thread, self._thread
        if thread is not None and other is not None:
            thread.wait(lambda: other.done, timeout)

    def is_alive(self) -> bool:
        return self._thread is not None and not self._thread.done


def _sleep(seconds: float) -> None:
    thread = world.current().thread
    if thread is None:
        world.current().clock.seconds += seconds
    else:
        thread.wait(lambda: False, seconds)


def _machine() -> str:
    thread = world.current().thread
    return "host-setup" if thread is None else thread.process.host


def _started_at(pid: int) -> float | None:
    scheduler = world.current().scheduler
    known = [] if scheduler is None else scheduler.processes
    return next((float(one.pid) for one in known if one.pid == pid and not one.ended), None)


def _this_process(jvm: int) -> DriverIdentity:
    thread = world.current().thread
    pid = 1 if thread is None else thread.process.pid
    return DriverIdentity(_machine(), pid, float(pid), pid, float(pid), world.current().new_id())


@contextlib.contextmanager
def _recording(*arguments: Any) -> Iterator[Any]:
    yield SimpleNamespace(problem=None)


_real_has_format_1 = Checkpoint.has_states_of_format_1


def _has_states_of_format_1(checkpoint: Checkpoint) -> bool:
    return not FORMER.get() and _real_has_format_1(checkpoint)


def _replacements() -> list[tuple[Any, Any]]:
    now = SimpleNamespace(
        monotonic=lambda: world.current().clock.monotonic(),
        time=lambda: world.current().clock.monotonic(),
        sleep=_sleep,
    )
    chance = SimpleNamespace(uniform=lambda least, most: most)
    ids = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=world.current().new_id()))
    return [
        (functions, memory_columns),
        (DeltaTable, memory_delta.DeltaTable),
        (ObjectFiles, MemoryFiles),
        (object_files.ensure_probed, lambda root: None),
        (table_rows.open_log, memory_log.open_log),
        (table_rows.read_small, memory_log.read_small),
        (table_rows.list_live_files, memory_log.live_files),
        (written_rows.write_rows, memory_log.write_rows),
        (part_files.PartWriter, memory_log.MemoryPartWriter),
        (written_pieces._draw_ids, lambda count: [world.current().new_id() for _ in range(count)]),
        (threading, SimpleNamespace(Event=Event, Thread=Thread)),
        (time, now),
        (random, chance),
        (uuid, ids),
        (driver_log.read_machine_name, _machine),
        (driver_log.read_start_time, _started_at),
        (times.now, lambda: world.current().clock.now()),
        (build_recorder, _recording),
        (ModelRuntime, data_path.MemoryRuntime),
        (select_columns, lambda frame, rows: frame),
        (query._build_packer, data_path.packing),
        (query.build_operator, data_path.operator),
        (model_runtime.build_initial_state, data_path.initial_state),
        (model_runtime.read_offered_states, data_path.offered),
        (state_rows.write_states, data_path.write_states),
        (state_rows.read_stored_rows, data_path.read_stored_rows),
        (state_rows.measure_stored, data_path.measure_stored),
        (EstimateFiles, data_path.MemoryEstimateFiles),
        (exporting.read_states, data_path.states_at),
        (set_codegen_for, lambda session, rows: None),
        (plan_once, lambda session, rows: rows),
        (
            pins._open_pins,
            lambda warehouse, generation: MemoryFiles(f"{warehouse.root}/{generation.checkpoint}/inputs"),
        ),
        (LocalFiles, MemoryFiles),
        (InputsTable, data_path.MemoryInputs),
        (refused_rows.build_refused_rows, data_path.refused_rows),
        (batch_filter.build_batch, lambda runtime: SimpleNamespace(rows=runtime.rows)),
        (batch_filter.pack_buckets, lambda frame, rows, count: frame),
        (pretraining.pack_history, lambda spec, rows, batch, count, again: rows.frame),
        (batch_filter.compute_final_states, data_path.final_states),
        (leases.stream_lock, lambda *arguments, **options: contextlib.nullcontext()),
    ]


def _modules() -> list[Any]:
    for room in LOADED:
        package = importlib.import_module(f"jobs.{room}")
        for one in pkgutil.walk_packages(package.__path__, f"jobs.{room}."):
            importlib.import_module(one.name)
    return [module for name, module in sys.modules.items() if name.startswith("jobs.")]


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """Replace Spark, Delta, the store, threads and clocks in all modules of `jobs` that hold them."""
    instead = {id(old): new for old, new in _replacements()}
    with contextlib.ExitStack() as stack:
        for module in _modules():
            for name, value in list(vars(module).items()):
                if id(value) in instead:
                    stack.enter_context(mock.patch.object(module, name, instead[id(value)]))
        stack.enter_context(mock.patch.object(DriverIdentity, "identify_process", _this_process))
        stack.enter_context(mock.patch.object(StructType, "fromDDL", parse_schema))
        stack.enter_context(mock.patch.object(Checkpoint, "has_states_of_format_1", _has_states_of_format_1))
        stack.enter_context(mock.patch.object(Tables, "rows", memory_log.rows))
        stack.enter_context(mock.patch.object(Tables, "has_rows", memory_log.has_rows))
        stack.enter_context(mock.patch.object(Tables, "read_log_entries", memory_log.log_entries))
        stack.enter_context(mock.patch.object(Tables, "create", memory_log.create_table))
        stack.enter_context(mock.patch.object(Tables, "transactions", memory_log.transactions))
        # What is kept for other tools' readers alone, and repeats what the generations say.
        for name in ("_tell_readers", "_comment_estimates"):
            stack.enter_context(mock.patch.object(Driver, name, lambda driver: None))
        yield
