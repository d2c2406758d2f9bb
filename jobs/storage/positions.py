"""Positions in a model's measurements: how they are stored, ordered and found.

A position in the measurements table is a Delta version: it includes all rows up to and including that version. A
position in a Kafka topic is, for each partition, the offset of the first message that is not included.

Places in a source are finer than positions, because a micro-batch may end after some files of a version. In the
measurements table the place `{"version": 7}` includes all rows up to version 7. The place `{"version": 7, "files": 2}`
also includes the first two files of version 8. In a topic a place is, by partition, the offset of the first message
that is not included. The estimates table stores places as JSON.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from jobs.core.errors import UserError
from jobs.core.times import TimeParser
from jobs.storage.table_rows import EPOCH
from jobs.storage.warehouse import LogEntry, Tables

DELTA, KAFKA = "delta", "kafka"

Place = dict[str, int]
VERSION, FILES = "version", "files"
_IDENTITIES = ("table", "id", "topic", "topic_id")
"""Fields of a position that identify its source. If a field is absent, its value is unknown."""
FIRST_NUMERICS = 1
"""The numerics of the releases that did not record their numerics."""
_NUMERICS = "numerics"


class Cut(NamedTuple):
    """A position and an event time in microseconds: only rows before the time count, or all rows if the time is None.

    place: a position in a topic; messages at or after this position do not count.
    """

    version: int
    before: int | None
    place: dict[str, Any] | None = None


class Commit(NamedTuple):
    """One version of a measurements table, with the event times of its new rows; None if the version added no rows.

    known is False if another tool wrote the version, so that the event times of its rows are unknown.
    """

    version: int
    first: int | None
    last: int | None
    known: bool


def is_same_if_known(one: str | None, other: str | None) -> bool:
    """Return whether two ids are equal, or at least one of them is unknown."""
    return one is None or other is None or one == other


def parse_time(text: str, option: str) -> int:
    """Parse an ISO 8601 time from the command line into microseconds since 1970; a time without an offset is in UTC.

    Raises:
        UserError: the text is not a time.
    """
    value = TimeParser(None, UTC)(text)
    if value is None:
        raise UserError(f"{option}: '{text}' is not a time; write it as 2013-10-01 or 2013-10-01T00:00:00Z")
    return value


def check_version(warehouse: Tables, table: str, version: int | None) -> int:
    """Check that a version exists, and return it; for None return the latest version.

    Raises:
        UserError: the table has no such version.
    """
    latest = warehouse.latest_version(table)
    if version is None:
        return latest
    if not 0 <= version <= latest:
        raise UserError(f"--to-version {version}: {table} has versions 0 to {latest}")
    return version


def read_commits(warehouse: Tables, table: str) -> list[Commit]:
    """Return the versions of a measurements table, oldest first."""
    return [_commit(entry) for entry in reversed(warehouse.read_log_entries(table))]


def cut_at(warehouse: Tables, table: str, latest: int, before: int) -> Cut:
    """Find the position of "all rows before an event time".

    If the versions up to some version contain exactly the rows before the time, that version is the position, and a
    stream may start after it. Otherwise the position is the latest version, together with the event time as a limit. No
    stream can start from a snapshot at such a position, since the position does not identify the excluded rows.
    """
    exact = 0
    past = True
    for commit in read_commits(warehouse, table):
        if commit.version > latest:
            break
        if not commit.known:
            return Cut(latest, before)
        if commit.first is None or commit.last is None:
            exact = commit.version if past else exact
            continue
        if commit.last < before and past:
            exact = commit.version
        elif commit.first >= before:
            past = False
        else:
            return Cut(latest, before)
    return Cut(exact, None)


def to_datetime(micros: int | None) -> datetime | None:
    """Return microseconds since 1970 as a time in UTC, exact to the microsecond."""
    return None if micros is None else EPOCH + timedelta(microseconds=micros)


def to_micros(time: datetime) -> int:
    """Return a time as microseconds since 1970, exactly."""
    return (time - EPOCH) // timedelta(microseconds=1)


def build_delta_position(
    table: str, version: int, identity: str | None = None, commit: str | None = None
) -> dict[str, Any]:
    """Return a position in a measurements table in the form that manifests store.

    identity: the table's id, which changes if the table is recreated. commit: the id of the version's commit
    (`commit_mark`), which changes if the table is restored from a backup and new commits follow.
    """
    known = {"id": identity, "commit": commit}
    position = {"source": DELTA, "table": table, "version": version}
    return position | {name: value for name, value in known.items() if value is not None}


def build_topic_position(
    topic: str, offsets: Mapping[int, int], topic_id: str | None = None
) -> dict[str, Any]:
    """Return a position in a topic in the form that manifests store.

    Args:
        topic: name of the topic.
        offsets: offset of the first message that is not included, by partition.
        topic_id: the topic's id, which changes if the topic is deleted and made again.
    """
    position: dict[str, Any] = {
        "source": KAFKA,
        "topic": topic,
        "offsets": {str(number): offset for number, offset in sorted(offsets.items())},
    }
    return position if topic_id is None else {**position, "topic_id": topic_id}


def parse_offsets(position: Mapping[str, Any]) -> dict[int, int]:
    """Return the offsets in a position in a topic, by partition."""
    return {int(number): int(offset) for number, offset in position["offsets"].items()}


def is_reached(position: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return whether a position includes every row that another position includes.

    Positions in a topic are only partly ordered: `position` has reached `wanted` if each of its offsets has reached the
    offset in `wanted`. For some pairs of positions neither has reached the other. Positions in different tables or
    topics never reach each other. Neither do positions in a topic before and after the topic was made again. An unknown
    id matches any id.
    """
    return is_same_source(position, wanted) and includes(convert_position(position), convert_position(wanted))


