"""List every sentence that the code raises, from its syntax trees, as tests/fixtures/messages.md.

A sentence is listed once, with the file that has it; `{...}` stands for what is filled in. `tests/test_messages.py`
compares the list with the code, so a new or changed sentence is read in review as its users will read it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("jobs", "kalman", "dags")
SAID = {
    *("UserError", "SpecError", "ModelError", "Problem", "invalid", "TooMany", "ChangedFile"),
    *("AirflowException", "build_refusal", "find_refusal"),
}
"""Functions whose texts a user reads, besides raised errors."""
HEAD = """# Every message

Made by `python scripts/messages.py > tests/fixtures/messages.md` from the code: the sentences that end a command,
refuse a spec or a row, or stop a DAG, by file. `{...}` marks a value, and ` · ` separates the parts of one message.
"""


def text_of(node: ast.expr) -> str | None:
    """Return the source text of a string, with `{...}` for filled-in values; None if the expression is not a string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = [
            part.value
            if isinstance(part, ast.Constant)
            else "{" + ast.unparse(part.value) + "}"
            if isinstance(part, ast.FormattedValue)
            else ""
            for part in node.values
        ]
        return "".join(map(str, parts))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        both = [text_of(node.left) or "{...}", text_of(node.right) or "{...}"]
        return "".join(both) if both != ["{...}", "{...}"] else None
    if isinstance(node, ast.IfExp):
        both = [text_of(node.body), text_of(node.orelse)]
        return " / ".join(filter(None, both)) or None
    return None


def said_in(tree: ast.Module) -> Iterator[str]:
    """Return the messages of a module, in the order of its lines."""
    raised = {id(node.exc) for node in ast.walk(tree) if isinstance(node, ast.Raise)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if id(call) not in raised and name not in SAID:
            continue
        words = [*call.args, *(keyword.value for keyword in call.keywords)]
        parts = [" ".join(text.split()) for word in words if (text := text_of(word))]
        whole = " · ".join(parts)
        if whole.count(" ") >= 2:
            yield whole


def page() -> str:
    """Return the text of tests/fixtures/messages.md."""
    lines = [HEAD.strip()]
    seen: set[str] = set()
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            found = [one for one in dict.fromkeys(said_in(ast.parse(path.read_text()))) if one not in seen]
            seen.update(found)
            if found:
                lines += [
                    "",
                    f"## {path.relative_to(ROOT)}",
                    "",
                    *(f"- `{one.replace('`', chr(39))}`" for one in found),
                ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
