"""docs/messages.md lists every sentence that the code raises, so that a new one is read as its users will read it."""

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
    page = (ROOT / "docs" / "messages.md").read_text()
    assert made.stdout == page, (
        "run: python scripts/messages.py > docs/messages.md, and read what has changed"
    )
    listed = [line for line in page.splitlines() if line.startswith("- `")]
    assert len(listed) == len(set(listed)) > 500


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
