"""Give a stream's state another layout: state partitions, blocks of keys, the state store's settings.

The layout is fixed for the life of a generation. So its state is exported, and a new generation of the same version,
laid out anew, goes on exactly behind the export. A stream that nobody drives is handed over in one commit. Of one that
is driven the new generation takes in the same rows in shadow first, so that readers do not see time go back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jobs.core.errors import UserError
from jobs.lineage import compatibility, generations, start_point
from jobs.lineage.compatibility import HAND_OVER, Finding
from jobs.lineage.generations import LIVE, SHADOW, Generation
from jobs.specs.model_spec import ModelSpec
from jobs.streaming.exporting import export
from jobs.supervision.driver_identity import DriverIdentity
from jobs.warehouse.delta import Warehouse


class Layout(NamedTuple):
    """What a generation's state is to be like: the spec that it means, and its number of partitions.

    reasons: how that differs from what the generation has; empty: it does not.
    """

    spec: ModelSpec
    partitions: int
    reasons: list[str]


def wanted(
    warehouse: Warehouse, spec: ModelSpec, generation: Generation, partitions: int | None = None
) -> Layout:
    """Return the layout that is asked for: by `partitions`, by the spec, else as many partitions as there are.

    Raises:
        UserError: the spec says another number, or its state means something else than the generation's.
    """
    said = spec.stream.partitions
    if partitions is not None and said is not None and partitions != said:
        raise UserError(
            f"--partitions {partitions}: the spec of {spec.name} says stream.partitions: {said}, and a new generation "
            f"would take that: change it there"
        )
    made, found = _judged(warehouse, spec, generation)
    number = partitions or said or generation.partitions
    reasons = [one.said for one in found if one.verdict == HAND_OVER]
    if number != generation.partitions and said is None:
        reasons.append(
            f"{number} state partitions are asked for, and {generation.generation} has {generation.partitions}"
        )
    return Layout(compatibility.spec_to_run(made.spec, spec), number, reasons)


def is_driven(generation: Generation) -> bool:
    """Tell if a driver holds a generation."""
    holder = DriverIdentity.parse(generation.owner)
    return holder is not None and holder.alive_after_waiting(generation.heartbeat)


def relayout(
    warehouse: Warehouse,
    live: Generation,
    layout: Layout,
    status: str = LIVE,
    told: Callable[[str], None] = lambda text: None,
) -> Generation:
    """Return a generation in the new layout that goes on behind the live one; a shadow that is there is taken up."""
    if status == SHADOW:
        for one in generations.all_of(warehouse, live.model):
            mine = (
                one.status == SHADOW and one.parent == live.generation and one.fingerprint == live.fingerprint
            )
            if mine and one.partitions == layout.partitions and not _waits(warehouse, layout.spec, one):
                return one
    manifest, _ = export(warehouse, live, told=told)
    return start_point.begin(warehouse, layout.spec, manifest, status, layout.partitions, behind=live)


def _waits(warehouse: Warehouse, spec: ModelSpec, generation: Generation) -> bool:
    _, found = _judged(warehouse, spec, generation)
    return any(one.verdict == HAND_OVER for one in found)


def _judged(
    warehouse: Warehouse, spec: ModelSpec, generation: Generation
) -> tuple[compatibility.BuiltWith, list[Finding]]:
    made = compatibility.generation_built_with(
        warehouse, generation, start_point.origin(warehouse, generation)
    )
    asked = compatibility.deployed(warehouse, spec, made.stored)
    compatibility.check(made, asked)
    return made, compatibility.differences(made, asked)
