"""Start the Spark of the demo's own process, which lands days, upgrades and checks."""

from __future__ import annotations

import os
from pathlib import Path

from jobs.settings import Settings


def start_spark(settings: Settings, log: Path) -> None:
    """Start the session that the demo's later calls of verbs find; what its Java and its workers say goes to `log`.

    Spark's stateful workers tell each step of their start, which would stand between the lines of progress.
    """
    from jobs.session import spark_session
    from jobs.spark_conf import glance_conf

    console = os.dup(2)
    try:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 2)  # Java inherits it
        spark_session(settings, "demo", glance_conf())
    finally:
        os.dup2(console, 2)
        os.close(console)
