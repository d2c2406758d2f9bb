"""The settings that all verbs share: locations of warehouse and models, and the output of commands."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from jobs.core.roots import parse_warehouse_root

# 4: a failed task is retried, as on a cluster; plain local[*] fails at the first lost Python worker.
DEFAULT_MASTER = "local[*,4]"


@dataclass(frozen=True, slots=True)
class Settings:
    """The global options of one command.

    Attributes:
        warehouse: root of the tables (`jobs.core.roots`): an absolute local path, or a URI such as `s3a://bucket/dir`.
        models: folder of the model specs.
        master: Spark's master URL.
        jars: folder of Spark's jars, which `make setup` fills.
        json: print the report as one JSON document on standard output.
        quiet: print no progress.
        debug: show tracebacks.
    """

    warehouse: str
    models: Path
    master: str
    jars: Path
    json: bool = False
    quiet: bool = False
    debug: bool = False

    @classmethod
    def load(
        cls,
        warehouse: str | None = None,
        models: str | Path | None = None,
        master: str | None = None,
        *,
        json: bool = False,
        quiet: bool = False,
        debug: bool = False,
    ) -> Settings:
        """Build settings from flags, then the environment (KALMAN_WAREHOUSE, ...), then defaults.

        Raises:
            UserError: the warehouse's location is not understood, or tables there would not be safe.
        """
        env = os.environ
        return cls(
            warehouse=parse_warehouse_root(warehouse or env.get("KALMAN_WAREHOUSE") or "warehouse"),
            models=Path(os.path.expanduser(models or env.get("KALMAN_MODELS") or "models")).absolute(),
            master=master or env.get("KALMAN_MASTER") or DEFAULT_MASTER,
            jars=Path(
                env.get("KALMAN_JARS") or Path(sys.prefix) / "share" / "kalman-pipeline" / "jars"
            ).absolute(),
            json=json,
            quiet=quiet,
            debug=debug,
        )
