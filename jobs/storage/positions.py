"""Positions in a model's measurements: their forms, order and search.

A position in the measurements table is a Delta version: it includes all rows up to and including that version. In a
Kafka topic a position is, for each partition, the offset of the first message that is not included.

Places in a source are finer than positions: a micro-batch may end after some files of a version. In the measurements
table the place `{"version": 7}` includes all rows up to version 7; `{"version": 7, "files": 2}` also includes the first
two files of version 8. In a topic it is the offset of the first message that is not included, by partition. The
estimates table keeps places as JSON.
"""

from __future__ import annotations

import hashlib
import json
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
"""Fields of a position that identify its source. An absent field is unknown."""
FIRST_NUMERICS = 1
"""The numerics of releases that did not record theirs."""
_NUMERICS = "numerics"


class Cut(NamedTuple):
    """A position and an event time (microseconds): only rows before the time count; None: no limit.

    place: a position in a topic that excludes messages landed after it.
    """

    version: int
    before: int | None
    place: dict[str, Any] | None = None


class Commit(NamedTuple):
    """One version of a measurements table, with the event times of its new rows; None if it added no rows.

    known is False where another tool wrote the version, so that its rows are unknown.
    """

    version: int
    first: int | None
    last: int | None
    known: bool


def is_same_if_known(one: str | None, other: str | None) -> bool:
    """Return whether two ids are equal, or either is unknown."""
    return one is None or other is None or one == other


def parse_time(text: str, option: str) -> int:
    """Parse an ISO 8601 time from the command line into microseconds since 1970; without an offset it is UTC.

    Raises:
        UserError: the text is not a time.
    """
    value = TimeParser(None, UTC)(text)
    if value is None:
        raise UserError(f"{option}: '{text}' is not a time; write it as 2013-10-01 or 2013-10-01T00:00:00Z")
    return value


def check_version(warehouse: Tables, table: str, version: int | None) -> int:
    """Return `version` after a check that it exists; if it is None, return the latest version.

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
    """Return a measurements table's versions, oldest first."""
    return [_commit(entry) for entry in reversed(warehouse.read_log_entries(table))]


def cut_at(warehouse: Tables, table: str, latest: int, before: int) -> Cut:
    """Find the position of "all rows before an event time".

    If the versions up to some version contain exactly the rows before the time, that version is the position, and a
    stream may start after it. Otherwise the position is the latest version with the event-time limit. No stream can
    start from such a snapshot, since its position does not identify the excluded rows.
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
    """Return the position as stored in manifests.

    identity: the table's id, which differs if the table is recreated. commit: the id of the version's commit
    (`commit_mark`), which differs if the table is restored from a backup and grows again.
    """
    known = {"id": identity, "commit": commit}
    position = {"source": DELTA, "table": table, "version": version}
    return position | {name: value for name, value in known.items() if value is not None}


def build_topic_position(
    topic: str, offsets: Mapping[int, int], topic_id: str | None = None
) -> dict[str, Any]:
    """Return the position in a topic as stored in manifests.

    Args:
        topic: name of the topic.
        offsets: offset of the next message, by partition.
        topic_id: the topic's id, which differs if the topic is deleted and made anew.
    """
    position: dict[str, Any] = {
        "source": KAFKA,
        "topic": topic,
        "offsets": {str(number): offset for number, offset in sorted(offsets.items())},
    }
    return position if topic_id is None else {**position, "topic_id": topic_id}


def parse_offsets(position: Mapping[str, Any]) -> dict[int, int]:
    """Return the offsets of a position in a topic, by partition."""
    return {int(number): int(offset) for number, offset in position["offsets"].items()}


def is_reached(position: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return whether a position includes every row that another position includes.

    Positions in a topic are only partly ordered: `position` has reached `wanted` if each of its offsets has. It may be
    that neither has reached the other. Positions in different tables or topics never reach each other, nor do positions
    in a topic before and after it was made anew. An unknown id matches any id.
    """
    return is_same_source(position, wanted) and includes(convert_position(position), convert_position(wanted))


def rank(position: Mapping[str, Any]) -> int:
    """Return a number that rises with a position in one source: the version, or the sum of all offsets.

    A position that has reached another has the higher number. The converse does not hold: use `reached`.
    """
    return rank_of(convert_position(position))


def name_position(position: Mapping[str, Any]) -> str:
    """Return an id of a position: the version, or the sum of all offsets and a digest of them."""
    if position["source"] != KAFKA:
        return str(position["version"])
    cut = json.dumps([position.get("topic_id"), sorted(parse_offsets(position).items())])
    return f"{rank(position)}-{hashlib.sha256(cut.encode()).hexdigest()[:10]}"


def describe(position: Mapping[str, Any]) -> str:
    """Describe a position in words."""
    if position["source"] != KAFKA:
        return f"measurements version {position['version']}"
    offsets = ", ".join(f"{number}:{offset}" for number, offset in parse_offsets(position).items())
    return f"topic {position['topic']} at {offsets or 'its start'}"


def convert_position(position: Mapping[str, Any]) -> Place:
    """Return the place at a position."""
    if position["source"] == KAFKA:
        return {str(number): int(offset) for number, offset in position["offsets"].items()}
    return {VERSION: int(position["version"])}


