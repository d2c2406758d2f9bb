"""The tests that pages name: whether they exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def functions(path: Path) -> set[str]:
    """Return the functions of a file of tests."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def is_test(name: str) -> bool:
    """Tell if a test id names a file with tests, one of its tests, or a target of `make`."""
    if name.startswith("make "):
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
        return name.removeprefix("make ") in targets
    path, _, function = name.partition("::")
    if not (ROOT / path).is_file():
        return False
    found = {one for one in functions(ROOT / path) if one.startswith("test_")}
    return function in found if function else bool(found)
