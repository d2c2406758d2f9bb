"""Draw sentences to be read by fresh eyes: `python scripts/sample_sentences.py [--commit C] [--since C]`.

Docstrings, comments, messages and pages of a commit, and subjects of the commits since another one, in equal parts; the
seed is the hash of the commit, so a sample is drawn again and never chosen.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = ("jobs/", "kalman/", "dags/")
SENTENCE = re.compile(r"(?<=[.:?!])\s+(?=[A-Z`*\[])")
SHORTEST = 4
"""Words of a sentence; headings and names of columns have fewer."""


def git(*words: str) -> str:
    """Return what a command of Git prints."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text of several paragraphs."""
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|>#]|\d+\.) ?)", text):
        for one in SENTENCE.split(" ".join(paragraph.split())):
            if len(one.split()) >= SHORTEST:
                yield one


def docstrings(text: str) -> Iterator[str]:
    """Yield the sentences of a file's docstrings, and of the strings that describe its constants and fields."""
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield from sentences(node.value.value)


def comments(text: str) -> Iterator[str]:
    """Yield the sentences of a file's comments; lines of comments that follow each other are one text."""
    lines: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#( type:| noqa|!| fmt| pyright)", token.string):
            lines.append((token.start[0], token.string.lstrip("# ")))
    joined = ""
    for number, (at, words) in enumerate(lines):
        joined = f"{joined} {words}" if number and at == lines[number - 1][0] + 1 else f"{joined}\n\n{words}"
    yield from sentences(joined)


def page(text: str) -> Iterator[str]:
    """Yield the sentences of a page without its code and tables."""
    text = re.sub(r"^( *)```.*?^ *```", "", text, flags=re.M | re.S)
    yield from sentences(re.sub(r"^((\||#|<|---).*|.* \| .*)$", "", text, flags=re.M))


def drawn(commit: str, since: str, count: int) -> Iterator[tuple[str, str, str]]:
    """Yield the sample: its kind, where it stands, the sentence."""
    files = git("ls-tree", "-r", "--name-only", commit).splitlines()
    found: dict[str, list[tuple[str, str]]] = {
        kind: [] for kind in ("docstring", "comment", "message", "page")
    }
    for name in files:
        reads = [("docstring", docstrings), ("comment", comments)] if name.endswith(".py") else []
        if name.startswith("docs/") and name.endswith(".md"):
            reads = [("page", page)]
        elif not name.startswith(CODE):
            continue
        text = git("show", f"{commit}:{name}")
        for kind, read in reads:
            found[kind] += [(name, one) for one in read(text)]
    messages = git("show", f"{commit}:tests/fixtures/messages.md")
    found["message"] = [
        ("messages", line[2:].strip("`")) for line in messages.splitlines() if line.startswith("- `")
    ]
    found["commit"] = [
        ("git log", line)
        for line in git("log", "--no-merges", "--format=%s", f"{since}..{commit}").splitlines()
    ]
    draw = random.Random(commit)
    for kind, every in found.items():
        for where, sentence in draw.sample(every, min(count // len(found), len(every))):
            yield kind, where, sentence


def main() -> None:
    """Print a sample as a numbered list."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="HEAD", help="the commit that is read")
    parser.add_argument("--since", default="3c2a2e6", help="subjects of the commits after this one are read")
    parser.add_argument("--count", type=int, default=120, help="sentences")
    given = parser.parse_args()
    commit = git("rev-parse", given.commit).strip()
    print(f"seed {commit}")
    for number, (kind, where, sentence) in enumerate(drawn(commit, given.since, given.count), 1):
        print(f"{number:3}. [{kind}, {where}] {sentence}")


if __name__ == "__main__":
    main()
