"""YAML with the numbers and booleans of YAML 1.2, without repeated keys, and with the line of every field."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed document: its value and the line (from 1) of each field by path."""

    value: Any
    lines: dict[Path, int]


class YamlError(Exception):
    """A problem in YAML text: `line` from 1, `column` from 1 (0: unknown), `problem`, and `path` of the field."""

    def __init__(self, problem: str, line: int, column: int = 0, path: Path = ()) -> None:
        super().__init__(problem)
        self.problem, self.line, self.column, self.path = problem, line, column, path


class _Loader(yaml.SafeLoader):
    # PyYAML follows YAML 1.1, where `1.0e7` is text, `no` is false, `12:30` is 750 and 2013-01-01 is a date.
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


_SIMPLE = [
    ("tag:yaml.org,2002:bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("tag:yaml.org,2002:int", r"^[-+]?[0-9]+$", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        "-+0123456789.",
    ),
    ("tag:yaml.org,2002:null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:merge", r"^(?:<<)$", "<"),
]
for _tag, _pattern, _first in _SIMPLE:
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern), list(_first))


def _decimal(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))  # 1.1 would read 010 as 8


def _float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    return float(str(loader.construct_scalar(node)).lower().replace(".inf", "inf").replace(".nan", "nan"))


_Loader.add_constructor("tag:yaml.org,2002:int", _decimal)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)


def parse(text: str) -> Document:
    """Parse one YAML document.

    Raises:
        YamlError: the text is not YAML, repeats a key, refers to itself, or uses a tag for objects.
    """
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return Document(None, {(): 1})
        lines: dict[Path, int] = {}
        _walk(node, (), lines, set())
        return Document(loader.construct_document(node), lines)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(f"has a character that YAML does not allow (code {error.character})", line) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(str(error.problem or error.context or error).split())
        raise YamlError(problem, mark.line + 1 if mark else 1, mark.column + 1 if mark else 0) from error
    finally:
        if loader is not None:
            loader.dispose()


def _walk(node: yaml.Node, path: Path, lines: dict[Path, int], above: set[int]) -> None:
    line = node.start_mark.line + 1
    lines.setdefault(path, line)
    if id(node) in above:
        raise YamlError("contains itself through an alias", line, path=path)
    if len(lines) > 100_000:
        raise YamlError("is too large for a model spec", line, path=path)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise YamlError(
                    "has a list or a mapping as the name of a field", key.start_mark.line + 1, path=path
                )
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                where = key.start_mark
                raise YamlError(
                    f"'{key.value}' is given twice", where.line + 1, where.column + 1, path=(*path, key.value)
                )
            seen.add(key.value)
            lines[(*path, key.value)] = key.start_mark.line + 1
            _walk(value, (*path, key.value), lines, above | {id(node)})
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _walk(value, (*path, index), lines, above | {id(node)})
