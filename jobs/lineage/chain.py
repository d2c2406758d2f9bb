"""The lineage of the live estimates, from the generations of a model. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from jobs.supervision.driver_status import LIVE


class LineageSegment(NamedTuple):
    """A generation whose estimates count up to a micro-batch; None stands for all micro-batches."""

    generation: str
    last_batch: int | None


class Link(Protocol):
    """What of a generation makes the lineage: it continues right after `parent_batch` of its `parent`."""

    @property
    def generation(self) -> str: ...
    @property
    def status(self) -> str: ...
    @property
    def parent(self) -> str | None: ...
    @property
    def parent_batch(self) -> int | None: ...


def lineage_of(generations: Iterable[Link]) -> list[LineageSegment]:
    """Return the lineage of the live estimates, the live generation first; empty if no generation is live."""
    known = {one.generation: one for one in generations}
    at = next((one for one in known.values() if one.status == LIVE), None)
    last: int | None = None
    segments: list[LineageSegment] = []
    while at is not None and all(segment.generation != at.generation for segment in segments):
        segments.append(LineageSegment(at.generation, last))
        last = at.parent_batch
        at = None if at.parent is None else known.get(at.parent)
    return segments
