"""The kinds of packets that cross Spark, and the names of the state's variables."""

from __future__ import annotations

import numpy as np

OUTPUT = "kind int, rows bigint, payload binary"

SEED = "bucket int, payload binary"

STATE = "blocks"

STATES_BY_BLOCK = ("block", "states")

ESTIMATES, LATE, BAD_STATE = 0, 1, 2
"""Kinds of output packets: estimates of accepted rows; rows earlier than what their key's state already reflects; rows
of a key whose state is no number, which must not end the stream of all other keys."""

ASIDE = -1
"""The group of messages that do not fit; those of the filter's buckets are not negative."""

SET_ASIDE = 9
"""Kind of the operator's output packets that hold them."""

WITHOUT = -2
"""The group of rows whose keys have no inputs (`jobs.key_inputs.join`)."""

WITHOUT_INPUTS = 12
"""Kind of the operator's output packets that hold them."""

TAKEN, HELD = 14, 15
"""Kinds of output packets: how many offered keys were taken; how many the operator had already."""

TIMED = "bucket int, kind int, payload binary"

TICK, ROWS, KEYS, IDS = 0, 1, 2, 3
"""Kinds of packets: the newest event time of an Arrow batch, for every bucket; rows; states of new keys; ids."""

STATES = 0
"""Kind of the initial state's packets that hold states; those of `ROWS` hold waiting rows, those of `IDS` ids."""

WAIT, CLOCK, ENDED, RING, BASE, SEEN = "waiting", "clock", "ended", "ring", "base", "seen"

REMEMBERED = "remembered"

BEHIND, WAITING, DUPLICATE, DROPPED, EXPIRED = 3, 4, 5, 6, 7
"""Kinds of output packets beside those of `jobs.streaming.operators.processor`: rows behind the watermark; how many rows wait; rows that
repeat another, or how many such were dropped; last states of keys that ended."""

BEYOND, CORRECTION, MARK, RESENT = 8, 10, 11, 13
"""And, where late rows are replayed: rows older than the kept ones; estimates in the place of earlier ones. Of all: the
watermark, which stands in the place of the number of rows. Where rows have ids: those with the id of another."""

INNOVATION, MEASURED = "innovation", "measured"
"""Names of two extras of an estimate: the normalised innovations, and the row's own measurement."""

NEVER = np.iinfo(np.int64).min
"""The watermark before any row has come."""
