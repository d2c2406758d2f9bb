"""Start or resume a model's stream: by itself the right one of the two, and never two drivers at once.

No live generation: one begins from the newest good snapshot, positioned exactly behind it. A live one: its checkpoint
goes on. `--adopt` begins a new generation from a snapshot and retires the old one. Killed at any moment, the next
start goes on from the last committed micro-batch; rows that were half written are not seen, none is lost or doubled.
"""

from __future__ import annotations

from jobs.core.report import Report
from jobs.core.settings import Settings
from jobs.core.signals import stop_signal
from jobs.core.times import AVAILABLE_NOW, trigger_seconds
from jobs.specs.loading import load_spec
from jobs.streaming.driver import Driver
from jobs.streaming.profiler import profiling
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.tables import need_measurements


def run(
    settings: Settings,
    model: str,
    trigger: str = AVAILABLE_NOW,
    adopt: str | None = None,
    generation: str | None = None,
    metrics_port: int | None = None,
    metrics_file: str | None = None,
    profile: bool = False,
) -> Report:
    """Start or resume the stream of a model and return when it ends.

    Args:
        settings: of the command.
        model: name or path of its spec.
        trigger: `available-now` (take in what is there, then end), or seconds between micro-batches (until SIGTERM).
        adopt: id of a snapshot from which a new generation is to begin.
        generation: drive this one, such as a shadow, instead of the live one.
        metrics_port: serve Prometheus metrics there while it runs.
        metrics_file: or write them to this file with each micro-batch.
        profile: report where the time of the micro-batches went.

    Raises:
        UserError: no snapshot to start from, another driver, a state that means something else, a failed query.
    """
    from jobs.lineage.leases import stream_lock
    from jobs.spark.conf import stream_conf
    from jobs.spark.session import spark_session

    spec = load_spec(model, settings.models, deep=True)
    seconds = trigger_seconds(trigger)
    with stream_lock(settings.warehouse, spec.name, generation), stop_signal() as stop:
        kafka = spec.speaks_to_kafka
        spark = spark_session(settings, f"stream {spec.name}", stream_conf(kafka), kafka)
        warehouse = Warehouse(spark, settings.warehouse)
        need_measurements(warehouse, spec.name)
        driver = Driver(settings, warehouse, spec, seconds, stop, metrics_port, metrics_file)
        with profiling(spark, profile):
            return driver.drive(adopt, generation)


if __name__ == "__main__":
    from jobs.cli import main

    main("stream")
