"""Run the streams of several models in one Spark application, on one JVM with shared memory and task slots.

Each stream has a separate lease, checkpoint and SQL settings, as if it ran alone. Each stream also has a pool in
Spark's fair scheduler, so that a large micro-batch of one stream does not delay the other streams. If a stream fails,
is stopped or loses its lease, only this stream ends. If the process is killed, all streams end. Each stream resumes
from its checkpoint, in the same application or in another application.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from jobs.core.errors import UserError, describe_error, extract_first_line, print_note
from jobs.core.processes import stop_signal
from jobs.core.progress import Progress
from jobs.core.report import Report
from jobs.core.settings import Settings
from jobs.core.times import AVAILABLE_NOW, trigger_seconds
from jobs.lineage.generations import DeployedModel
from jobs.lineage.leases import stream_lock
from jobs.spark.conf import set_local_paths, stream_conf
from jobs.spark.session import open_warehouse
from jobs.spark.warehouse import Warehouse
from jobs.state.kernel import load_checked_spec
from jobs.storage.tables import need_measurements
from jobs.streaming.driver import Driver
from jobs.streaming.profiler import profile_stream
from jobs.supervision.metrics import LOOPBACK

POLL_SECONDS = 0.2
PLACE = "{model}"


def run(
    settings: Settings,
    models: Sequence[str],
    trigger: str = AVAILABLE_NOW,
    metrics_port: int | None = None,
    metrics_file: str | None = None,
    profile: bool = False,
    metrics_host: str = LOOPBACK,
) -> Report:
    """Start or resume the live streams of several models and return when all of them have ended.

    Args:
        settings: settings of the command.
        models: names of the models, or paths of their specs.
        trigger: `available-now`, or seconds between micro-batches (until SIGTERM).
        metrics_port: port of the Prometheus metrics of the first model; the second model gets the next port, and so on.
        metrics_file: file for the metrics instead of a port; `{model}` is replaced by the name of the model.
        profile: whether to report the time of each stream's micro-batches by step.
        metrics_host: address at which metrics are served.

    Raises:
        UserError: a model is named twice, or already has a driver; in both cases no stream starts.
    """
    specs = [load_checked_spec(model, settings.models) for model in models]
    names = [spec.name for spec in specs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"--model {twice[0]} is given twice: a stream has one driver")
    if metrics_file is not None and PLACE not in metrics_file:
        raise UserError(
            f"--metrics-file {metrics_file}: with several models it must contain {PLACE}, the model's name"
        )
    seconds = trigger_seconds(trigger)
    with ExitStack() as locks, stop_signal() as stop, _Display(settings.quiet) as display:
        held = [locks.enter_context(ExitStack()) for _ in names]
        for name, lock in zip(names, held, strict=True):
            lock.enter_context(stream_lock(settings.warehouse, name))
        kafka = any(spec.speaks_to_kafka for spec in specs)
        conf = {**stream_conf(kafka), "spark.scheduler.mode": "FAIR"}
        shared = open_warehouse(settings, f"streams {', '.join(names)}", conf, kafka)
        for name in names:
            need_measurements(shared, name)
        streams = []
        for number, (spec, lock) in enumerate(zip(specs, held, strict=True)):
            # Each stream changes SQL settings for its query, so each stream needs a separate Spark session.
            session = set_local_paths(shared.spark.newSession(), settings.warehouse)
            model = DeployedModel(spec, Warehouse(session, settings.warehouse))
            port = None if metrics_port is None else metrics_port + number
            file = None if metrics_file is None else metrics_file.replace(PLACE, spec.name)
            quiet = replace(settings, quiet=True)
            driver = Driver(quiet, model, seconds, threading.Event(), port, file, display.of, metrics_host)
            streams.append(_Stream(driver, lock, profile))
        _await_all(streams, stop)
    return _report(streams)


@dataclass
class _Stream:
    """One stream, and the thread that runs it until it ends, fails, or receives a stop request."""

    driver: Driver
    lock: ExitStack
    """The lock on the stream on this machine, which is released when the stream ends."""
    profile: bool
    report: Report | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        self.model = self.driver.model.name

    def work(self) -> None:
        spark = self.driver.model.warehouse.spark
        try:
            # The pool is a property of this thread; Spark copies it to the query's thread, which this thread starts.
            spark.sparkContext.setLocalProperty("spark.scheduler.pool", self.model)
            with profile_stream(self.driver.model.warehouse, self.profile):
                self.report = self.driver.drive()
        except Exception as problem:
            self.error = "\n".join(describe_error(problem)[0]) or extract_first_line(problem, 500)
            print_note(f"error: {self.error} (the other streams continue)")
        finally:
            self.lock.close()


class _Display(Progress):
    """Progress of all streams, shown in one line."""

    def __init__(self, quiet: bool) -> None:
        super().__init__("streams", None, quiet)
        self._notes: dict[str, str] = {}

    def of(self, model: str) -> Progress:
        """Return the progress of one stream, which is shown as a part of the line."""
        return _StreamProgress(model, self)

    def show(self, model: str, text: str) -> None:
        """Show the latest note of a stream."""
        self._notes[model] = text
        self.done += 1
        self.note("; ".join(f"{name}: {note}" for name, note in sorted(self._notes.items())))


class _StreamProgress(Progress):
    """The progress of one stream."""

    def __init__(self, title: str, whole: _Display) -> None:
        super().__init__(title, None, quiet=True)
        self._whole = whole

    def note(self, detail: str) -> None:
        """Show the stream's current activity."""
        self._whole.show(self.title, f"{self.done} {detail}" if self.done else detail)


def _await_all(streams: Sequence[_Stream], stop: threading.Event) -> None:
    """Run all streams until they end; a stop signal stops each stream after its micro-batch."""
    threads = [threading.Thread(target=one.work, name=f"stream {one.model}") for one in streams]
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and not stop.wait(POLL_SECONDS):
            pass
    finally:
        for one in streams:
            one.driver.stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def _report(streams: Sequence[_Stream]) -> Report:
    reports = [(one.model, one.report) for one in streams if one.report is not None]
    return Report(
        [f"{model}: {line}" for model, report in reports for line in report.lines],
        {
            "streams": {
                one.model: {"error": one.error} if one.report is None else one.report.data for one in streams
            }
        },
        tables=[table for _, report in reports for table in report.tables],
        errors=[one.error for one in streams if one.error is not None],
    )
