"""tests/fixtures/messages.md lists every sentence that the code raises: a review reads a new one as users will."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_every_message_of_the_code_is_listed_once() -> None:
    made = subprocess.run(
        [sys.executable, "scripts/messages.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    listed = (ROOT / "tests" / "fixtures" / "messages.md").read_text()
    assert made.stdout == listed, (
        "run: python scripts/messages.py > tests/fixtures/messages.md, and read what has changed"
    )
    sentences = [line for line in listed.splitlines() if line.startswith("- `")]
    assert len(sentences) == len(set(sentences)) > 500


def test_a_message_is_found_whatever_it_is_made_of() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        messages = importlib.import_module("messages")
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    code = """
def check(name):
    if name:
        raise UserError(f"{name}: is wrong; " "write another")
    return invalid("is not a number", "write 1.0", "field")
"""
    found = list(messages.said_in(ast.parse(code)))
    assert found == ["{name}: is wrong; write another", "is not a number · write 1.0 · field"]
