"""Decide if a new version of a model may become live, by its comparison and the thresholds of its spec. Spark-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jobs.core.report import number, plural
from jobs.specs.migration import Upgrade
from jobs.upgrades.comparison.answers import ANSWERS, Answer
from jobs.upgrades.comparison.paired import Gain, answer_of, rows_needed


class Comparison(NamedTuple):
    """The result of a comparison.

    numbers: its statistics; good: whether the new generation may become live, and if not, the reasons; answer: whether
    it predicts better; rows_needed: about how many rows in total would give an answer, None where no number would.
    """

    numbers: dict[str, Any]
    good: bool
    reasons: list[str]
    answer: Answer
    rows_needed: int | None


def decide(numbers: dict[str, Any], limits: Upgrade) -> Comparison:
    """Return the decision on the numbers of `content.gather`, by the spec's section `upgrade`."""
    gain = Gain(**numbers["gain"])
    allowed = max(limits.loss, 0.0)
    needed = rows_needed(gain, allowed, limits.rows)
    if not numbers["rows"]:
        reason = "there is nothing to compare: no row has been estimated by both"
        return Comparison(numbers, False, [reason], Answer.UNKNOWN, needed)
    answer = answer_of(gain, allowed, limits.rows, limits.keys)
    if "unequal_rows" in numbers:  # of the same model: only the bits can differ
        count = numbers["unequal_rows"]
        if not count:
            return Comparison(numbers, True, [], Answer.NOT_WORSE, numbers["rows"])
        return Comparison(
            numbers, False, [f"it is the same model, and {_that_differ(count)}"], answer, needed
        )
    reasons = _gain_reasons(gain, answer, needed, limits)
    if numbers["flagged"]["new"] > numbers["flagged"]["old"]:
        reasons.append(
            f"it flags {plural(numbers['flagged']['new'], 'row')}, the old one {numbers['flagged']['old']:,}"
        )
    reasons += _shares(numbers, limits)
    return Comparison(numbers, not reasons, reasons, answer, needed)


def _that_differ(rows: int) -> str:
    return f"{plural(rows, 'row')} {'differs' if rows == 1 else 'differ'}"


def _gain_reasons(gain: Gain, answer: Answer, needed: int | None, limits: Upgrade) -> list[str]:
    """Return the reasons why a gain is not enough."""
    allowed = f"{limits.loss:g} allowed (upgrade.loss)"
    if answer == Answer.WORSE:
        mean = "no number" if gain.mean is None else f"{-gain.mean:.4g}"
        between = "" if gain.low is None else f", {_interval(gain)}"
        return [f"it predicts worse: {mean} less log-likelihood per row{between}, {allowed}"]
    if answer == Answer.UNKNOWN:
        return [f"not enough to tell: {_why_unknown(gain, limits)}{_more(gain, needed)}"]
    if gain.low is not None and gain.low < -limits.loss and limits.loss < 0.0:
        return [
            f"it gains too little log-likelihood per row: {_interval(gain)}, {-limits.loss:g} required (upgrade.loss)"
        ]
    return []


def _why_unknown(gain: Gain, limits: Upgrade) -> str:
    """Return why a gain has no answer."""
    if gain.rows < limits.rows:
        return f"only {plural(gain.rows, 'row')} to compare, of {limits.rows:,} wanted (upgrade.rows)"
    if gain.keys < limits.keys:
        return f"only {plural(gain.keys, 'key')} to compare, of {limits.keys:,} wanted (upgrade.keys)"
    if gain.low is None:
        return (
            f"{plural(gain.rows, 'row')} of {plural(gain.keys, 'key')} span too little time to know the noise"
        )
    return (
        f"the gain per row is {_interval(gain)}, and a loss of {max(limits.loss, 0.0):g} is allowed "
        "(upgrade.loss)"
    )


def _more(gain: Gain, needed: int | None) -> str:
    """Return how many rows more would give an answer."""
    if needed is None:
        return "; no number of rows would tell: the loss is as large as the one allowed"
    more = needed - gain.rows
    return f"; about {plural(more, 'row')} more would tell" if more > 0 else ""


def _interval(gain: Gain) -> str:
    return f"between {gain.low:+.4g} and {gain.high:+.4g}"


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
    lines = [f"compared on {plural(numbers['rows'], 'row')} of {plural(numbers['keys'], 'key')}"]
    if numbers["rows"]:
        likelihood = numbers["log_likelihood_a_row"]
        lines.append(
            f"log-likelihood per row: {likelihood['old']:.6g} old, {likelihood['new']:.6g} new; better for "
            f"{plural(numbers['keys_better'], 'key')}, worse for {numbers['keys_worse']:,}"
        )
        nis, outside = numbers["nis_a_component"], numbers["nis_outside"]
        if nis["old"] is not None and nis["new"] is not None:
            lines.append(
                f"NIS per component (1 is expected): {nis['old']:.4g} old, {nis['new']:.4g} new; {_outside(outside)}"
            )
        bias, outside = numbers["bias"], numbers["bias_outside"]
        if bias["new"] is not None:
            both = (number(bias[side], "+.4f", "?") for side in ("old", "new"))
            lines.append(f"mean innovation (0 is expected): {' old, '.join(both)} new; {_outside(outside)}")
    if "unequal_rows" in numbers:
        lines.append(f"the same model: {_that_differ(numbers['unequal_rows'])}")
    return [
        *lines,
        gain_line(comparison),
        f"answer: {answer_text(comparison)}",
        "verdict: good" if comparison.good else f"verdict: not good: {'; '.join(comparison.reasons)}",
    ]


def _outside(shares: Mapping[str, float | None]) -> str:
    old, new = (number(shares[side], ".1%", "?") for side in ("old", "new"))
    return f"outside its 95 % bounds for {old} of the keys old, {new} new"


def gain_line(comparison: Comparison) -> str:
    """Return the gain with its interval as a line."""
    gain = Gain(**comparison.numbers["gain"])
    if gain.mean is None:
        return "gain per row: none, as no row was scored by both"
    interval = (
        "no interval" if gain.low is None else f"95 % interval from {gain.low:+.4g} to {gain.high:+.4g}"
    )
    return (
        f"gain per row: {gain.mean:+.4g} log-likelihood, {interval}, over {plural(gain.rows, 'row')} of "
        f"{plural(gain.keys, 'key')}"
    )


def answer_text(comparison: Comparison) -> str:
    """Return the answer in plain words."""
    text = ANSWERS[comparison.answer]
    if comparison.answer == Answer.UNKNOWN:
        text += _more(Gain(**comparison.numbers["gain"]), comparison.rows_needed)
    return text


def what_next(comparison: Comparison, name: str, model: str) -> str:
    """Return the next action for a shadow that was compared and may not be promoted yet."""
    command = f"kalman-pipeline promote --model {model}"
    if comparison.good:
        return f"promote it with `{command}`"
    return f"it stays in shadow, and `{command}` refuses it: {_remedies(name, model)}"


def refusal(comparison: Comparison, name: str, model: str, report: str) -> str:
    """Return the sentence that refuses to promote a generation."""
    return (
        "; ".join([f"{name} was not promoted", *comparison.reasons])
        + f". It stays in shadow: {_remedies(name, model)}; report: {report}"
    )


def _remedies(name: str, model: str) -> str:
    """Return what may be done with a shadow that is not promoted."""
    return (
        f"`kalman-pipeline stream --model {model} --generation {name}` gives it the rows that have come since, "
        f"`kalman-pipeline promote --model {model} --force` promotes it nevertheless, and `retire` gives it up"
    )
