"""Comparing two versions: the statistics of each key, the decision, and the page; on plain numbers, without Spark."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import write_deltalake
from scipy.stats import chi2, norm

from jobs.core.report import convert_to_json
from jobs.insight.comparison import ComparisonContent, choose_examples, find_moved_keys
from jobs.insight.comparison_page import build_page
from jobs.insight.examples import EstimateLine, Example
from jobs.specs.migration import Upgrade
from jobs.specs.model_spec import ModelSpec
from jobs.state.kernel import find_projection
from jobs.storage.queries import open_queries
from jobs.upgrades.common_rows import SUMS, open_common_rows
from jobs.upgrades.decision import decide, format_comparison
from jobs.upgrades.statistics import Answer, Gain, VersionSums, judge_keys
from tests.demo.test_report import page_of
from tests.jobs.support.pipeline import random_walk_spec

DAY = 86_400 * 1_000_000
_WIDER: dict[str, Any] = {
    "states": ["level", "slope", "bias"],
    "process": {"kind": "explicit", "F": np.eye(3).tolist(), "Q": np.eye(3).tolist()},
    "observation": {"H": [[1.0, 0.0, 2.0], [0.0, 1.0, 0.0]], "R": [[1.0, 0.3], [0.3, 2.0]]},
    "initial": {"mean": [0.0, 0.0, 0.0], "covariance": np.eye(3).tolist()},
}


def sums(
    rng: np.random.Generator, count: int, rows: int, scale: float = 1.0, bias: float = 0.0
) -> VersionSums:
    """Return the sums of a filter whose errors are `scale` times as wide as predicted, with a bias."""
    n = rng.integers(rows // 2, rows, count).astype(float)
    white = [scale * rng.normal(size=int(k)) + bias for k in n]
    nis = np.array([float(w @ w) for w in white])
    return VersionSums(
        n, -0.5 * nis - n * np.log(2 * np.pi) / 2, nis, n, 0 * n, np.array([w.sum() for w in white]), n
    )


def seen(
    mean: float | None, half: float | None = None, rows: int = 45_000, keys: int = 300
) -> dict[str, Any]:
    """Return a gain per row with its interval of so many either way; without, the rows are too few for one."""
    if mean is None or half is None:
        return Gain(rows, keys, mean, None, None, None, None, 4 * rows)._asdict()
    return Gain(rows, keys, mean, mean - half, mean + half, half / 3.0 * rows**0.5, 8.0, 0)._asdict()


def content(**changes: Any) -> ComparisonContent:
    rng = np.random.default_rng(5)
    names = [f"key {number} <&> ü" for number in range(300)]
    keys = {"old": sums(rng, 300, 200, 1.25, 0.1), "new": sums(rng, 300, 200)}
    keys["new"] = keys["new"]._replace(rows=keys["old"].rows)
    course = {"old": sums(rng, 40, 900, 1.25, 0.1), "new": sums(rng, 40, 900)}
    gain = (keys["new"].ll - keys["old"].ll) / keys["old"].rows
    numbers = {
        "keys": 300,
        "rows": 45_000,
        "gain": seen(0.28, 0.01),
        "log_likelihood_a_row": {"old": -1.7, "new": -1.42},
        "nis_a_component": {"old": 1.56, "new": 1.002},
        "nis_outside": {"old": 0.93, "new": 0.047},
        "bias": {"old": 0.1, "new": 0.001},
        "bias_outside": {"old": 0.3, "new": 0.05},
        "flagged": {"old": 3, "new": 3},
        "keys_better": int((gain > 0).sum()),
        "keys_worse": int((gain < 0).sum()),
        **changes,
    }
    limits = Upgrade(nis_outside=0.1)
    time = 1_380_600_000_000_000 + np.arange(40) * DAY // 4
    level = 150 + np.cumsum(rng.normal(size=40))
    line = EstimateLine(time, level, np.full(40, 2.0), np.full(40, np.nan), np.zeros(40))
    measured = level + rng.normal(size=40)
    shown = Example("JFK <LAX>", "the most rows", "air_time", time, measured, [line, line])
    about = {
        "status": "live",
        "snapshot": "s1",
        "parent": None,
        "created_at": datetime(2026, 1, 1, tzinfo=UTC),
    }
    return ComparisonContent(
        "walk",
        "What wanders <and> more.",
        {"generation": "walk-g0001", "version": 1, **about},
        {"generation": "walk-g0002", "version": 2, **about},
        decide(numbers, limits),
        limits.model_dump(),
        time,
        course,
        names,
        keys,
        gain,
        [shown, shown._replace(key="rare", measured=np.full(40, np.nan))],
    )


def test_each_key_is_judged_by_its_chi_square_and_normal_bounds() -> None:
    rng = np.random.default_rng(3)
    count = 500
    frame: dict[str, Any] = {}
    for letter in "ab":
        degrees = rng.integers(0, 60, count).astype(float)
        parts = (degrees, rng.normal(size=count), rng.chisquare(np.maximum(degrees, 1)), degrees, 0 * degrees)
        for name, values in zip(
            SUMS, (*parts, rng.normal(size=count) * np.sqrt(degrees), degrees), strict=True
        ):
            frame[f"{letter}_{name}"] = values
    frame["a_innovation"] = np.full(count, np.nan)  # the old one was not asked for its innovations
    frame["a_components"] = np.full(count, np.nan)
    found = judge_keys(frame)
    for letter in "ab":
        for degrees, nis, outside in zip(
            *(found[f"{letter}_{name}"] for name in ("degrees", "nis", "nis_outside")), strict=True
        ):
            if degrees == 0:
                assert np.isnan(outside)
                continue
            # The sum of so many components' NIS is chi-square with so many degrees.
            p = chi2.cdf(nis, degrees)
            assert outside == (not 0.025 <= p <= 0.975)
    assert np.isnan(found["a_bias_outside"]).all()
    known = found["b_components"] > 0
    p = norm.cdf(found["b_innovation"][known] / np.sqrt(found["b_components"][known]))
    assert (found["b_bias_outside"][known] == ~((p >= 0.025) & (p <= 0.975))).all()
    some = found["a_rows"] > 0
    gain = (found["b_ll"] - found["a_ll"])[some] / found["a_rows"][some]
    np.testing.assert_array_equal(found["gain"][some], gain)


@pytest.mark.parametrize(
    ("changes", "limits", "message"),
    [
        ({}, {}, None),
        ({"rows": 0, "gain": seen(None, rows=0, keys=0)}, {}, "there is nothing to compare: no row has been"),
        ({"rows": 0, "gain": seen(None, rows=0, keys=0)}, {"rows": 0}, "there is nothing to compare"),
        (
            {"rows": 0, "gain": seen(None, rows=0, keys=0), "unequal_rows": 0},
            {},
            "there is nothing to compare",
        ),
        (
            {"gain": seen(0.1, 0.05, 4)},
            {"rows": 5},
            "not enough to tell: only 4 rows to compare, of 5 wanted",
        ),
        ({"gain": seen(0.1, 0.05, 90, 2)}, {"keys": 3}, "only 2 keys to compare, of 3 wanted (upgrade.keys)"),
        (
            {"gain": seen(-0.002249, None, 10, 1)},
            {"rows": 1, "loss": 0.0},
            "10 rows of 1 key span too little time",
        ),
        (
            {"gain": seen(-0.1, 0.05)},
            {},
            "it predicts worse: 0.1 less log-likelihood per row, between -0.15 and",
        ),
        ({"gain": seen(-0.1, 0.05)}, {"loss": 0.2}, None),
        ({"gain": seen(-0.1, 0.05)}, {"loss": 0.1}, "no number of rows would tell"),
        (
            {"gain": seen(0.0, 0.02)},
            {},
            "the gain per row is between -0.02 and +0.02, and a loss of 0.01 is allowed",
        ),
        ({"gain": seen(0.0, 0.009)}, {}, None),
        ({"gain": seen(0.0, 0.009)}, {"loss": 0.0}, "no number of rows would tell"),
        ({"gain": seen(0.0, 0.0)}, {"loss": 0.0}, None),
        ({"gain": seen(0.1, 0.05)}, {"loss": -0.02}, None),
        (
            {"gain": seen(0.1, 0.05)},
            {"loss": -0.07},
            "gains too little log-likelihood per row: between +0.05 and",
        ),
        ({"gain": seen(float("nan"))}, {}, "it predicts worse: nan less"),
        ({"gain": seen(float("-inf"))}, {}, "it predicts worse: inf less"),
        ({"flagged": {"old": 3, "new": 4}}, {}, "it flags 4 rows, the old one 3"),
        ({"keys_worse": 150}, {"keys_worse": 0.4}, "predicts 50.0% of the keys worse, 40.0% allowed"),
        ({"keys_worse": 150}, {"keys_worse": 0.5}, None),
        (
            {"nis_outside": {"old": 0, "new": 0.2}},
            {"nis_outside": 0.1},
            "the NIS of 20.0% of the keys is outside",
        ),
        ({"bias_outside": {"old": 0, "new": 0.2}}, {"bias_outside": 0.1}, "the mean innovation of 20.0%"),
        (
            {"bias_outside": {"old": 0, "new": None}},
            {"bias_outside": 0.1},
            "say `outputs: {innovation: true}`",
        ),
        ({"bias_outside": {"old": 0, "new": None}, "bias": {"old": None, "new": None}}, {}, None),
        ({"unequal_rows": 0}, {}, None),
        ({"unequal_rows": 2}, {}, "it is the same model, and 2 rows differ"),
    ],
)
def test_the_decision_follows_the_thresholds(changes: Any, limits: Any, message: str | None) -> None:
    numbers = {**content().comparison.numbers, **changes}
    found = decide(numbers, Upgrade(**limits))
    assert found.good == (message is None)
    assert format_comparison(found)[-1].startswith(
        "verdict: good" if message is None else "verdict: not good: "
    )
    if message is not None:
        assert message in found.reasons[0]


def test_the_page_is_complete_and_self_contained(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "report.html"
    path.write_text(build_page(content()), encoding="utf-8")
    found = page_of(path)
    shown = [attributes for tag, attributes in found.seen if tag == "img"]
    pictures = [attributes["src"] or "" for attributes in shown]
    assert len(pictures) == 2 + 3 + 2 + len(content().examples)
    assert all(attributes["class"] == "half" for attributes in shown), "as wide as a phone, not wider"
    assert all(source.startswith("data:image/png;base64,") for source in pictures)
    assert not any("href" in attributes or tag in ("script", "link") for tag, attributes in found.seen)
    for message in (
        "version 2 against 1",
        "45,000",
        "key 0 <&> ü"[:4],
        "walk-g0001",
        "What wanders <and> more.",
    ):
        assert message in found.text
    assert ("p", {"class": "verdict good"}) in found.seen
    assert (
        "The new version predicts better. Gain per row: +0.28 log-likelihood, 95 % interval from"
        in found.text
    )
    assert "+0.29, over 45,000 rows of 300 keys" in found.text
    path.write_text(build_page(content(gain=seen(-1.0, 0.1))), encoding="utf-8")
    found = page_of(path)
    assert ("p", {"class": "verdict bad"}) in found.seen and "it predicts worse: 1 less" in found.text
    path.write_text(build_page(content(gain=seen(0.001, 0.1))), encoding="utf-8")
    found = page_of(path)
    assert ("p", {"class": "verdict neutral"}) in found.seen
    assert "Not enough to tell whether the new version predicts better or worse; about " in found.text
    assert (
        "rows more would tell. Gain per row: +0.001 log-likelihood, 95 % interval from -0.099" in found.text
    )


def test_the_page_names_what_is_missing(tmp_path: Path) -> None:
    nothing = np.empty(0)
    none = {"old": None, "new": None}
    empty = content(
        keys=0, rows=0, gain=seen(None, rows=0, keys=0), log_likelihood_a_row=none,
        nis_a_component=none, nis_outside=none, bias=none,
        bias_outside=none, keys_better=0, keys_worse=0,
    )._replace(
        time=np.empty(0, np.int64), keys=[], gain=nothing, examples=[],
        by_time={side: VersionSums(*[nothing] * 7) for side in ("old", "new")},
        by_key={side: VersionSums(*[nothing] * 7) for side in ("old", "new")},
    )  # fmt: skip
    path = tmp_path / "report.html"
    path.write_text(build_page(empty), encoding="utf-8")
    assert "no row in common" in page_of(path).text
    silent = content(bias=none, bias_outside=none)
    path.write_text(build_page(silent), encoding="utf-8")
    assert "outputs: {innovation: true}" in page_of(path).text


def test_without_matplotlib_the_page_has_no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.insight.comparison_page.drawing", None)
    written = build_page(content())
    assert "Pictures need matplotlib" in written and "<img" not in written


def test_the_json_report_has_the_same_numbers() -> None:
    data = json.loads(json.dumps(convert_to_json(content().data()), allow_nan=False))
    assert data["good"] is True and data["numbers"]["rows"] == 45_000
    assert data["answer"] == Answer.BETTER == "better" and data["numbers"]["gain"]["low"] == 0.28 - 0.01
    assert data["thresholds"]["nis_outside"] == 0.1
    best, worst = ([one["gain_a_row"] for one in data[f"keys_{which}"]] for which in ("best", "worst"))
    assert best == sorted(best, reverse=True) and worst == sorted(worst) and best[0] > worst[0]
    assert len(data["over_time"]["middle_us"]) == len(data["over_time"]["new"]["ll"]) == 40


def test_the_examples_are_the_busiest_key_and_the_extreme_gains() -> None:
    gain, rows = np.array([0.5, -9.0, 2.0, -1.0]), np.array([900.0, 2.0, 40.0, 60.0])
    assert choose_examples(gain, rows) == [(0, "the most rows"), (2, "gains most"), (3, "loses most")]
    assert choose_examples(np.array([0.5]), np.array([3.0])) == [
        (0, "the most rows, gains most, gains least")
    ]
    assert choose_examples(np.empty(0), np.empty(0)) == []


def test_the_keys_that_move_most_are_found_in_deviations_of_the_old_version(tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    specs = [
        ModelSpec.model_validate(random_walk_spec()),
        ModelSpec.model_validate(random_walk_spec(**_WIDER)),
    ]
    weights = [np.array([1.0, 0.0]), np.array([1.0, 0.0, 2.0])]
    wanted: dict[str, float] = {}
    for number in range(7):
        newest = []
        for side, h in zip(("old", "new"), weights, strict=True):
            n = len(h)
            roots = rng.normal(size=(5, n, n))
            mean, P = rng.normal(size=(5, n)), roots @ roots.transpose(0, 2, 1)
            if (number, side) == (5, "old"):
                P[-1] = 0.0  # without a deviation any difference is infinite
            # Key 6 has a newest row that only one version has estimated, so it cannot be compared.
            time = (
                [DAY * one for one in range(5)]
                if (number, side) != (6, "new")
                else [DAY * one for one in range(1, 6)]
            )
            columns = {
                "key": pa.array([str(number)] * 5),
                "event_time": pa.array(time, pa.timestamp("us", "UTC")),
                "mean": pa.array(list(mean)),
                "covariance": pa.array([one.ravel() for one in P]),
                "generation": pa.array([f"walk-{side}"] * 5),
                "batch_id": pa.array([0] * 5),
            }
            order = rng.permutation(5)
            write_deltalake(
                str(tmp_path / "estimates" / "walk"), pa.table(columns).take(order), mode="append"
            )
            newest.append((h @ mean[-1], h @ P[-1] @ h))
        apart, variance = abs(newest[1][0] - newest[0][0]), newest[0][1]
        wanted[str(number)] = apart / variance**0.5 if variance else np.inf
    del wanted["6"]
    with open_queries(str(tmp_path)) as queries:
        rows = open_common_rows(queries, "walk", "walk-old", "walk-new", 0)
        found = find_moved_keys(rows, *specs)
    assert [one["key"] for one in found] == sorted(wanted, key=lambda key: -wanted[key])[:4]
    np.testing.assert_allclose(
        [one["deviations"] for one in found], [wanted[one["key"]] for one in found], rtol=1e-12
    )
    assert {one["quantity"] for one in found} == {"a"}


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, [1.0, 0.0]),
        (
            {"observation": {"H": [["u", 0.0], [0.5, 1.0]], "R": [[1.0, 0.3], [0.3, 2.0]]}, "control": ["u"]},
            None,
        ),
        ({"robust": {"student_t": {"degrees": 6}}}, [1.0, 0.0]),
        ({"measurement": ["a"], "observation": {"R": [[1.0]]}}, [1.0, 0.0]),  # the structure gives H
        ({"observation": {"h": "kalman_m:f", "R": [[1.0, 0.3], [0.3, 2.0]]}, "filter": "unscented"}, None),
    ],
)
def test_the_measured_direction_is_a_constant_row_of_H_or_none(
    changes: Any, wanted: list[float] | None
) -> None:
    spec = ModelSpec.model_validate(random_walk_spec(**changes))
    found = find_projection(spec, spec.measurement[0])
    assert (None if found is None else found.weights.tolist()) == wanted


def test_nothing_to_compare_is_neutral_and_one_is_singular(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    changes = {"nis_a_component": dict.fromkeys(("old", "new")), "bias": dict.fromkeys(("old", "new"))}
    path.write_text(
        build_page(content(rows=0, keys=0, gain=seen(None, rows=0, keys=0), **changes)), encoding="utf-8"
    )
    found = page_of(path)
    assert ("p", {"class": "verdict neutral"}) in found.seen and "0% of the keys" not in found.text
    path.write_text(build_page(content(rows=1, keys=1, gain=seen(0.1, rows=1, keys=1))), encoding="utf-8")
    found = page_of(path)
    assert (
        "the same 1 row of 1 key;" in found.text and "1 keys" not in found.text and "1 rows" not in found.text
    )
