"""The daemon of Spark's Python workers: it has the protocol of Spark's own, and has loaded all modules."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys

from jobs.spark.worker_daemon import MODULES

SECRET = b"a secret"
PATIENCE = 60


def test_a_worker_is_forked_and_knows_the_secret() -> None:
    environment = {**os.environ, "SPARK_REUSE_WORKER": "1", "PYTHON_WORKER_FACTORY_SECRET": SECRET.decode()}
    daemon = subprocess.Popen(
        [sys.executable, "-m", "jobs.spark.worker_daemon", "pyspark.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    assert daemon.stdin is not None and daemon.stdout is not None
    try:
        (port,) = struct.unpack(">i", daemon.stdout.read(4))
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as worker:
            answers = worker.makefile("rb")
            (pid,) = struct.unpack(">i", answers.read(4))
            assert pid not in (0, daemon.pid)
            worker.sendall(struct.pack(">i", len(SECRET)) + SECRET)
            assert answers.read(6) == struct.pack(">i", 2) + b"ok"
    finally:
        daemon.stdin.close()
        daemon.wait(PATIENCE)


def test_loaded_modules_are_excluded_from_garbage_collection() -> None:
    look = (
        "import gc, sys; from jobs.spark.worker_daemon import MODULES, load_modules; load_modules(); "
        "print(all(name in sys.modules for name in MODULES), gc.get_freeze_count() > 100_000)"
    )
    said = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["True", "True"], MODULES
