"""Run the streams of several models in one Spark application: one JVM, whose memory and slots they share.

Each stream is what `jobs.stream` makes of it alone, with a lease, a checkpoint and SQL settings of its own, and a pool
of its own in Spark's fair scheduler, so that a large micro-batch of one does not hold up the others. One that fails, is
stopped or loses its lease ends alone. The process going down takes all of them with it; each goes on from its own
checkpoint, in one application again or apart.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from jobs.core.errors import UserError, first_line
from jobs.core.progress import Progress
from jobs.core.report import Report
from jobs.core.settings import Settings
from jobs.core.signals import stop_signal
from jobs.core.times import AVAILABLE_NOW, trigger_seconds
from jobs.lineage.leases import stream_lock
from jobs.spark.conf import stream_conf
from jobs.spark.session import spark_session
from jobs.specs.model_spec import ModelSpec
from jobs.state.kernel import load_checked_spec
from jobs.streaming.driver import Driver
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.tables import need_measurements

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

POLL_SECONDS = 0.2
PLACE = "{model}"


def run(
    settings: Settings,
    models: Sequence[str],
    trigger: str = AVAILABLE_NOW,
    metrics_port: int | None = None,
    metrics_file: str | None = None,
    profile: bool = False,
) -> Report:
    """Start or resume the live streams of several models and return when all of them have ended.

    Args:
        settings: of the command.
        models: names or paths of their specs.
        trigger: `available-now`, or seconds between micro-batches (until SIGTERM).
        metrics_port: serve the first model's Prometheus metrics there, the next one's on the next port, and so on.
        metrics_file: or write them to this file; `{model}` in it stands for the model's name.
        profile: report, of each, where the time of the micro-batches went.

    Raises:
        UserError: a model is named twice, or one of them is driven already; no stream has been started then.
    """
    specs = [load_checked_spec(model, settings.models) for model in models]
    names = [spec.name for spec in specs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"--model {twice[0]} is given twice: a stream has one driver")
    if metrics_file is not None and PLACE not in metrics_file:
        raise UserError(
            f"--metrics-file {metrics_file}: with several models their name, {PLACE}, must be in it"
        )
    seconds = trigger_seconds(trigger)
    with ExitStack() as locks, stop_signal() as stop, _Shown(settings.quiet) as shown:
        held = [locks.enter_context(ExitStack()) for _ in names]
        for name, own in zip(names, held, strict=True):
            own.enter_context(stream_lock(settings.warehouse, name))
        kafka = any(spec.speaks_to_kafka for spec in specs)
        conf = {**stream_conf(kafka), "spark.scheduler.mode": "FAIR"}
        spark = spark_session(settings, f"streams {', '.join(names)}", conf, kafka)
        for name in names:
            need_measurements(Warehouse(spark, settings.warehouse), name)
        streams = []
        for number, spec in enumerate(specs):
            port = None if metrics_port is None else metrics_port + number
            file = None if metrics_file is None else metrics_file.replace(PLACE, spec.name)
            streams.append(
                _Stream(
                    spec, _driving(spark, settings, spec, seconds, port, file, shown, profile), held[number]
                )
            )
        _await_all(streams, stop)
    return _report(streams)


@dataclass
class _Stream:
    """One of the streams: it runs in a thread of its own until it ends, fails, or is told to stop."""

    spec: ModelSpec
    drive: Callable[[threading.Event], Report]
    lock: ExitStack
    """Holds the stream on this machine; let go when it ends, though the others go on."""
    stop: threading.Event = field(default_factory=threading.Event)
    report: Report | None = None
    error: str | None = None

    def work(self) -> None:
        try:
            self.report = self.drive(self.stop)
        except Exception as problem:
            self.error = problem.message if isinstance(problem, UserError) else first_line(problem, 500)
            print(f"error: {self.error} (the other streams go on)", file=sys.stderr, flush=True)
        finally:
            self.lock.close()


class _Shown(Progress):
    """The progress of all streams in one line."""

    def __init__(self, quiet: bool) -> None:
        super().__init__("streams", None, quiet)
        self._notes: dict[str, str] = {}

    def of(self, model: str) -> Progress:
        """Return what one stream tells its progress to."""
        return _Part(model, self)

    def tell(self, model: str, text: str) -> None:
        self._notes[model] = text
        self.done += 1
        self.note("; ".join(f"{name}: {note}" for name, note in sorted(self._notes.items())))


class _Part(Progress):
    """One stream's part of it."""

    def __init__(self, title: str, whole: _Shown) -> None:
        super().__init__(title, None, quiet=True)
        self._whole = whole

    def note(self, detail: str) -> None:
        """Say what is going on now."""
        self._whole.tell(self.title, f"{self.done} {detail}" if self.done else detail)


def _driving(
    spark: SparkSession,
    settings: Settings,
    spec: ModelSpec,
    seconds: float | None,
    port: int | None,
    file: str | None,
    shown: _Shown,
    profile: bool,
) -> Callable[[threading.Event], Report]:
    def drive(stop: threading.Event) -> Report:
        # A stream sets SQL settings for its query: in a session of its own they are no other's. The pool belongs to the
        # thread, and Spark hands it on to the thread of the query that it starts.
        session = spark.newSession()
        session.sparkContext.setLocalProperty("spark.scheduler.pool", spec.name)
        warehouse = Warehouse(session, settings.warehouse)
        quiet = replace(settings, quiet=True)
        driver = Driver(quiet, warehouse, spec, seconds, stop, port, file, shown.of, profile)
        return driver.drive()

    return drive


def _await_all(streams: Sequence[_Stream], stop: threading.Event) -> None:
    """Run all streams to their ends; a stop signal stops each of them after its micro-batch."""
    threads = [threading.Thread(target=one.work, name=f"stream {one.spec.name}") for one in streams]
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and not stop.wait(POLL_SECONDS):
            pass
    finally:
        for one in streams:
            one.stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def _report(streams: Sequence[_Stream]) -> Report:
    lines = [
        f"{one.spec.name}: {line}" for one in streams if one.report is not None for line in one.report.lines
    ]
    tables = [table for one in streams if one.report is not None for table in one.report.tables]
    return Report(
        lines,
        {
            "streams": {
                one.spec.name: {"error": one.error} if one.report is None else one.report.data
                for one in streams
            }
        },
        tables=tables,
        errors=[one.error for one in streams if one.error is not None],
    )
