"""Replace the payloads of rejected rows by edited ones."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from jobs.core.errors import UserError
from jobs.core.input_files import open_input, path_of
from jobs.spark.warehouse import Warehouse
from jobs.storage.quarantine import DISCARDED, REPLAYED, REPLAYING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MOST_BYTES = 64 << 20
"""Bytes of a file of edited rows, which are in memory several times before they land."""


def read_edited(name: str) -> dict[str, str]:
    """Return the payloads by id of a file of JSON lines with `id` and `payload`.

    Raises:
        UserError: the file cannot be read, or a line is malformed or repeats an id.
    """
    path = path_of(name)
    try:
        with open_input(path) as stream:
            content = stream.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise UserError(
                f"{path}: has more than {MOST_BYTES:,} bytes, and its rows are replayed at once: split it between "
                "lines, and replay one part after another"
            )
        lines = content.decode("utf-8-sig").split("\n")  # texts may have other separators of lines
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    found: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            identity, payload = row["id"], row["payload"]
            if not isinstance(identity, str):
                raise TypeError(type(identity))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f'{path}:{number}: each line is a JSON object {{"id": ..., "payload": {{...}}}} as '
                f"`quarantine show --output` writes it"
            ) from error
        if identity in found:
            raise UserError(f"{path}:{number}: row {identity} appears twice; keep one of them")
        found[identity] = payload if isinstance(payload, str) else json.dumps(payload, ensure_ascii=False)
    return found


def with_payloads(warehouse: Warehouse, rows: DataFrame, edited: dict[str, str]) -> tuple[DataFrame, int]:
    """Return the held ones of the rows that have an edited payload, with it, and how many were replayed before.

    The latter are left as they are, so that a replay that was killed, or has ended, can be run again.

    Raises:
        UserError: an edited row is neither held nor replayed.
    """
    payloads = warehouse.spark.createDataFrame(list(edited.items()), "id string, payload string")
    joined = rows.drop("payload").join(F.broadcast(payloads), on="id", how="inner")
    found = {row["id"]: row["status"] for row in joined.select("id", "status").collect()}
    absent = [one for one in edited if found.get(one, DISCARDED) == DISCARDED]
    if absent:
        raise UserError(
            f"{len(absent):,} rows of the file are not held in quarantine, such as {absent[0]}: "
            f"they were discarded, or belong to another model; remove them from the file"
        )
    before = sum(status in (REPLAYING, REPLAYED) for status in found.values())
    return joined.filter(F.col("status").isNull()), before
