"""Make the generation before the live one live again; it goes on from its own checkpoint."""

from __future__ import annotations

from jobs.positions import said
from jobs.report import Report
from jobs.settings import Settings
from jobs.spec import load_spec
from jobs.tables import Warehouse


def run(settings: Settings, model: str, to: str | None = None) -> Report:
    """Roll back. Running it again with the same generation changes nothing.

    Args:
        settings: of the command.
        model: name or path of its spec.
        to: a retired generation; by default the one that the live one came from.

    Raises:
        UserError: there is no generation to go back to.
    """
    from jobs import generations, switch
    from jobs.session import spark_session
    from jobs.spark_conf import glance_conf

    spec = load_spec(model, settings.models)
    warehouse = Warehouse(spark_session(settings, f"rollback {spec.name}", glance_conf()), settings.warehouse)
    live, retired = switch.roll_back(warehouse, spec.name, to)
    lines = [
        f"generation {live.generation} of version {live.model_version} is live again, at "
        f"{said(generations.position_of(warehouse, live))}: `kalman-pipeline stream --model {spec.name}` takes it on "
        f"from there"
    ]
    if retired is not None:
        lines.append(f"{retired.generation} of version {retired.model_version} is retired")
    return Report(
        lines,
        {
            "model": spec.name,
            "generation": live.generation,
            "model_version": live.model_version,
            "retired": retired and retired.generation,
        },
    )


if __name__ == "__main__":
    from jobs.cli import main

    main("rollback")
