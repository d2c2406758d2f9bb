"""Retire a shadow generation; the live generation is not touched."""

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
    generation: Annotated[str | None, Option(help="A shadow; by default the only one.")] = None,
) -> Report:
    """Retire a shadow generation that must not take over. Idempotent.

    Raises:
        UserError: it is the live generation, there is no such shadow, or there are several.
    """
    from jobs.lineage import promotion
    from jobs.specs.loading import load_spec
    from jobs.storage.warehouse import Tables

    name = load_spec(model, settings.models).name
    retired, changed = promotion.retire(Tables(settings.warehouse), name, generation)
    name_and_version = f"generation {retired.generation} of version {retired.model_version}"
    lines = [f"{name_and_version} was retired before: nothing was changed"]
    if changed:
        later = f"`kalman-pipeline maintain --model {name}` removes its checkpoint when it is old enough"
        lines = [f"{name_and_version} is retired", later]
    return Report(
        lines,
        {
            "model": name,
            "generation": retired.generation,
            "model_version": retired.model_version,
            "retired": changed,
        },
    )


if __name__ == "__main__":
    run.main()
