"""Change the layout of a stream's state: state partitions, blocks of keys, settings of the state store.

A generation's layout is fixed. So its state is exported, and a new generation of the same version, in the new layout,
continues from exactly the export. If no driver runs the stream, the new generation replaces the old one in one commit.
Otherwise it first reads the same rows in shadow, so that readers do not see time move backwards.
"""

from __future__ import annotations

from typing import NamedTuple

from jobs.core.errors import UserError
from jobs.lineage import compatibility, generations, start_point
from jobs.lineage.compatibility import HAND_OVER, Finding
from jobs.lineage.generations import LIVE, SHADOW, Generation
from jobs.lineage.model import DeployedModel
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.streaming.exporting import export
from jobs.supervision.driver_identity import DriverIdentity
from jobs.upgrades.blue_green import prove
from jobs.upgrades.context import REPARTITION, Outcome, UpgradeContext, find_shadow, report_replacement


class RequestedLayout(NamedTuple):
    """Wanted layout of a generation's state: the spec of the state, and the number of partitions.

    reasons: differences from the generation's present layout; empty if there are none.
    """

    spec: ModelSpec
    partitions: int
    reasons: list[str]


def repartition(context: UpgradeContext) -> Outcome:
    """Continue the live generation's state in a generation with the same version and the wanted layout."""
    live = context.live
    layout = _select_layout(context)
    if not layout.reasons:
        present = f"{live.generation} has {live.partitions} state partitions of {live.blocks} blocks"
        return [f"{present}, as wanted: nothing to do"], {
            "generation": live.generation,
            "promoted": False,
            "upgraded": False,
            "partitions": live.partitions,
            "blocks": live.blocks,
        }
    if context.dry_run:
        return [*layout.reasons, "dry run: nothing was written"], {"dry_run": True}
    if not context.drain and _has_driver(live):
        shadow = _find_or_make_shadow(context, layout)
        lines, data = prove(context, shadow)
        return [*layout.reasons, *lines], {**data, "partitions": shadow.partitions, "blocks": shadow.blocks}
    with context.exclusive(REPARTITION):
        new = _relayout(context, layout, LIVE)
    details = f"is live, with {new.partitions} state partitions of {new.blocks} blocks"
    lines, data = report_replacement(context, new, f"{details}, from snapshot {new.snapshot_id}")
    return [*layout.reasons, *lines], {**data, "partitions": new.partitions, "blocks": new.blocks}


def _select_layout(context: UpgradeContext) -> RequestedLayout:
    """Return the layout that the option or the spec requests; by default the number of partitions stays.

    Raises:
        UserError: option and spec request different numbers, or the spec changes the meaning of the state.
    """
    spec, live, option = context.model.spec, context.live, context.partitions
    of_spec = spec.stream.partitions
    if option is not None and of_spec is not None and option != of_spec:
        raise UserError(
            f"--partitions {option}: the spec of {spec.name} says stream.partitions: {of_spec}, which a new generation "
            f"would take: change it there"
        )
    built, findings = _compare_with_spec(context.model, live)
    number = option or of_spec or live.partitions
    reasons = [one.text for one in findings if one.verdict == HAND_OVER]
    if number != live.partitions and of_spec is None:
        reasons.append(f"{number} state partitions are wanted, and {live.generation} has {live.partitions}")
    return RequestedLayout(compatibility.select_spec(built.spec, spec), number, reasons)


def _has_driver(generation: Generation) -> bool:
    """Return whether a driver holds a generation's lease."""
    holder = DriverIdentity.parse(generation.owner)
    return holder is not None and holder.is_alive_after_waiting(generation.heartbeat)


def _find_or_make_shadow(context: UpgradeContext, layout: RequestedLayout) -> Generation:
    """Return the shadow of this repartitioning: from an earlier attempt with the same layout, or new."""

    def fits(shadow: Generation) -> bool:
        wanted = shadow.partitions == layout.partitions
        return wanted and not _needs_relayout(context.model.with_spec(layout.spec), shadow)

    return find_shadow(context, context.live.fingerprint, fits) or _relayout(context, layout, SHADOW)


def _relayout(context: UpgradeContext, layout: RequestedLayout, status: str) -> Generation:
    """Return a new generation in a layout, from an export of the live generation."""
    model, live = context.model.with_spec(layout.spec), context.live
    manifest, _ = export(model, live, on_progress=context.progress.note)
    return start_point.begin_exported(model, manifest, live, status, layout.partitions)


def _needs_relayout(model: DeployedModel[Warehouse], generation: Generation) -> bool:
    _, findings = _compare_with_spec(model, generation)
    return any(one.verdict == HAND_OVER for one in findings)


def _compare_with_spec(
    model: DeployedModel[Warehouse], generation: Generation
) -> tuple[compatibility.BuiltWith, list[Finding]]:
    """Return the properties that a generation was built with, and its differences from the spec.

    Raises:
        UserError: a difference is refused.
    """
    built = compatibility.describe_generation_build(
        model, generation, generations.read_origin_manifest(model.warehouse, generation)
    )
    deployed = compatibility.describe_deployment(model, built.settings)
    compatibility.check(built, deployed)
    return built, compatibility.find_differences(built, deployed)
