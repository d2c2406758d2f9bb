"""Places in a source, finer than positions: a micro-batch may end after some files of a version. Pure.

In the measurements table a place is `{"version": 7}`, all of version 7 and what came before it, or
`{"version": 7, "files": 2}`, the first two files of version 8, too. In a topic it is the offset of the first message
that is not included, by partition. The estimates table keeps places as JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jobs.storage.positions import KAFKA, delta_position, topic_position

Place = dict[str, int]

VERSION, FILES = "version", "files"
_IDENTITIES = ("table", "id", "topic", "topic_id")
"""Fields of a position that name its source; one that is absent is unknown."""


def of_position(position: Mapping[str, Any]) -> Place:
    """Return the place of a position."""
    if position["source"] == KAFKA:
        return {str(number): int(offset) for number, offset in position["offsets"].items()}
    return {VERSION: int(position["version"])}


def to_position(place: Mapping[str, int], like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the position of a place that is whole, in the source of another position."""
    if like["source"] == KAFKA:
        offsets = {int(number): offset for number, offset in place.items()}
        return topic_position(like["topic"], offsets, topic_id=like.get("topic_id"))
    return delta_position(like["table"], place[VERSION], like.get("id"))


def of_offset(offset: Mapping[str, Any]) -> Place:
    """Return the place of an offset in a checkpoint, of the Delta source or of a topic."""
    if "reservoirVersion" not in offset:
        ((_, offsets),) = offset.items()
        return {str(number): int(place) for number, place in offsets.items()}
    # The index is that of the last file that is included, and negative before the first.
    files = max(0, int(offset["index"]) + 1)
    whole = {VERSION: int(offset["reservoirVersion"]) - 1}
    return {**whole, FILES: files} if files else whole


def includes(place: Mapping[str, int], other: Mapping[str, int]) -> bool:
    """Tell if a place is at or after another; of two cuts of a topic's partitions neither need be."""
    if VERSION in place:
        return (place[VERSION], place.get(FILES, 0)) >= (other[VERSION], other.get(FILES, 0))
    return all(place.get(number, 0) >= offset for number, offset in other.items())


def furthest(places: Iterable[Place]) -> Place | None:
    """Return the place that includes all of these, or None if there are none."""
    found: Place | None = None
    for place in places:
        if found is None or VERSION in place:
            found = place if found is None or includes(place, found) else found
        else:
            found = {number: max(found.get(number, 0), place.get(number, 0)) for number in {**found, **place}}
    return found


def is_whole(place: Mapping[str, int]) -> bool:
    """Tell if a place is a position: in the measurements table it must not be within a version."""
    return not place.get(FILES)


def same_source(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Tell if two positions are in one source, as far as they name it, so that their places compare."""
    known = [name for name in _IDENTITIES if one.get(name) is not None and other.get(name) is not None]
    return one["source"] == other["source"] and all(one[name] == other[name] for name in known)
