"""Avro messages of any bytes are the right rows or quarantined rows: Spark's reader against one written here."""

from __future__ import annotations

import json
import math
import random
import struct
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from jobs.landing.messages import read_checked_messages
from jobs.specs.source import Source
from jobs.storage.quarantine import REASON
from tests.fuzz.damage import damaged
from tests.fuzz.judge import ANY, REJECT, Checked, compare, same
from tests.fuzz.rows import SPEC, good
from tests.jobs.support.avro import encoded_long, encoded_text

SCHEMA = {
    "type": "record",
    "name": "reading",
    "fields": [
        {"name": "id", "type": "string"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "x", "type": ["null", "double"]},
    ],
}
REGISTRY = b"\x00\x00\x00\x00\x07"
YEAR_1, YEAR_10000 = -62_135_596_800_000_000, 253_402_300_800_000_000
HOSTILE = [
    b"",
    b"\x00",
    b"\x02",
    b"\x01",  # a text of -1 bytes
    *(
        encoded_long(length) + b"abc"
        for length in (1 << 20, 1 << 28, (1 << 31) - 9, (1 << 31) - 1, 1 << 31, 1 << 62)
    ),
    b"\xff" * 10 + b"\x01",  # a number of eleven bytes
    b"\x02\xff" + b"\x00" * 2,  # no UTF-8
    b"\x02\xfe" + b"\x00" * 2,
    b"\x06\xed\xa0\x80" + b"\x00" * 2,  # half of a surrogate pair
    b"\x02a\x00\x04",  # a third branch of two
    b"\x02a\x00\x01",
    *(b"\x02a" + encoded_long(at) + b"\x00" for at in (-(1 << 63), (1 << 63) - 1, YEAR_1 - 1, YEAR_10000)),
    *(b"\x02a\x00\x02" + struct.pack("<d", x) for x in (math.nan, math.inf, -math.inf, 5e-324)),
    *(encoded_text(text) + b"\x00\x00" for text in ("", " ", "\x00", "a\x00", "\u202e", "x" * 100_000)),
]


def record(chance: random.Random) -> tuple[bytes, tuple[Any, ...]]:
    """Return a record and its row."""
    key, at, x = good(chance).right
    number = b"\x00" if chance.random() < 0.1 else b"\x02" + struct.pack("<d", x)
    return encoded_text(key) + encoded_long(at) + number, (key, at, x if number[0] else math.nan)


def decoded(value: bytes) -> Any:
    """Decode a record (specification 1.11, binary): its row, REJECT where it has none, ANY where a check decides."""
    try:
        length, value = whole(value)
        if not 0 <= length <= len(value):
            return REJECT
        key, value = value[:length].decode(), value[length:]
        at, value = whole(value)
        branch, value = whole(value)
        if branch not in (0, 1):
            return REJECT
        x = struct.unpack("<d", value[:8])[0] if branch else math.nan
    except (IndexError, UnicodeDecodeError, struct.error, OverflowError):
        return REJECT
    usual = (
        YEAR_1 <= at < YEAR_10000 and key.strip() and "\x00" not in key and (not branch or math.isfinite(x))
    )
    return (key, at, x) if usual else ANY


def whole(value: bytes) -> tuple[int, bytes]:
    """Decode a number of up to ten bytes, and return the bytes after it."""
    number = 0
    for place in range(10):
        number |= (value[place] & 0x7F) << 7 * place
        if value[place] < 0x80:
            number &= (1 << 64) - 1
            return (number >> 1) ^ -(number & 1), value[place + 1 :]
    raise OverflowError("a number of more than ten bytes")


@pytest.mark.spark
@pytest.mark.parametrize("framing", ["none", "confluent"])
def test_any_bytes_of_a_topic_are_rows_or_quarantined(spark: SparkSession, framing: str) -> None:
    chance = random.Random(len(framing))
    head = REGISTRY if framing == "confluent" else b""
    sent: list[bytes | None] = [head + one for one in HOSTILE]
    wanted = [decoded(one) for one in HOSTILE]
    for _ in range(1200):
        value, row = record(chance)
        assert same(row, decoded(value))
        if chance.random() < 0.6:
            value = damaged(value, chance)
        sent.append(head + value)
        wanted.append(decoded(value))
    if head:
        sent += [b"", head[:4], b"\x01" + head[1:] + value]
        wanted += [REJECT] * 3
    assert sum(one is REJECT for one in wanted) > 200
    source = Source.model_validate(
        {"kind": "kafka", "topic": "fuzz", "format": "avro", "framing": framing, "avro_schema": SCHEMA}
    )
    messages = spark.createDataFrame(
        [(value, None, 0, offset) for offset, value in enumerate(sent)],
        "value binary, key binary, partition int, offset bigint",
    )
    checked = read_checked_messages(messages.repartition(2), SPEC, source, {"id": "string"})
    rows = checked.select(REASON, "id", F.unix_micros("at").alias("at"), "x", "_payload", "_offset").collect()
    found = {row["_offset"]: row for row in rows}
    assert sorted(found) == list(range(len(sent))) and len(rows) == len(sent)  # none lost, none doubled
    assert all(json.loads(row["_payload"]) for row in rows if row[REASON] is not None)
    compare(wanted, [_as_checked(found[offset]) for offset in range(len(sent))])


def _as_checked(row: Any) -> Checked:
    if row[REASON] is not None:
        return Checked(None, row[REASON])
    return Checked((row["id"], row["at"], math.nan if row["x"] is None else row["x"]), None)
