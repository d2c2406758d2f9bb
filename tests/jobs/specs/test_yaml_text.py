"""Specs are read by libyaml, and mean what PyYAML's own parser reads in them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import yaml

from jobs.specs import yaml_text
from tests.conftest import ROOT

CHARACTERS = " \n\t:-,[]{}#&*!|>'\"%@`?a1.~<=\\é\ufeff\u2028\x85\r0e+_"
FORMS = """\
a: &x {b: 1, "q\\u00e9": 'it''s'}
c: *x
d: {<<: *x, e: [1, 2.5e3, ~]}
f: |
  x
  y
g: >-
  z

  q
? h
: - i
  - - j
    - k: no
"""


def read(loader: Any, text: str) -> tuple[str, list[Any]] | None:
    """Return what a parser reads, with its lines; None: it refuses the text."""
    try:
        found = yaml_text._compose_document(loader(text))
    except (yaml_text.YamlError, yaml.YAMLError, ValueError):
        return None
    return repr(found.value), list(found.lines.items())


@pytest.mark.skipif(not yaml.__with_libyaml__, reason="this PyYAML has no libyaml")
def test_both_parsers_read_damaged_specs_alike_or_the_slow_one_decides() -> None:
    draw = random.Random(3)
    texts = [FORMS, *(path.read_text() for path in sorted((ROOT / "models").glob("*.yaml")))]
    fast, slow = yaml_text._LOADERS
    alike = 0
    for _ in range(1500):
        letters = list(draw.choice(texts))
        for _ in range(draw.randint(1, 3)):
            place = draw.randrange(len(letters))
            letters[place : place + draw.randint(0, 1)] = draw.choice(["", draw.choice(CHARACTERS)])
        text = "".join(letters)
        if yaml_text._READ_OTHERWISE.search(text) or (found := read(fast, text)) is None:
            continue
        assert found == read(slow, text), text
        alike += 1
    assert alike > 300


@pytest.mark.parametrize(
    "text",
    [
        "[" * 60 + "]" * 60,
        "a: [" + "1, " * yaml_text.MOST_NODES + "1]",
        "[" * 100_000,
        "a:\n" + "\n".join(" " * depth + "a:" for depth in range(1, 600)),
    ],
)
def test_a_text_that_is_too_deep_or_too_large_is_refused(text: str) -> None:
    with pytest.raises(yaml_text.YamlError, match="nested too deeply|too large"):
        yaml_text.parse(text)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('a: 1\nb: "\\UFFFFFFFF"\n', 2),
        ('a: "\\U00110000"\n', 1),
        (f"%YAML {'9' * 5000}.1\n---\na: 1\n", 1),
    ],
)
def test_an_escape_or_a_number_beyond_yaml_is_a_problem_at_its_line(text: str, line: int) -> None:
    with pytest.raises(yaml_text.YamlError, match="beyond what YAML allows") as found:
        yaml_text.parse(text)
    assert found.value.line == line
