"""Make a shadow generation the live one, and retire the former live generation, in one commit.

The two are compared first. Without --force no generation becomes live if it predicts worse, or if the comparison cannot
decide.
"""

from __future__ import annotations

from typing import Annotated, Any

from typer import Option

from jobs.core.command import Model, command
from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.report import Report
from jobs.core.settings import Settings


@command
def run(
    settings: Settings,
    model: Model,
    generation: Annotated[str | None, Option(help="A shadow; by default the newest.")] = None,
    behind: Annotated[
        bool, Option("--behind", help="Promote the shadow even if it lags the live generation.")
    ] = False,
    force: Annotated[
        bool,
        Option("--force", help="Promote the shadow without a comparison."),
    ] = False,
) -> Report:
    """Promote a shadow that compares well with the live generation, in one commit. Idempotent.

    Raises:
        UserError: there is no such shadow, it lags the live generation, or the comparison is not good.
    """
    from jobs.insight.comparison_page import compare
    from jobs.lineage import live_rows, promotion
    from jobs.lineage.generations import SHADOW
    from jobs.specs.loading import load_spec
    from jobs.storage.warehouse import Tables
    from jobs.upgrades.decision import format_comparison, format_refusal

    spec = load_spec(model, settings.models)
    name = spec.name
    tables = Tables(settings.warehouse)
    lines: list[str] = []
    compared: dict[str, Any] = {}
    shadow, beside = promotion.find_promotable(tables, name, generation, behind)
    if shadow.status == SHADOW and beside is not None and not force:
        comparison, page = compare(tables, spec, beside, shadow)
        if not comparison.good:
            raise UserError(format_refusal(comparison, shadow.generation, name, page), RUN_FAILED)
        lines += [*format_comparison(comparison), f"report: {page}"]
        compared = {"comparison": comparison.numbers, "answer": comparison.answer, "report": page}
    elif shadow.status == SHADOW and force:
        lines.append("forced: it was not compared")
    live, retired = promotion.promote(tables, name, shadow.generation, behind)
    live_rows.refresh_live_table(tables, name)
    lines.append(f"generation {live.generation} of version {live.model_version} is live")
    if retired is not None:
        lines.append(f"{retired.generation} of version {retired.model_version} is retired")
    return Report(
        lines,
        {
            "model": name,
            "generation": live.generation,
            "model_version": live.model_version,
            "retired": retired and retired.generation,
            **compared,
        },
    )


if __name__ == "__main__":
    run.main()
