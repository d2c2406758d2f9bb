"""The targets of the benchmark: computed from one run's medians, and told as missed where they are."""

from __future__ import annotations

import json

from benchmarks.results import RESULTS, results_of
from benchmarks.run import names_of
from benchmarks.targets import TARGETS, lines, value_of
from benchmarks.workloads.work import ALL

BY_TEXT = {target.text: target for target in TARGETS}
TIMES = BY_TEXT["10,000 rows into 5 million keys, to 10,000 rows into 10 thousand keys, time"]
FLOOR = BY_TEXT["1,000 rows into 2 million keys, to an empty stateful micro-batch, time"]


def test_ratios_of_times_are_those_of_rates_turned_over() -> None:
    few = results_of("scale_10k", {"ours": [1000.0, 3000.0, 2000.0]}, {})
    many = results_of("scale_5000k", {"ours": [1000.0]}, {"peak_memory_bytes": 3_900_000_000})
    sparse = results_of("sparse_1k_of_2m", {"ours": [10.0], "floor": [16.0]}, {})
    document = {"results": [*few, *many, *sparse]}
    assert value_of(document, TIMES) == 2.0
    assert value_of(document, FLOOR) == 1.6
    assert lines(document)[2:] == [
        f"| {TIMES.text} | 2.00 | at most 1.50 | not reached |",
        f"| {FLOOR.text} | 1.60 | at most 1.40 | not reached |",
        "| memory of 5 million keys, GB | 3.9 | at most 4.0 | reached |",
    ]


def test_works_of_different_runs_are_not_compared() -> None:
    few = {**results_of("scale_10k", {"ours": [2000.0]}, {})[0], "measured_at": "then"}
    many = {**results_of("scale_5000k", {"ours": [1000.0]}, {})[0], "measured_at": "now"}
    assert value_of({"results": [few, many]}, TIMES) is None
    assert lines({"results": [few]}) == []


def test_every_target_is_of_a_work_that_is_measured() -> None:
    measured = set(names_of(quick=False))
    assert {target.work for target in TARGETS} | {TIMES.over} <= measured
    known = {one["work"] for one in json.loads((RESULTS / "latest.json").read_text())["results"]}
    assert known <= measured


def test_the_spec_of_every_work_is_taken() -> None:
    assert {work.spec.name for work in ALL} == {"trend", "wide", "imm", "unscented"}


def test_the_quick_run_holds_the_lines_for_delta_and_for_many_keys() -> None:
    quick = set(names_of(quick=True))
    held = {target.text for target in TARGETS if {target.work, target.over or target.work} <= quick}
    assert held == {
        "20k x 50 into Delta, to the limit into Delta",
        "20k x 5 into Delta, to the limit into Delta",
        TIMES.text,
        "memory of 5 million keys, GB",
    }
