"""Count the rows between two places of a source, without reading them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from jobs.storage.measurements_table import is_history_commit
from jobs.storage.positions import FILES, VERSION
from jobs.storage.warehouse import Tables


def rows_between(
    warehouse: Tables,
    table: str,
    start: Mapping[str, int],
    end: Mapping[str, int],
    with_history: bool = True,
) -> int | None:
    """Return how many rows of a measurements table, or messages of a topic, are after `start` and up to `end`.

    None: a commit is gone from the table's log, or does not tell. with_history: count rows that are new keys' history.
    """
    if VERSION not in end:
        return sum(max(0, offset - start.get(number, 0)) for number, offset in end.items())
    log = warehouse.files(f"{table}/_delta_log")
    total = 0
    for version in range(start[VERSION] + 1, end[VERSION] + (2 if end.get(FILES) else 1)):
        content = log.read(f"{version:020d}.json")
        if content is None:
            return None
        first = start.get(FILES, 0) if version == start[VERSION] + 1 else 0
        last = end.get(FILES) if version == end[VERSION] + 1 else None
        counts = list(_counts(content, with_history))[first:last]
        if None in counts:
            return None
        total += sum(count or 0 for count in counts)
    return total


def _counts(content: bytes, with_history: bool) -> Iterator[int | None]:
    """Yield the number of rows of each file that a commit added, in the order in which a stream reads them."""
    actions = [json.loads(line) for line in content.splitlines()]
    if not with_history and any(is_history_commit(action.get("commitInfo", {})) for action in actions):
        return
    for action in actions:
        added = action.get("add")
        if added is not None and added["dataChange"]:
            yield json.loads(added.get("stats") or "{}").get("numRecords")
