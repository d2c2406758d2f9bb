"""Make a shadow generation the live one, and retire the one that was live, in one commit."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from jobs.core.command import Model, command
from jobs.core.report import Report
from jobs.core.settings import Settings


@command
def run(
    settings: Settings,
    model: Model,
    generation: Annotated[
        str | None, Option(help="A shadow; by default the newest.", show_default=False)
    ] = None,
    behind: Annotated[
        bool, Option("--behind", help="Promote the shadow even if it lags the live generation.")
    ] = False,
) -> Report:
    """Make a shadow generation the live one, in one commit. Idempotent.

    Raises:
        UserError: there is no such shadow, or it lags the live generation.
    """
    from jobs.lineage import promotion
    from jobs.spark.conf import short_command_conf
    from jobs.spark.session import spark_session
    from jobs.specs.loading import load_spec
    from jobs.warehouse.delta import Warehouse

    name = load_spec(model, settings.models).name
    warehouse = Warehouse(
        spark_session(settings, f"promote {name}", short_command_conf()), settings.warehouse
    )
    live, retired = promotion.promote(warehouse, name, generation, behind)
    lines = [f"generation {live.generation} of version {live.model_version} is live"]
    if retired is not None:
        lines.append(f"{retired.generation} of version {retired.model_version} is retired")
    return Report(
        lines,
        {
            "model": name,
            "generation": live.generation,
            "model_version": live.model_version,
            "retired": retired and retired.generation,
        },
    )


if __name__ == "__main__":
    run.main()