def to_position(place: Mapping[str, int], like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the position of a whole place, in the source of the position `like`."""
    if like["source"] == KAFKA:
        offsets = {int(number): offset for number, offset in place.items()}
        return build_topic_position(like["topic"], offsets, topic_id=like.get("topic_id"))
    # The commit's id in `like` is that of its own version, which this place need not be.
    return build_delta_position(like["table"], place[VERSION], like.get("id"))


def convert_offset(offset: Mapping[str, Any]) -> Place:
    """Return the place of a checkpoint's offset, in the Delta source or in a topic."""
    if "reservoirVersion" not in offset:
        ((_, offsets),) = offset.items()
        return {str(number): int(place) for number, place in offsets.items()}
    # The index is that of the last included file, and negative before the first file.
    files = max(0, int(offset["index"]) + 1)
    whole = {VERSION: int(offset["reservoirVersion"]) - 1}
    return {**whole, FILES: files} if files else whole


def rank_of(place: Mapping[str, int]) -> int:
    """Return the rank of a place's position, or of the last position before the place."""
    return place[VERSION] if VERSION in place else sum(place.values())


def includes(place: Mapping[str, int], other: Mapping[str, int]) -> bool:
    """Return whether a place is at or after another. Of two places in a topic it may be that neither is."""
    if VERSION in place:
        return (place[VERSION], place.get(FILES, 0)) >= (other[VERSION], other.get(FILES, 0))
    return all(place.get(number, 0) >= offset for number, offset in other.items())


def find_furthest(places: Iterable[Place]) -> Place | None:
    """Return the first place that includes all given places, or None if none are given."""
    found: Place | None = None
    for place in places:
        if found is None or VERSION in place:
            found = place if found is None or includes(place, found) else found
        else:
            found = {number: max(found.get(number, 0), place.get(number, 0)) for number in {**found, **place}}
    return found


def is_whole(place: Mapping[str, int]) -> bool:
    """Return whether a place is a position: in the measurements table, not within a version."""
    return not place.get(FILES)


def is_same_source(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two positions are in one source, as far as their ids are known."""
    known = [name for name in _IDENTITIES if one.get(name) is not None and other.get(name) is not None]
    return one["source"] == other["source"] and all(one[name] == other[name] for name in known)


def find_landed_position(
    warehouse: Tables, table: str, topic: str, version: int | None = None
) -> dict[str, Any] | None:
    """Return the position in a topic up to which a version of the measurements has landed it; None if never landed."""
    newest = find_newest_landing(warehouse, table, topic, version)
    if newest is None:
        return None
    return build_topic_position(topic, parse_offsets(newest), topic_id=newest.get("topic_id"))


def find_newest_landing(
    warehouse: Tables, table: str, topic: str, version: int | None = None
) -> dict[str, Any] | None:
    """Return the metadata of the last commit up to a version that landed rows of a topic, or None."""
    found = _list_landings(warehouse, table, topic)
    return next((one.detail for one in found if version is None or one.version <= version), None)


def find_first_topic_id(warehouse: Tables, table: str, topic: str) -> str | None:
    """Return the first recorded topic id of a topic's landings, or None if no landing has an id.

    Messages without an id belong to that topic, too: earlier releases landed them without recording the id.
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
    """Return the stored form of a position of a generation or snapshot (`owner`), with the numerics of its filter.

    The numerics (`kalman.NUMERICS`) are in the position's JSON, because a driver of an earlier release could not read a
    new column. The JSON names the owner of the numerics, because earlier releases copy a position from row to row
    together with all of its fields.
    """
    return dict(position) if numerics == FIRST_NUMERICS else {**position, _NUMERICS: {owner: numerics}}


def split_numerics(stored: Mapping[str, Any], owner: str) -> tuple[dict[str, Any], int]:
    """Return a stored position without the numerics, and the numerics of its owner."""
    position = {name: value for name, value in stored.items() if name != _NUMERICS}
    return position, int(stored.get(_NUMERICS, {}).get(owner, FIRST_NUMERICS))


class CommitMark(NamedTuple):
    """Identity of a commit: its id, and the time when it was made (None if unknown).

    After a restore from a backup the same version number can name another commit, while the table's id stays. Delta
    gives each commit an id in the first line of its log file. A commit of another tool without an id is identified by a
    digest of its log file.
    """

    id: str
    at: datetime | None


def commit_mark(warehouse: Tables, table: str, version: int) -> CommitMark | None:
    """Return the identity of a version's commit, or None if the log lacks it: not yet written, or removed."""
    info = warehouse.commit_info(table, version)
    if info is None:
        return None
    at = info.get("timestamp")
    when = datetime.fromtimestamp(at / 1000, UTC) if isinstance(at, int) else None
    if info.get("txnId"):
        return CommitMark(str(info["txnId"]), when)
    content = warehouse.files(f"{table}/_delta_log").read(f"{version:020d}.json")
    return None if content is None else CommitMark(f"sha256:{hashlib.sha256(content).hexdigest()}", when)


def commit_id(warehouse: Tables, table: str, version: int) -> str | None:
    """Return the id of a version's commit, or None if the log lacks the commit."""
    mark = commit_mark(warehouse, table, version)
    return None if mark is None else mark.id


def is_in_table(warehouse: Tables, position: Mapping[str, Any]) -> bool:
    """Return whether a position belongs to the table as it is now, as far as ids are known; True in a topic."""
    if position["source"] != DELTA:
        return True
    table, version = position["table"], int(position["version"])
    if version > warehouse.latest_version(table):
        return False
    stored = position.get("commit")
    return stored is None or commit_id(warehouse, table, version) in (None, stored)
