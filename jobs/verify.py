"""Verify a model's live estimates and state: recompute keys from their lineage in batch, and compare to the bit.

The stream is not disturbed: no lease is taken, and all reads use a committed micro-batch and pinned versions of the
tables, while the stream runs on. Each completed part is recorded in the table `verifications`; after a kill the next
run continues from there.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from jobs.core.command import Model, command
from jobs.core.errors import UserError
from jobs.core.progress import Progress
from jobs.core.report import Report
from jobs.core.settings import Settings

if TYPE_CHECKING:
    from jobs.verification.verifier import Result


@command
def run(
    settings: Settings,
    model: Model,
    share: Annotated[str, Option(help="Share of the keys, such as 1% or 100%.")] = "1%",
    keys: Annotated[
        list[str] | None, Option("--key", help="Verify this key, as the estimates name it; may be repeated.")
    ] = None,
    seed: Annotated[str | None, Option(help="Seed of the choice of keys; by default the date.")] = None,
    since: Annotated[str | None, Option(help="Compare estimates from this event time on (ISO 8601).")] = None,
    tolerance: Annotated[
        float, Option(min=0.0, help="Accepted relative difference of numbers; 0: equal to the bit.")
    ] = 0.0,
    run_id: Annotated[
        str | None, Option(help="Name of the run; a killed run of this name continues.")
    ] = None,
    metrics_file: Annotated[str | None, Option(help="Write the outcome as Prometheus metrics there.")] = None,
    chunk_rows: Annotated[
        int, Option(min=1, help="How many rows to recompute and record at a time.")
    ] = 5_000_000,
) -> Report:
    """Recompute live estimates and state from their lineage, and compare; exit code 2 if anything differs.

    Raises:
        UserError: an option is wrong, or the run of this id has ended.
    """
    from datetime import UTC, datetime

    from jobs.lineage.generations import DeployedModel, find_live
    from jobs.spark.conf import build_short_rows_conf
    from jobs.spark.session import open_warehouse
    from jobs.specs.loading import load_spec
    from jobs.storage.positions import parse_time
    from jobs.supervision.metrics import write_verification
    from jobs.verification.runs import NOTHING, Findings
    from jobs.verification.verifier import Options, Result, Verifier

    started = time.monotonic()
    options = Options(
        share=parse_share(share),
        seed=datetime.now(UTC).date().isoformat() if seed is None else seed,
        keys=tuple(keys or ()),
        since=None if since is None else parse_time(since, "--since"),
        tolerance=tolerance,
        chunk_rows=chunk_rows,
    )
    spec = load_spec(model, settings.models)
    warehouse = open_warehouse(settings, f"verify {spec.name}", build_short_rows_conf())
    if run_id is None and find_live(warehouse, spec.name) is None:
        result = Result("", NOTHING, Findings(), [], {"segments": [], "snapshots": []}, continued=False)
    else:
        with Progress(f"verify {spec.name}", None, quiet=settings.quiet) as progress:
            result = Verifier(DeployedModel(spec, warehouse), options, progress.note).run(run_id)
    if metrics_file is not None:
        counts = {**result.findings.counts, "compared": result.findings.compared}
        write_verification(metrics_file, spec.name, result.outcome, counts, result.findings.differences)
    return _report(spec.name, result, time.monotonic() - started)


def parse_share(text: str) -> int:
    """Parse a share such as 1% or 0.01 into millionths."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise UserError(f"--share {text}: give a share of the keys above 0 %, such as 1% or 100%")
    return max(1, round(value * 1_000_000))


def _report(model: str, result: Result, seconds: float) -> Report:
    from jobs.verification.runs import DIFFERENCES, DIFFERENT, NOT_VERIFIED, NOTHING, format_difference
    from jobs.verification.verifier import choose_exit_code

    found, counts = result.findings, result.findings.counts
    data, code = _build_data(model, result, seconds), choose_exit_code(result.outcome)
    if not result.run_id:  # no run began, and Spark did not start
        message = (
            f"{model}: nothing to verify: no generation is live; start one with "
            f"`kalman-pipeline stream --model {model}`"
        )
        return Report([], data, errors=[message], error_code=code)
    live = next(iter(result.plan["segments"]), None)
    where = "" if live is None else f", up to micro-batch {live['last_batch']} of {live['generation']}"
    lines = [
        f"{model}: {result.outcome}{where}",
        f"{counts['keys']:,} keys: {counts['equal']:,} estimates and {counts['states']:,} states are equal to the bit",
    ]
    if counts["close"] or counts["states_close"]:
        lines.append(
            f"{counts['close']:,} estimates and {counts['states_close']:,} states within the tolerance only"
        )
    lines.append(f"{counts['refused']:,} rows in quarantine, {counts['waiting']:,} wait for the watermark")
    lines += [f"{counts[name]:,} {text}" for name, text in DIFFERENCES.items() if counts[name]]
    lines += [f"not verified: {reason}" for reason in result.not_verified]
    lines.append(f"run {result.run_id}{', continued' if result.continued else ''}; {seconds:.1f} s")
    errors: list[str] = []
    if result.outcome == DIFFERENT:
        firsts = "; ".join(format_difference(one) for one in found.firsts[:3])
        errors = [f"{model} is not what its lineage gives: {found.differences:,} differences; {firsts}"]
    elif result.outcome == NOTHING:
        errors = [
            f"{model}: nothing to verify: the live stream has read no row of the chosen keys after its snapshot: "
            f"choose all with `kalman-pipeline verify --model {model} --share 100%`, or land newer rows and stream them"
        ]
    elif result.outcome == NOT_VERIFIED:
        errors = [f"{model}: a part was not verified: {'; '.join(result.not_verified)}"]
    return Report(lines, data, errors=errors, error_code=code)


def _build_data(model: str, result: Result, seconds: float) -> dict[str, Any]:
    found = result.findings
    return {
        "model": model,
        "run": result.run_id,
        "continued": result.continued,
        "outcome": result.outcome,
        "differences": found.differences,
        "compared": found.compared,
        "counts": found.counts,
        "first_differences": found.firsts,
        "not_verified": result.not_verified,
        "segments": result.plan["segments"],
        "snapshots": result.plan["snapshots"],
        "seconds": seconds,
    }


if __name__ == "__main__":
    run.main()
