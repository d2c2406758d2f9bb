"""Run verbs as users do, for a model in a separate folder, and wait while its stream runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Verbs:
    """The verbs of a model: its spec, its warehouse and the verbs' output are in `folder`.

    Without a spec, a verb has to write it.
    """

    def __init__(self, folder: Path, model: str, spec: str | None, **environment: str) -> None:
        self.folder, self.model = folder, model
        self.warehouse = folder / "warehouse"
        models = folder / "models"
        models.mkdir()
        if spec is not None:
            (models / f"{model}.yaml").write_text(spec)
        self.environment = {
            **os.environ,
            "KALMAN_MODELS": str(models),
            "KALMAN_WAREHOUSE": str(self.warehouse),
            **environment,
        }

    def build_command(self, verb: str, *options: str) -> list[str]:
        """Build the command line of a verb of the model."""
        return [sys.executable, "-m", "jobs.cli", verb, "--model", self.model, *options]

    def finish(self, verb: str, *options: str) -> None:
        """Run a verb to its end.

        Raises:
            RuntimeError: the verb fails.
        """
        if self._start(verb, *options).wait():
            raise RuntimeError(self._log(verb).read_text())

    @contextmanager
    def stream(self, trigger: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run the stream until the context is left; an error meanwhile is raised with the stream's output."""
        process = self._start("stream", "--trigger", trigger)
        try:
            yield process
        except RuntimeError as problem:
            raise RuntimeError(f"{problem}: {self._log('stream').read_text()[-2000:]}") from problem
        finally:
            process.terminate()
            process.wait()

    def _start(self, verb: str, *options: str) -> subprocess.Popen[bytes]:
        with self._log(verb).open("wb") as log:
            return subprocess.Popen(
                self.build_command(verb, *options),
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _log(self, verb: str) -> Path:
        return self.folder / f"{verb}.log"


def sleep_beside(stream: subprocess.Popen[bytes], seconds: float) -> None:
    """Sleep while a stream runs.

    Raises:
        RuntimeError: the stream has ended.
    """
    time.sleep(seconds)
    if stream.poll() is not None:
        raise RuntimeError("the stream ended")
