"""Which rows of a table of estimates count, as SQL: of corrected rows (`order.kind: replay`) the latest estimates."""

from __future__ import annotations

from collections.abc import Sequence

from jobs.storage.queries import quoted

_SAME = ("generation", "key", "event_time")


def counted_rows(table: str, columns: Sequence[str], where: str, has_corrections: bool) -> str:
    """Return the query of rows that no later micro-batch of their generation has corrected.

    Where a generation has any correction for a key and event time, only the rows of the latest micro-batch count.

    Args:
        table: the name of the estimates in queries.
        columns: of the rows.
        where: the condition of the rows to read.
        has_corrections: some rows may be corrections, by the column `correction`.
    """
    if not has_corrections:
        return f"SELECT {', '.join(map(quoted, columns))} FROM {table} WHERE {where}"
    same = ", ".join(_SAME)
    # The first side of a join is in memory: the corrected keys and times, which are few.
    return (
        f"SELECT {', '.join(f'r.{quoted(name)}' for name in columns)} FROM (SELECT {same}, max(batch_id) AS newest "
        f"FROM {table} WHERE {where} GROUP BY {same} HAVING bool_or(correction)) c "
        f"RIGHT JOIN (SELECT * FROM {table} WHERE {where}) r ON {' AND '.join(f'r.{one} = c.{one}' for one in _SAME)} "
        f"WHERE c.newest IS NULL OR r.batch_id = c.newest"
    )
