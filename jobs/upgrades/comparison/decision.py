"""Decide if a new version of a model may become live, by its comparison and the thresholds of its spec. Spark-free."""

from __future__ import annotations

from typing import Any, NamedTuple

from jobs.specs.migration import Upgrade


class Comparison(NamedTuple):
    """The result of a comparison: its numbers, whether the new generation is good enough, and why not."""

    numbers: dict[str, Any]
    good: bool
    reasons: list[str]


def decide(numbers: dict[str, Any], limits: Upgrade) -> Comparison:
    """Return the decision on the numbers of `statistics.totals`, by the spec's section `upgrade`."""
    if "unequal_rows" in numbers:  # of the same model: only the bits can differ
        count = numbers["unequal_rows"]
        reasons = [f"it is the same model, and {count:,} rows differ"] if count else []
        return Comparison(numbers, not reasons, reasons)
    reasons: list[str] = []
    if numbers["rows"] < limits.rows:
        reasons.append(f"only {numbers['rows']:,} rows to compare, of {limits.rows:,} wanted (upgrade.rows)")
    if numbers["rows"]:
        loss = numbers["log_likelihood_a_row"]["old"] - numbers["log_likelihood_a_row"]["new"]
        if not loss <= limits.loss:
            reasons.append(
                f"it predicts worse: {loss:.4g} less log-likelihood per row, {limits.loss:g} allowed (upgrade.loss)"
            )
        if numbers["flagged"]["new"] > numbers["flagged"]["old"]:
            reasons.append(
                f"it flags {numbers['flagged']['new']:,} rows, the old one {numbers['flagged']['old']:,}"
            )
        reasons += _shares(numbers, limits)
    return Comparison(numbers, not reasons, reasons)


def _shares(numbers: dict[str, Any], limits: Upgrade) -> list[str]:
    """Return the reasons why shares of the keys exceed the spec's thresholds."""
    reasons: list[str] = []
    worse = numbers["keys_worse"] / numbers["keys"]
    if limits.keys_worse is not None and worse > limits.keys_worse:
        reasons.append(
            f"it predicts {worse:.1%} of the keys worse, {limits.keys_worse:.1%} allowed (upgrade.keys_worse)"
        )
    for name, statistic in (("nis_outside", "NIS"), ("bias_outside", "mean innovation")):
        limit = getattr(limits, name)
        if limit is None:
            continue
        share = numbers[name]["new"]
        if share is None:
            remedy = "say `outputs: {innovation: true}`" if name == "bias_outside" else "no row has any"
            reasons.append(f"its {statistic} cannot be judged, as upgrade.{name} requires: {remedy}")
        elif share > limit:
            reasons.append(
                f"the {statistic} of {share:.1%} of the keys is outside its 95 % bounds, {limit:.1%} allowed "
                f"(upgrade.{name})"
            )
    return reasons


def comparison_lines(comparison: Comparison) -> list[str]:
    """Return a comparison as lines of a report."""
    numbers = comparison.numbers
    lines = [f"compared on {numbers['rows']:,} rows of {numbers['keys']:,} keys"]
    if numbers["rows"]:
        likelihood = numbers["log_likelihood_a_row"]
        lines.append(
            f"log-likelihood per row: {likelihood['old']:.6g} old, {likelihood['new']:.6g} new; better for "
            f"{numbers['keys_better']:,} keys, worse for {numbers['keys_worse']:,}"
        )
        nis, outside = numbers["nis_a_component"], numbers["nis_outside"]
        if nis["old"] is not None and nis["new"] is not None:
            lines.append(
                f"NIS per component (1 is expected): {nis['old']:.4g} old, {nis['new']:.4g} new; outside its 95 % "
                f"bounds for {_share(outside['old'])} of the keys old, {_share(outside['new'])} new"
            )
        bias, outside = numbers["bias"], numbers["bias_outside"]
        if bias["new"] is not None:
            lines.append(
                f"mean innovation (0 is expected): {_number(bias['old'])} old, {_number(bias['new'])} new; outside its "
                f"95 % bounds for {_share(outside['old'])} of the keys old, {_share(outside['new'])} new"
            )
    if "unequal_rows" in numbers:
        lines.append(f"the same model: {numbers['unequal_rows']:,} rows differ")
    return [
        *lines,
        "verdict: good" if comparison.good else f"verdict: not good: {'; '.join(comparison.reasons)}",
    ]


def _share(value: float | None) -> str:
    return "?" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:+.4f}"
