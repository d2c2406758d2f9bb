"""Rules that a function decides: state, events, failures; however rows are divided, they give the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from jobs.core.errors import UserError
from jobs.downstream.rule_operator import (
    KIND,
    RulePlan,
    build_function_rules,
    build_rules,
    list_function_readings,
    update_bucket,
)
from jobs.downstream.rules import FAILED, Events
from jobs.lineage.compatibility import collect_row_rules
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding.packets import Records
from jobs.state.encoding.routing import compute_routes
from jobs.state.encoding.rows import RowFormat
from tests.jobs.downstream.test_monitor import RACKS
from tests.jobs.specs.test_spec import NILE, refused

CLIMBING: dict[str, Any] = {
    "name": "climbing",
    "kind": "function",
    "function": "tests.jobs.downstream.racks:climbing",
    "reads": ["measured.temperature", "nis"],
    "keeps": {"run": "int64", "since": "timestamp", "last": "float64", "active": "bool"},
    "parameters": {"limit": 100.0, "least": 3.0},
}
NEWEST: dict[str, Any] = {
    "name": "newest",
    "kind": "function",
    "function": "tests.jobs.downstream.racks:newest",
    "reads": ["measured.temperature"],
    "keeps": {"newest": "float64[3]"},
}
BUILT_IN = {"name": "known", "kind": "measured", "at_least": 100.0, "readings": 3, "rising": True}
Seen = tuple[str, int, bool, int, float, int, int]


def racks(*rules: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**RACKS, "outputs": {"measured": True}, "monitor": {"rules": [*rules]}, **more}


class Bucket:
    """The rules of a spec over the rows of one bucket, given in any portions."""

    def __init__(self, *rules: dict[str, Any]) -> None:
        spec = ModelSpec.model_validate(racks(*rules))
        assert spec.monitor is not None
        self.width = len(spec.monitor.rules) + len(list_function_readings(spec.monitor))
        fmt = RowFormat(KIND, "event_time", tuple(f"r{i}" for i in range(self.width)), ())
        self.plan = RulePlan(build_rules(spec.monitor), fmt, build_function_rules(spec, spec.monitor))
        self.states = self.plan.layout.empty()

    def take(self, route: Any, number: Any, time: Any, value: Any, clock: int = 0) -> list[Seen]:
        """Apply readings of the keys with these numbers; return the events."""
        arrays = {"route": route, "check": number, "time": time, "y": np.tile(value, (self.width, 1))}
        rows = Records(arrays, pa.array([f"k{one}" for one in number]))
        packet = self.plan.rows.layout.encode(rows)
        self.states, found = update_bucket(self.plan, self.states, [packet], clock)
        # As between two micro-batches.
        self.states = self.plan.layout.decode(self.plan.layout.encode(self.states))
        return self.listed(found)

    def listed(self, found: Events) -> list[Seen]:
        assert self.states.text is not None
        keys = self.states.text.take(pa.array(found.key)).to_pylist()
        return list(zip(keys, *(array.tolist() for array in found[1:]), strict=True))


def some_readings(seed: int, count: int = 1200, keys: int = 40) -> tuple[Any, Any, Any, Any]:
    """Return routes, numbers, times and readings of keys, each a random walk around the limit."""
    rng = np.random.default_rng(seed)
    routes = compute_routes(rng.integers(-(2**62), 2**62, keys))
    number = rng.integers(0, keys, count)
    value = 100.0 + rng.normal(0.5, 1.5, count) + np.sin(np.arange(count) / 90.0)
    value[rng.random(count) < 0.03] = np.nan
    return routes[number], number, np.arange(count, dtype=np.int64), value


@pytest.mark.parametrize("portion", [1200, 100, 7])
def test_a_function_gives_what_the_rule_of_the_same_meaning_gives(portion: int) -> None:
    rows = some_readings(1)
    bucket, events = Bucket(CLIMBING, BUILT_IN), []
    for start in range(0, 1200, portion):
        events += bucket.take(*(array[start : start + portion] for array in rows))
    ours = sorted((key, *rest) for key, rule, *rest in events if rule == 0)
    theirs = sorted((key, *rest) for key, rule, *rest in events if rule == 1)
    assert ours == theirs and len(ours) > 60 and {raised for _, raised, *_ in ours} == {True, False}


def test_the_state_and_the_events_do_not_depend_on_portions_or_failing_rows() -> None:
    route, number, time, value = some_readings(2)
    unlucky = np.zeros(len(value), bool)
    unlucky[[3, 4, 5, 700, 1199]] = True
    value = np.where(unlucky, 13.0, value)

    def run(portion: int, keep: Any) -> tuple[list[Seen], Records]:
        bucket, events = Bucket(NEWEST), []
        for start in range(0, len(value), portion):
            some = np.flatnonzero(keep[start : start + portion]) + start
            events += bucket.take(route[some], number[some], time[some], value[some])
        return sorted(events, key=lambda one: (one[3], one[0])), bucket.states

    whole, states = run(1200, np.ones(1200, bool))
    failed = [one for one in whole if one[-1] == FAILED]
    assert [one[3] for one in failed] == [3, 4, 5, 700, 1199]
    for portion in (600, 50, 3):
        events, after = run(portion, np.ones(1200, bool))
        assert str(events) == str(whole)  # as text, in which NaN equals itself
        for name in states.arrays:
            np.testing.assert_array_equal(after.arrays[name], states.arrays[name])
    # Exactly the failing rows are missing.
    others, after = run(1200, ~unlucky)
    assert str(others) == str([one for one in whole if one[-1] != FAILED]) and len(others) > 50
    np.testing.assert_array_equal(after.arrays["newest.newest"], states.arrays["newest.newest"])
    # By definition: the last three readings of each key that did not fail.
    assert states.text is not None
    for place, name in enumerate(states.text.to_pylist()):
        mine = value[(number == int(name[1:])) & ~unlucky][-3:]
        np.testing.assert_array_equal(states.arrays["newest.newest"][-len(mine) :, place], mine)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (0.0, "rule odd: .*racks:unfit must return a pair: the state by field, and the events or None"),
        (1.0, "returned the state without fields: its rule keeps count"),
        (2.0, r"returned state count of shape \(5,\), which must be \(4,\)"),
        (3.0, "returned state count of type float64, which does not fit int64"),
        (4.0, "returned an event of a row outside 0 to 199"),
        (5.0, "must return events as arrays by name, row and any of row, raised, value, since, readings"),
        (
            6.0,
            r"failed \(ZeroDivisionError: division by zero\), at more than 100 rows of a micro-batch: mend",
        ),
    ],
)
def test_a_broken_function_is_named_with_its_rule(how: float, said: str) -> None:
    rule = {
        **NEWEST,
        "name": "odd",
        "function": "tests.jobs.downstream.racks:unfit",
        "keeps": {"count": "int64"},
        "parameters": {"how": how},
    }
    with pytest.raises(UserError, match=said):
        Bucket(rule).take(*some_readings(3, count=200, keys=4))


def test_outputs_of_an_earlier_release_are_the_same_rules() -> None:
    """A micro-batch that an earlier release has left half-written is finished: new outputs are not in its rules."""
    plain = ModelSpec.model_validate(RACKS)
    assert collect_row_rules(plain)["outputs"] == {
        "covariance": "full",
        "innovation": False,
        "measured": False,
    }
    changed = plain.model_copy(update={"outputs": plain.outputs.model_copy(update={"control": True})})
    assert collect_row_rules(changed)["outputs"]["control"] is True


def test_earlier_definitions_stay() -> None:
    """A query of an earlier release continues: new fields at their defaults are no part of its name."""
    section = ModelSpec.model_validate(RACKS).monitor
    assert section is not None
    assert (section.definition("windows"), section.definition("rules")) == ("bee14d2f", "c423c1b4")
    changed = ModelSpec.model_validate(racks(CLIMBING)).monitor
    again = ModelSpec.model_validate(
        racks({**CLIMBING, "parameters": {"limit": 101.0, "least": 3.0}})
    ).monitor
    assert changed is not None and again is not None
    assert changed.definition("rules") != again.definition("rules")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"function": "racks"}, "monitor.rules[0].function: 'racks' does not name a function"),
        ({"reads": []}, "monitor.rules[0].reads: is empty"),
        (
            {"reads": ["mean"]},
            "'mean' is not a number of an estimate; choose from nis, log_likelihood, mean.level",
        ),
        ({"reads": ["measured.volume"]}, "needs the column measured beside the estimates; add outputs"),
        ({"keeps": {"run": "int32"}}, "monitor.rules[0].keeps.run: 'int32' is not a type of a field"),
        ({"at_least": 3.0}, "monitor.rules[0].at_least: is not for kind: function"),
        ({"kind": "nis", "at_least": 3.0}, "monitor.rules[0].function: is not for kind: nis"),
    ],
)
def test_an_unsound_rule_is_refused(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    rule = {"name": "a", "kind": "function", "function": "m:f", "reads": ["nis"], **changed}
    assert said in refused(tmp_path, {**NILE, "monitor": {"rules": [rule]}})


@pytest.mark.parametrize("portion", [1200, 90, 4])
def test_a_silent_key_begins_anew_and_leaves_the_state(portion: int) -> None:
    route, number, _, value = some_readings(5, keys=5)
    rng = np.random.default_rng(6)
    # Pauses of all keys, within the limit and beyond; from the middle on key 0 is silent.
    step = np.where(rng.random(1200) < 0.01, rng.choice([50, 80, 101, 400], 1200), 1)
    time = np.cumsum(step)
    silent = (number == 0) & (np.arange(1200) > 600)
    keep = np.flatnonzero(~silent)
    time = time * 1000
    bucket, events = Bucket({**NEWEST, "forget": "100ms"}), []
    for start in range(0, len(keep), portion):
        some = keep[start : start + portion]
        events += bucket.take(route[some], number[some], time[some], value[some], int(time[some].max()))
    found = sorted((key, at) for key, _, _, at, *_ in events)
    expected = []
    for one in range(5):
        window: list[float] = []
        last = None
        for at, now in zip(time[(number == one) & ~silent], value[(number == one) & ~silent], strict=True):
            if last is not None and at - last > 100_000:
                window = []
            window, last = [*window, now][-3:], at
            if len(window) == 3 and sum(window) > 306:
                expected.append((f"k{one}", int(at)))
    assert found == sorted(expected) and len(found) > 50
    one = np.flatnonzero(number == 1)[:1]  # the next micro-batch: a key with events stays until then
    bucket.take(route[one], number[one], time[-1:] + 1, value[one], int(time[-1]) + 1)
    assert bucket.states.text is not None
    assert sorted(bucket.states.text.to_pylist()) == ["k1", "k2", "k3", "k4"]
