"""Assemble the demo's result, and check it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from demo.flights import Landing

if TYPE_CHECKING:
    from demo.check import Checked
    from demo.display import Display
    from demo.killer import Killed
    from demo.rates import Rate
    from demo.upgrade import Switched

TOLERANCE = 1e-9
"""Largest accepted absolute difference from one batch pass."""


def result_of(
    checked: list[Checked],
    killed: Mapping[str, Killed],
    rates: Mapping[str, Rate],
    landing: Mapping[str, Landing],
    display: Display,
    report: str,
    switched: Switched,
) -> dict[str, Any]:
    """Return the content of result.json: rows of October and November, of both models together."""
    models = {one.spec.name: _of_model(one, killed[one.spec.name], rates[one.spec.name]) for one in checked}
    busy = sum(rate.seconds for rate in rates.values())
    result: dict[str, Any] = {
        "max_abs_difference": max(one.worst for one in checked),
        "keys": sum(one.states.compared for one in checked),
        "rows_sent": sum(one.counts.sent for one in checked),
        "rows_estimated": sum(one.counts.estimated for one in checked),
        "rows_quarantined": sum(one.counts.quarantined for one in checked),
        "driver_kills": len(killed),
        "rows_per_second": round(sum(rate.rows for rate in rates.values()) / busy if busy else 0.0, 1),
        "seconds": round(display.total, 1),
        "report": report,
        "tolerance": TOLERANCE,
        "rows_history": sum(one.history_rows for one in landing.values()),
        "batch_rows_per_second": round(
            sum(one.batch_rows for one in checked) / sum(one.batch_seconds for one in checked), 1
        ),
        "models": models,
        "upgrade": {**switched.result(), "problems": switched.problems()},
    }
    return {**result, "problems": problems_of(result)}


def summary(result: Mapping[str, Any]) -> list[str]:
    """Return a result as a few lines."""
    return [
        f"largest absolute difference from one batch pass: {result['max_abs_difference']:.3g} "
        f"(at most {TOLERANCE:.0e} is allowed)",
        f"{result['keys']:,} keys; {result['rows_sent']:,} rows sent = "
        f"{result['rows_estimated']:,} estimated + {result['rows_quarantined']:,} quarantined; "
        f"{result['driver_kills']} drivers killed in mid-batch",
        f"{result['rows_per_second']:,.0f} rows/s in the streams (small micro-batches: most have a day), "
        f"{result['batch_rows_per_second']:,.0f} rows/s in the batch pass",
        *_switch(result.get("upgrade")),
        f"{result['seconds']:.0f} s in all; report: {result['report']}",
    ]


def _switch(done: Mapping[str, Any] | None) -> list[str]:
    if done is None:
        return []
    likelihood = done["log_likelihood_a_row"]
    return [
        f"{done['model']} upgraded to version 2 under its feed and rolled back; log-likelihood a row "
        f"{likelihood['old']:.4f} of version 1, {likelihood['new']:.4f} of version 2; comparison: {done['report']}"
    ]


def problems_of(result: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each reason why a result is not accepted."""
    found: list[str] = []
    for name, model in result["models"].items():
        found += [f"{name}: {problem}" for problem in model["problems"]]
    found += result.get("upgrade", {}).get("problems", [])
    worst = result["max_abs_difference"]
    if not worst <= TOLERANCE:
        size = "does not match" if math.isinf(worst) else f"differs by {worst:.3g} from"
        found.append(f"the stream {size} one batch pass over the same rows; {TOLERANCE:.0e} is allowed")
    if result["rows_sent"] != result["rows_estimated"] + result["rows_quarantined"]:
        found.append(
            f"{result['rows_sent']:,} rows were sent, but {result['rows_estimated']:,} were estimated and "
            f"{result['rows_quarantined']:,} quarantined"
        )
    return found


def _of_model(one: Checked, killed: Killed, rate: Rate) -> dict[str, Any]:
    counts = one.counts
    problems: list[str] = []
    for what, found in (("estimates", one.estimates), ("keys", one.states)):
        if found.missing or found.surplus:
            problems.append(f"{found.missing:,} {what} are missing and {found.surplus:,} are too many")
        problems += [
            f"{number:,} {what} have another {name}" for name, number in found.unequal.items() if number
        ]
    if not counts.add_up:
        problems.append(
            f"{counts.sent:,} rows were sent, {counts.estimated:,} estimated, "
            f"{counts.quarantined:,} quarantined"
        )
    return {
        "keys": one.states.compared,
        "rows_sent": counts.sent,
        "rows_estimated": counts.estimated,
        "rows_quarantined": counts.quarantined,
        "max_abs_difference": one.worst,
        "estimates": one.estimates.largest,
        "last_states": one.states.largest,
        "generation": one.generation.generation,
        "snapshot": one.generation.snapshot_id,
        "parameters": one.parameters,
        "micro_batches": len(one.batches),
        "rows_per_second": round(rate.rows_per_second, 1),
        "rows_per_second_best_batch": round(rate.best, 1),
        "killed": asdict(killed),
        "problems": problems,
    }
