"""The standard error of Spark's processes is passed on without the lines of a worker's start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHILD = r"""
import sys
worker = "Streaming TransformWithStateInPandas Python worker"
sys.stderr.write(f"before\nStarting {worker}.\n\n{worker} Starting execution of UDF: f.\n\n")
sys.stderr.write("\nof the model's own function\n")
"""
PROGRAM = """
import subprocess, sys, threading
from jobs.spark.session import filter_output

with filter_output():
    child = subprocess.Popen([sys.executable, sys.argv[1]])
print("ours", file=sys.stderr, flush=True)
child.wait()
with filter_output():
    pass
for thread in threading.enumerate():
    if thread.name == "java output":
        thread.join(30)
print("the end", file=sys.stderr)
"""


def test_the_steps_of_a_workers_start_are_left_out_and_nothing_else(tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(child)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    lines = done.stderr.split("\n")
    assert sorted(lines) == ["", "", "before", "of the model's own function", "ours", "the end"], lines