def rank(position: Mapping[str, Any]) -> int:
    """Return a number that grows with the position within one source: the version, or the sum of all offsets.

    A position that has reached another position has a rank at least as high. The converse does not hold, so use
    `is_reached` to compare positions.
    """
    return rank_of(convert_position(position))


def describe(position: Mapping[str, Any]) -> str:
    """Return a description of a position in words."""
    if position["source"] != KAFKA:
        return f"measurements version {position['version']}"
    offsets = ", ".join(f"{number}:{offset}" for number, offset in parse_offsets(position).items())
    return f"topic {position['topic']} at {offsets or 'its start'}"


def convert_position(position: Mapping[str, Any]) -> Place:
    """Return a position in the form of a place."""
    if position["source"] == KAFKA:
        return {str(number): int(offset) for number, offset in position["offsets"].items()}
    return {VERSION: int(position["version"])}


def to_position(place: Mapping[str, int], like: Mapping[str, Any]) -> dict[str, Any]:
    """Return a place as a position in the source of `like`; the place must not be within a version."""
    if like["source"] == KAFKA:
        offsets = {int(number): offset for number, offset in place.items()}
        return build_topic_position(like["topic"], offsets, topic_id=like.get("topic_id"))
    # The commit's id in `like` is the id of another version's commit, so it is left out here.
    return build_delta_position(like["table"], place[VERSION], like.get("id"))


def convert_offset(offset: Mapping[str, Any]) -> Place:
    """Return the place that a checkpoint's offset stands for, in the measurements table or in a topic."""
    if "reservoirVersion" not in offset:
        ((_, offsets),) = offset.items()
        return {str(number): int(place) for number, place in offsets.items()}
    # The index is the index of the last included file; before the first file it is negative.
    files = max(0, int(offset["index"]) + 1)
    whole = {VERSION: int(offset["reservoirVersion"]) - 1}
    return {**whole, FILES: files} if files else whole


def rank_of(place: Mapping[str, int]) -> int:
    """Return the rank of a place, or of the last position before the place if the place is within a version."""
    return place[VERSION] if VERSION in place else sum(place.values())


def includes(place: Mapping[str, int], other: Mapping[str, int]) -> bool:
    """Return whether a place is at or after another place. For some pairs of places in a topic neither is."""
    if VERSION in place:
        return (place[VERSION], place.get(FILES, 0)) >= (other[VERSION], other.get(FILES, 0))
    return all(place.get(number, 0) >= offset for number, offset in other.items())


def find_furthest(places: Iterable[Place]) -> Place | None:
    """Return the earliest place that includes all given places, or None if no places are given."""
    found: Place | None = None
    for place in places:
        if found is None or VERSION in place:
            found = place if found is None or includes(place, found) else found
        else:
            found = {number: max(found.get(number, 0), place.get(number, 0)) for number in {**found, **place}}
    return found


def is_whole(place: Mapping[str, int]) -> bool:
    """Return whether a place is a position; a place within a version of the measurements table is not."""
    return not place.get(FILES)


