"""Decide, without Spark, whether a new version may become live, by its comparison and the spec's thresholds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jobs.core.report import format_count, format_number
from jobs.specs.migration import ANSWERS, Answer, Upgrade
from jobs.upgrades.statistics import Gain, answer_of, compute_rows_needed


class VersionComparison(NamedTuple):
    """The result of a comparison.

    numbers: the statistics of the comparison. good: whether the new generation may become live; reasons: why it may
    not.
    answer: whether the new generation predicts better. rows_needed: estimated total number of rows for an answer; None
    if no number of rows would give an answer.
    """

    numbers: dict[str, Any]
    good: bool
    reasons: list[str]
    answer: Answer
    rows_needed: int | None


def decide(numbers: dict[str, Any], limits: Upgrade) -> VersionComparison:
    """Return the decision about the statistics of a comparison, by the section `upgrade` of the spec."""
    gain = Gain(**numbers["gain"])
    allowed = max(limits.loss, 0.0)
    needed = compute_rows_needed(gain, allowed, limits.rows)
    if not numbers["rows"]:
        reason = "there is nothing to compare: no row has been estimated by both"
        return VersionComparison(numbers, False, [reason], Answer.UNKNOWN, needed)
    answer = answer_of(gain, allowed, limits.rows, limits.keys)
    if "unequal_rows" in numbers:  # both have the same model, so only bits can differ
        count = numbers["unequal_rows"]
        if not count:
            return VersionComparison(numbers, True, [], Answer.NOT_WORSE, numbers["rows"])
        return VersionComparison(
            numbers, False, [f"it is the same model, and {_format_differing(count)}"], answer, needed
        )
    reasons = _explain_gain(gain, answer, needed, limits)
    if numbers["flagged"]["new"] > numbers["flagged"]["old"]:
        reasons.append(
            f"it flags {format_count(numbers['flagged']['new'], 'row')}, the old one {numbers['flagged']['old']:,}"
        )
    reasons += _explain_shares(numbers, limits)
    return VersionComparison(numbers, not reasons, reasons, answer, needed)


def _format_differing(rows: int) -> str:
    return f"{format_count(rows, 'row')} {'differs' if rows == 1 else 'differ'}"


def _explain_gain(gain: Gain, answer: Answer, needed: int | None, limits: Upgrade) -> list[str]:
    """Return the reasons why a gain is not good enough."""
    allowed = f"{limits.loss:g} allowed (upgrade.loss)"
    if answer == Answer.WORSE:
        mean = "no number" if gain.mean is None else f"{-gain.mean:.4g}"
        between = "" if gain.low is None else f", {_format_interval(gain)}"
        return [f"it predicts worse: {mean} less log-likelihood per row{between}, {allowed}"]
    if answer == Answer.UNKNOWN:
        return [f"not enough to tell: {_explain_no_answer(gain, limits)}{_format_missing_rows(gain, needed)}"]
    if gain.low is not None and gain.low < -limits.loss and limits.loss < 0.0:
        return [
            f"it gains too little log-likelihood per row: {_format_interval(gain)}, {-limits.loss:g} "
            f"required (upgrade.loss)"
        ]
    return []


def _explain_no_answer(gain: Gain, limits: Upgrade) -> str:
    """Return why a gain gives no answer."""
    if gain.rows < limits.rows:
        return f"only {format_count(gain.rows, 'row')} to compare, of {limits.rows:,} wanted (upgrade.rows)"
    if gain.keys < limits.keys:
        return f"only {format_count(gain.keys, 'key')} to compare, of {limits.keys:,} wanted (upgrade.keys)"
    if gain.low is None:
        compared = f"{format_count(gain.rows, 'row')} of {format_count(gain.keys, 'key')}"
        return f"{compared} span too little time to know the noise"
    return (
        f"the gain per row is {_format_interval(gain)}, and a loss of {max(limits.loss, 0.0):g} is allowed "
        "(upgrade.loss)"
    )


def _format_missing_rows(gain: Gain, needed: int | None) -> str:
    """Return a phrase with the number of additional rows for an answer."""
    if needed is None:
        return "; no number of rows would tell: the loss is as large as the one allowed"
    more = needed - gain.rows
    return f"; about {format_count(more, 'row')} more would tell" if more > 0 else ""


def _format_interval(gain: Gain) -> str:
    return f"between {gain.low:+.4g} and {gain.high:+.4g}"


def _explain_shares(numbers: dict[str, Any], limits: Upgrade) -> list[str]:
    """Return the reasons why the shares of keys outside their bounds exceed the thresholds of the spec."""
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


def format_comparison(comparison: VersionComparison) -> list[str]:
    """Return a comparison as the lines of a report."""
    numbers = comparison.numbers
    lines = [f"compared on {format_count(numbers['rows'], 'row')} of {format_count(numbers['keys'], 'key')}"]
    if numbers["rows"]:
        likelihood = numbers["log_likelihood_a_row"]
        lines.append(
            f"log-likelihood per row: {likelihood['old']:.6g} old, {likelihood['new']:.6g} new; better for "
            f"{format_count(numbers['keys_better'], 'key')}, worse for {numbers['keys_worse']:,}"
        )
        nis, outside = numbers["nis_a_component"], numbers["nis_outside"]
        if nis["old"] is not None and nis["new"] is not None:
            lines.append(
                f"NIS per component (1 is expected): {nis['old']:.4g} old, {nis['new']:.4g} new; "
                f"{_format_outside(outside)}"
            )
        bias, outside = numbers["bias"], numbers["bias_outside"]
        if bias["new"] is not None:
            both = (format_number(bias[side], "+.4f", "?") for side in ("old", "new"))
            lines.append(
                f"mean innovation (0 is expected): {' old, '.join(both)} new; {_format_outside(outside)}"
            )
    if "unequal_rows" in numbers:
        lines.append(f"the same model: {_format_differing(numbers['unequal_rows'])}")
    return [
        *lines,
        format_gain(comparison),
        f"answer: {answer_text(comparison)}",
        "verdict: good" if comparison.good else f"verdict: not good: {'; '.join(comparison.reasons)}",
    ]


def _format_outside(shares: Mapping[str, float | None]) -> str:
    old, new = (format_number(shares[side], ".1%", "?") for side in ("old", "new"))
    return f"outside its 95 % bounds for {old} of the keys old, {new} new"


def format_gain(comparison: VersionComparison) -> str:
    """Return a line with the gain and its interval."""
    gain = Gain(**comparison.numbers["gain"])
    if gain.mean is None:
        return "gain per row: none, as no row was scored by both"
    interval = (
        "no interval" if gain.low is None else f"95 % interval from {gain.low:+.4g} to {gain.high:+.4g}"
    )
    return (
        f"gain per row: {gain.mean:+.4g} log-likelihood, {interval}, over {format_count(gain.rows, 'row')} of "
        f"{format_count(gain.keys, 'key')}"
    )


def answer_text(comparison: VersionComparison) -> str:
    """Return the answer in plain words."""
    text = ANSWERS[comparison.answer]
    if comparison.answer == Answer.UNKNOWN:
        text += _format_missing_rows(Gain(**comparison.numbers["gain"]), comparison.rows_needed)
    return text


def suggest_next_action(comparison: VersionComparison, name: str, model: str) -> str:
    """Return the next action for a compared shadow that may not be promoted yet."""
    command = f"kalman-pipeline promote --model {model}"
    if comparison.good:
        return f"promote it with `{command}`"
    return f"it stays in shadow, and `{command}` refuses it: {_suggest_remedies(name, model)}"


def format_refusal(comparison: VersionComparison, name: str, model: str, report: str) -> str:
    """Return the sentence that refuses to promote a generation."""
    return (
        "; ".join([f"{name} was not promoted", *comparison.reasons])
        + f". It stays in shadow: {_suggest_remedies(name, model)}; report: {report}"
    )


def _suggest_remedies(name: str, model: str) -> str:
    """Return what may be done with a shadow that is not promoted."""
    return (
        f"`kalman-pipeline stream --model {model} --generation {name}` gives it the rows that land, "
        f"`kalman-pipeline promote --model {model} --force` promotes it nevertheless, and "
        f"`kalman-pipeline retire --model {model} --generation {name}` gives it up"
    )
