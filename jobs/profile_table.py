"""Show a profile of a stream's micro-batches as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs.batch_profile import MEANING, REST, Profiled, in_order

if TYPE_CHECKING:
    from rich.table import Table


def table_of(found: Profiled, model: str) -> Table:
    """Return the mean of a run's micro-batches, step by step, as a rich table."""
    from rich.table import Table

    mean = found.mean
    title = (
        f"{model}: where the time of a micro-batch went, mean of {found.count} "
        f"({mean.seconds:.3f} s, {mean.rows:,} rows)"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("step")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    table.add_column("what it is", style="dim")
    seconds = {name: mean.steps[name] for name in in_order(mean.steps)} | {REST: mean.rest}
    for name, took in seconds.items():
        share = 100 * took / mean.seconds if mean.seconds else 0.0
        table.add_row(name, f"{took:.3f}", f"{share:.1f} %", MEANING.get(name, "a further step of the sink"))
    table.add_section()
    table.add_row("micro-batch", f"{mean.seconds:.3f}", "100.0 %", "Spark's triggerExecution")
    return table