def is_same_source(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two positions are in the same source, as far as the ids of their sources are known."""
    known = [name for name in _IDENTITIES if one.get(name) is not None and other.get(name) is not None]
    return one["source"] == other["source"] and all(one[name] == other[name] for name in known)


def find_landed_position(
    warehouse: Tables, table: str, topic: str, version: int | None = None
) -> dict[str, Any] | None:
    """Return the position up to which a version of the measurements has landed a topic; None if it never landed."""
    newest = find_newest_landing(warehouse, table, topic, version)
    if newest is None:
        return None
    return build_topic_position(topic, parse_offsets(newest), topic_id=newest.get("topic_id"))


def find_newest_landing(
    warehouse: Tables, table: str, topic: str, version: int | None = None
) -> dict[str, Any] | None:
    """Return the metadata of the last commit, up to a version, that landed rows of a topic, or None."""
    found = _list_landings(warehouse, table, topic)
    return next((one.detail for one in found if version is None or one.version <= version), None)


def find_first_topic_id(warehouse: Tables, table: str, topic: str) -> str | None:
    """Return the first topic id recorded by the landings of a topic; None if no landing recorded an id.

    Messages without an id belong to the topic with this id, because earlier releases landed messages without the id.
    """
    known = [one.detail for one in _list_landings(warehouse, table, topic) if "topic_id" in one.detail]
    return known[-1]["topic_id"] if known else None


def _list_landings(warehouse: Tables, table: str, topic: str) -> list[LogEntry]:
    """Return the commits that landed rows of a topic, newest first."""
    found = warehouse.read_log_entries(table)
    return [one for one in found if "offsets" in one.detail and one.detail.get("topic") == topic]


def _commit(entry: LogEntry) -> Commit:
    if "min_time" in entry.detail:
        return Commit(entry.version, entry.detail["min_time"], entry.detail["max_time"], True)
    changes = ("WRITE", "STREAMING UPDATE", "MERGE", "UPDATE", "DELETE")
    return Commit(entry.version, None, None, entry.operation not in changes)


def with_numerics(position: Mapping[str, Any], owner: str, numerics: int) -> dict[str, Any]:
    """Return a position of a generation or snapshot (`owner`) in its stored form, with the numerics of the filter.

    The numerics (`kalman.NUMERICS`) are stored in the position's JSON, because a driver of an earlier release could not
    read a new column. The JSON also names the owner of the numerics, because earlier releases copy a position, with all
    of its fields, from row to row.
    """
    return dict(position) if numerics == FIRST_NUMERICS else {**position, _NUMERICS: {owner: numerics}}


def split_numerics(stored: Mapping[str, Any], owner: str) -> tuple[dict[str, Any], int]:
    """Return a stored position without its numerics, and the numerics of the owner."""
    position = {name: value for name, value in stored.items() if name != _NUMERICS}
    return position, int(stored.get(_NUMERICS, {}).get(owner, FIRST_NUMERICS))


class CommitMark(NamedTuple):
    """Identity of a commit: its id, and the time when the commit was made (None if unknown).

    After a restore from a backup the same version number can mean another commit, although the table's id stays the
    same. Delta gives each commit an id in the first line of the commit's log file. If another tool wrote a commit
    without an id, a digest of the log file identifies the commit.
    """

    id: str
    at: datetime | None


def commit_mark(warehouse: Tables, table: str, version: int) -> CommitMark | None:
    """Return the identity of a version's commit; None if the commit is not yet in the log or no longer in the log."""
    info = warehouse.commit_info(table, version)
    if info is None:
        return None
    at = info.get("timestamp")
    when = datetime.fromtimestamp(at / 1000, UTC) if isinstance(at, int) else None
    if info.get("txnId"):
        return CommitMark(str(info["txnId"]), when)
    content = warehouse.read_commit(table, version)
    return None if content is None else CommitMark(f"sha256:{hashlib.sha256(content).hexdigest()}", when)


def commit_id(warehouse: Tables, table: str, version: int) -> str | None:
    """Return the id of a version's commit, or None if the log does not contain the commit."""
    mark = commit_mark(warehouse, table, version)
    return None if mark is None else mark.id


def is_in_table(warehouse: Tables, position: Mapping[str, Any]) -> bool:
    """Return whether a position belongs to the present table, as far as ids are known; True for a topic."""
    if position["source"] != DELTA:
        return True
    table, version = position["table"], int(position["version"])
    if version > warehouse.latest_version(table):
        return False
    stored = position.get("commit")
    return stored is None or commit_id(warehouse, table, version) in (None, stored)
