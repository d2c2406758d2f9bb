"""States of rules become rows, and the states of rules that have changed since; no Spark."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from jobs.downstream.rule_exports import build_rule_state_rows, compare_rules, parse_rule_state_rows
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding.packets import Records
from tests.jobs.downstream.test_rule_functions import BUILT_IN, CLIMBING, NEWEST, Bucket, racks, some_readings

WARM = {"name": "warm", "kind": "measured", "at_least": 99.0, "readings": 5}
SILENT = {"name": "silent", "kind": "silence", "after": "1h"}


def rules(*given: dict[str, Any]) -> Any:
    monitor = ModelSpec.model_validate(racks(*given)).monitor
    assert monitor is not None
    return monitor.rules


def moved(bucket: Bucket, former: list[dict[str, Any]], *now: dict[str, Any]) -> Bucket:
    """Return a bucket of other rules that has taken the states, through the rows of a table."""
    rows = build_rule_state_rows(bucket.plan, rules(*former), bucket.states)
    identity = {name: bucket.states.arrays[name] for name in ("route", "check")}
    other = Bucket(*now)
    changes = compare_rules(rules(*former), rules(*now))
    taken = parse_rule_state_rows(other.plan, rules(*now), changes, rows, identity)
    other.states = other.plan.layout.decode(other.plan.layout.encode(taken))
    return other


def test_unchanged_rules_continue_in_any_order_as_if_there_had_been_no_export() -> None:
    former, rows = [CLIMBING, WARM, NEWEST, SILENT], some_readings(5)
    whole, bucket = Bucket(*former), Bucket(*former)
    whole.take(*(array[:600] for array in rows))
    bucket.take(*(array[:600] for array in rows))
    later = [array[600:] for array in rows]
    expected = whole.take(*later)
    order = [NEWEST, SILENT, BUILT_IN, CLIMBING, WARM]  # and one more
    found = moved(bucket, former, *order).take(*later)
    place = {0: 3, 1: 4, 2: 0, 3: 1}
    changed = [(key, place[rule], *rest) for key, rule, *rest in expected]
    mine = [one for one in found if one[1] != 2]
    assert sorted(map(str, mine)) == sorted(map(str, changed)) and len(mine) > 100


def test_the_states_are_exact_also_integers_beyond_doubles_and_keys_without_readings() -> None:
    bucket = Bucket(CLIMBING, NEWEST)
    bucket.take(*(array[:300] for array in some_readings(6)))
    arrays = {name: np.array(array) for name, array in bucket.states.arrays.items()}
    arrays["climbing.run"][0] = 2**62 + 1
    arrays["time"][1] = np.iinfo(np.int64).min
    bucket.states = Records(arrays, bucket.states.text)
    after = moved(bucket, [CLIMBING, NEWEST], CLIMBING, NEWEST).states
    del arrays["last"]  # a function has no last reading of its own; `Bucket` gives it one
    for name, array in arrays.items():
        np.testing.assert_array_equal(after.arrays[name], array, err_msg=name)
    assert after.text is not None and bucket.states.text is not None
    assert after.text.to_pylist() == bucket.states.text.to_pylist()


def test_what_cannot_continue_begins_anew_and_is_told() -> None:
    former = [CLIMBING, WARM, NEWEST]
    wider = {**CLIMBING, "keeps": {**CLIMBING["keeps"], "last": "float64[2]", "more": "int64"}}
    lower = {**WARM, "at_least": 98.0}
    known = compare_rules(rules(*former), rules(wider, lower, BUILT_IN))
    assert known == (
        (CLIMBING["name"],),
        ("warm",),
        ("known",),
        ("newest",),
        ("climbing.last", "climbing.more"),
    )
    said = "\n".join(known.lines())
    assert "rules that differ: their alerts continue, their counts of readings begin again: warm" in said
    assert "fields that begin anew, as they are new or of another type: climbing.last, climbing.more" in said
    bucket = Bucket(*former)
    bucket.take(*(array[:600] for array in some_readings(7)))
    before, after = bucket.states.arrays, moved(bucket, former, wider, lower, BUILT_IN).states.arrays
    np.testing.assert_array_equal(after["climbing.run"], before["climbing.run"])
    assert after["climbing.last"].shape == (2, len(before["time"])) and np.isnan(after["climbing.last"]).all()
    assert not after["climbing.more"].any()
    np.testing.assert_array_equal(after["active"][1], before["active"][1])
    assert before["active"][1].any() and before["run"][1].any() and not after["run"][1].any()
    assert not after["active"][2].any() and (after["time"] == before["time"]).all()


def test_rows_are_lists_by_rule_and_field() -> None:
    bucket = Bucket(NEWEST, WARM)
    bucket.take(*(array[:50] for array in some_readings(8)))
    (first, *_) = pa.Table.from_batches(
        [build_rule_state_rows(bucket.plan, rules(NEWEST, WARM), bucket.states)]
    ).to_pylist()
    numbers, integers = dict(first["numbers"]), dict(first["integers"])
    assert set(numbers) == {"newest.newest", "warm.last"} and len(numbers["newest.newest"]) == 3
    assert set(integers) == {"warm.run", "warm.since", "warm.calm", "warm.active"}


@pytest.mark.parametrize("changed", [{"state": None, "kind": "nis"}, {"measurement": "other"}])
def test_a_rule_over_another_reading_begins_anew(changed: dict[str, Any]) -> None:
    (was,) = rules(WARM)
    (now,) = [was.model_copy(update=changed)]
    assert compare_rules([was], [now]).fresh == ("warm",)
