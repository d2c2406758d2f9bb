"""Start or resume a model's stream, with at most one driver at a time.

Without a live generation, a new one starts from the newest good snapshot, at its exact position. A live generation
resumes from its checkpoint. `--adopt` starts a new generation from a snapshot and retires the old one. After a crash at
any moment the next start resumes after the last committed micro-batch; no row is lost, duplicated or visible
half-written.
"""

from __future__ import annotations

from typing import Annotated

from typer import Option

from jobs.core.command import Profile, Trigger, command
from jobs.core.errors import UserError
from jobs.core.processes import stop_signal
from jobs.core.report import Report
from jobs.core.settings import Settings
from jobs.core.times import AVAILABLE_NOW, trigger_seconds


@command
def run(
    settings: Settings,
    model: Annotated[
        list[str],
        Option(help="A model's name, or the path of its spec; several share one Spark application."),
    ],
    trigger: Trigger = AVAILABLE_NOW,
    adopt: Annotated[
        str | None, Option(help="Retire the live generation and start a new one from this snapshot.")
    ] = None,
    allow_missing_estimates: Annotated[
        bool,
        Option(
            "--allow-missing-estimates",
            help="With --adopt: accept that some rows before the snapshot have no live estimate.",
        ),
    ] = False,
    allow_missing_rows: Annotated[
        bool,
        Option(
            "--allow-missing-rows",
            help="Continue the states of a release before 0.3.0 even if they lack rows.",
        ),
    ] = False,
    generation: Annotated[
        str | None, Option(help="Drive this generation, such as a shadow, not the live one.")
    ] = None,
    metrics_port: Annotated[
        int | None, Option(min=1, max=65535, help="Serve Prometheus metrics on this port.")
    ] = None,
    metrics_host: Annotated[
        str, Option(help="Address for --metrics-port; 0.0.0.0: every address of this machine.")
    ] = "127.0.0.1",
    metrics_file: Annotated[
        str | None, Option(help="Write Prometheus metrics to this file, for a collector.")
    ] = None,
    profile: Profile = False,
) -> Report:
    """Start the model's stream from its newest snapshot, or resume it where it stopped.

    Raises:
        UserError: no snapshot to start from, another driver, a state with another meaning, rows that would have
            no live estimate, a failed query.
    """
    from jobs.lineage.generations import DeployedModel
    from jobs.lineage.leases import stream_lock
    from jobs.spark.conf import stream_conf
    from jobs.spark.session import open_warehouse
    from jobs.state.kernel import load_checked_spec
    from jobs.storage.tables import need_measurements
    from jobs.streaming import several
    from jobs.streaming.driver import Driver
    from jobs.streaming.planned_rows import has_many_rows_ahead
    from jobs.streaming.profiler import profile_stream

    if len(model) > 1:
        if adopt is not None or generation is not None:
            raise UserError("--adopt and --generation name something of one model: give one --model")
        return several.run(settings, model, trigger, metrics_port, metrics_file, profile, metrics_host)
    spec = load_checked_spec(model[0], settings.models)
    seconds = trigger_seconds(trigger)
    with stream_lock(settings.warehouse, spec.name, generation), stop_signal() as stop:
        kafka = spec.speaks_to_kafka
        reads_all_of = spec.name if seconds is None and not kafka else None
        warehouse = open_warehouse(
            settings, f"stream {spec.name}", stream_conf(kafka), kafka, reads_all_of=reads_all_of
        )
        need_measurements(warehouse, spec.name)
        named = adopt is not None or generation is not None
        warehouse.moves_rows = kafka or named or seconds is not None or has_many_rows_ahead(warehouse, spec)
        driver = Driver(
            settings,
            DeployedModel(spec, warehouse),
            seconds,
            stop,
            metrics_port,
            metrics_file,
            None,
            metrics_host,
        )
        with profile_stream(warehouse, profile):
            return driver.drive(adopt, generation, allow_missing_estimates, allow_missing_rows)


if __name__ == "__main__":
    run.main()
