"""Score forecasts made from a model's live estimates against later measurements.

The verb runs one query that joins the estimates with themselves (`jobs.downstream.forecast_pairs`), with its own
checkpoint. It writes in Delta transactions (query, micro-batch), so that a restart after a crash is idempotent.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated

from typer import Option

from jobs.core.command import Model, Trigger, command
from jobs.core.errors import UserError
from jobs.core.report import Report
from jobs.core.settings import Settings
from jobs.core.times import AVAILABLE_NOW, trigger_seconds


@command
def run(
    settings: Settings,
    model: Model,
    trigger: Trigger = AVAILABLE_NOW,
    snapshot: Annotated[
        str | None,
        Option(
            help="Forecast with the learned parameters of this snapshot; `none`: with the spec's values. By default "
            "those of the snapshot from which each generation began."
        ),
    ] = None,
    history: Annotated[
        bool,
        Option("--history", help="Read estimates_history/MODEL, all at once, instead of the live estimates."),
    ] = False,
) -> Report:
    """Compare forecasts from the live estimates with later measurements, and score them.

    Raises:
        UserError: the spec has no such section or cannot be forecast, nothing is live, another driver runs the query,
            or the query failed.
    """
    from jobs.downstream.forecast_pairs import check_spec
    from jobs.downstream.forecast_skill import ForecastScorer
    from jobs.downstream.over_history import score_history
    from jobs.downstream.queries import SKILL
    from jobs.downstream.runner import start_exclusive_run
    from jobs.lineage.generations import DeployedModel
    from jobs.spark.conf import build_short_rows_conf
    from jobs.spark.session import spark_session
    from jobs.spark.warehouse import Warehouse
    from jobs.state.encoding.packets import MEASURED
    from jobs.state.kernel import load_checked_spec

    began = time.monotonic()
    spec, seconds = load_checked_spec(model, settings.models), trigger_seconds(trigger)
    if spec.forecast is None:
        raise UserError(
            f"{spec.source_path}: has no section `forecast`: add it with horizons (docs/monitoring.md)"
        )
    check_spec(spec, spec.forecast)
    if history:
        if snapshot is not None:
            raise UserError("--history forecasts with the parameters of each run: leave --snapshot out")
        spark = spark_session(settings, f"skill {spec.name}", build_short_rows_conf())
        found = score_history(DeployedModel(spec, Warehouse(spark, settings.warehouse)), spec.forecast)
        return replace(found, data={**found.data, "seconds": time.monotonic() - began})
    section = spec.forecast.with_snapshot(snapshot)
    spec = spec.model_copy(update={"forecast": section})
    with start_exclusive_run(settings, spec, SKILL, {MEASURED}) as (warehouse, stop, progress):
        scorer = ForecastScorer(warehouse, spec, seconds, stop, section)
        scorer.run(progress)
        return scorer.report(time.monotonic() - began)


if __name__ == "__main__":
    run.main()
