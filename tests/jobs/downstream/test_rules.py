"""Rules over sequences: all keys at once give the same as each key alone, row by row, by the rule's definition."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.downstream.rules import Events, Rules, apply_rules, build_empty_states, raise_silence_alerts

INF = math.inf
Event = tuple[int, int, bool, int, float, int, int]


def rules_of(*rules: dict[str, Any]) -> Rules:
    plain = {
        "high": INF, "low": -INF, "clear_high": INF, "clear_low": -INF,
        "readings": 1, "clear_readings": 1, "rising": False, "after": -1,
    }  # fmt: skip
    kinds = {"readings": np.int64, "clear_readings": np.int64, "after": np.int64, "rising": bool}
    return Rules(
        **{
            name: np.array([{**plain, **one}[name] for one in rules], kinds.get(name, float))
            for name in plain
        }
    )


class OneKey:
    """One rule over the readings of one key, written directly."""

    def __init__(self, key: int, number: int, rules: Rules) -> None:
        self.key, self.number = key, number
        self.rule = {name: getattr(rules, name)[number].item() for name in rules._fields}
        self.run: list[tuple[int, float]] = []
        self.back = 0
        self.active = False
        self.last: int | None = None
        self.events: list[Event] = []

    def tell(self, raised: bool, time: int, value: float, since: int, readings: int) -> None:
        self.active = raised
        self.events.append((self.key, self.number, raised, time, value, since, readings))

    def look(self, clock: int) -> None:
        after = self.rule["after"]
        if self.last is not None and after >= 0 and not self.active and clock - self.last > after:
            self.tell(True, self.last + after, (clock - self.last) / 1e6, self.last, 0)

    def take(self, time: int, value: float) -> None:
        if self.last is not None and time < self.last:
            return
        self.look(time)
        if self.rule["after"] >= 0:
            if self.active:
                assert self.last is not None
                self.tell(False, time, (time - self.last) / 1e6, self.last, 0)
            self.last = time
            return
        self.last = time
        if math.isnan(value):
            return
        if not (value >= self.rule["high"] or value <= self.rule["low"]):
            self.run = []
        elif self.run and self.rule["rising"] and value <= self.run[-1][1]:
            self.run = [(time, value)]
        else:
            self.run.append((time, value))
        if self.active:
            within = self.rule["clear_low"] < value < self.rule["clear_high"]
            self.back = self.back + 1 if within else 0
            if self.back >= self.rule["clear_readings"]:
                self.tell(False, time, value, time, self.back)
                self.back = 0
        elif len(self.run) >= self.rule["readings"]:
            self.tell(True, time, value, self.run[0][0], len(self.run))


def listed(events: Events) -> list[Event]:
    return [tuple(one) for one in zip(*(array.tolist() for array in events), strict=True)]


RULES = rules_of(
    {"high": 2.0, "clear_high": 1.0, "readings": 3, "rising": True},
    {"high": 2.0, "clear_high": 2.0, "low": -2.0, "clear_low": -1.0, "readings": 2, "clear_readings": 2},
    {"after": 4},
    {"low": 0.0, "clear_low": 0.0},
)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.integers(0, 4), st.integers(0, 40), st.sampled_from([-3.0, -1, 0, 1, 2, 2.5, 3, 4, math.nan])
        ),
        max_size=80,
    ),
    cuts=st.lists(st.integers(0, 80), max_size=5),
)
def test_all_keys_at_once_give_the_same_as_each_key_alone(
    rows: list[tuple[int, int, float]], cuts: list[int]
) -> None:
    keys, count = 5, len(RULES.high)
    naive = [[OneKey(key, number, RULES) for number in range(count)] for key in range(keys)]
    states = build_empty_states(RULES, keys)
    edges = sorted({0, *(cut for cut in cuts if cut < len(rows)), len(rows)})
    clock = 0
    for start, stop in zip(edges, edges[1:], strict=False):
        batch = sorted(rows[start:stop], key=lambda row: row[:2])
        key, time, value = (np.array(column) for column in zip(*batch, strict=True))
        for one in naive:
            for alone in one:
                alone.events.clear()
        states, events = apply_rules(RULES, states, key, time, np.tile(value.astype(float), (count, 1)))
        clock = max(clock, int(time.max()))
        states, quiet = raise_silence_alerts(RULES, states, clock)
        for k, t, v in batch:
            for alone in naive[k]:
                alone.take(t, v)
        for one in naive:
            for alone in one:
                alone.look(clock)
        expected = [event for one in naive for alone in one for event in alone.events]
        assert sorted(listed(events) + listed(quiet), key=repr) == sorted(expected, key=repr)
        both = listed(events) + listed(quiet)
        for k in range(keys):  # the events of a key and rule are in order
            for number in range(count):
                mine = [event[2:4] for event in both if event[:2] == (k, number)]
                assert mine == [event[2:4] for event in expected if event[:2] == (k, number)]


def test_an_alert_that_is_raised_is_not_raised_again_before_it_is_cleared() -> None:
    rules = rules_of({"high": 10.0, "clear_high": 8.0, "readings": 2, "clear_readings": 2})
    value = np.array([11, 12, 9, 11, 12, 7, 9, 7, 7.5, 11, 11], float)
    time = np.arange(len(value))
    _, events = apply_rules(
        rules, build_empty_states(rules, 1), np.zeros(len(value), np.int64), time, value[None]
    )
    assert [(one[2], one[3]) for one in listed(events)] == [(True, 1), (False, 8), (True, 10)]


def test_given_states_are_not_changed() -> None:
    states = build_empty_states(RULES, 2)
    before = states.copy()
    apply_rules(RULES, states, np.array([0, 0]), np.array([1, 2]), np.full((4, 2), 3.0))
    assert all(np.array_equal(a, b) for a, b in zip(states, before, strict=True))


@pytest.mark.parametrize("rows", [0, 1])
def test_no_rows_give_no_events(rows: int) -> None:
    states, events = apply_rules(
        RULES, build_empty_states(RULES, 3)._replace(time=np.full(3, 9)), np.zeros(rows, np.int64),
        np.zeros(rows, np.int64), np.zeros((4, rows)),
    )  # fmt: skip
    assert listed(events) == [] and not states.run.any()
