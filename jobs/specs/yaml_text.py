"""Parse YAML with the numbers and booleans of YAML 1.2, without repeated keys, and find the line of every field."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

Path = tuple[str | int, ...]

DEEPEST = 50
"""Maximum depth of a document. The matrix of a mode within a part of a cascade is at depth ten."""
MOST_NODES = 20_000
"""Maximum number of values in a document. Three dense matrices for 80 states have 19,200 values."""

_TOO_DEEP = f"is nested too deeply: more than {DEEPEST} levels"
_TOO_LARGE = "is too large for a model spec"
_TAGS = {
    f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float", "null", "merge", "str", "seq", "map")
}


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed document: its value, and the line number (from 1) of each field, by the field's path."""

    value: Any
    lines: dict[Path, int]


_UNFIT = re.compile("[\0\ud800-\udfff]")
"""Characters that YAML can contain only as escapes: the null character, which ends a path, and surrogates."""


class YamlError(Exception):
    """A problem in YAML text: `line` from 1, `column` from 1 (0 if unknown), `problem`, and `path` of the field."""

    def __init__(self, problem: str, line: int, column: int = 0, path: Path = ()) -> None:
        super().__init__(problem)
        self.problem, self.line, self.column, self.path = problem, line, column, path


class _Composer(Composer):
    """Composer of a document's nodes, which limits their depth and number before the document is in memory."""

    _depth = _nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        self._nodes += 1
        if self._depth > DEEPEST or self._nodes > MOST_NODES:
            line = self.peek_event().start_mark.line + 1  # type: ignore[attr-defined]
            raise YamlError(_TOO_DEEP if self._depth > DEEPEST else _TOO_LARGE, line)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Loader(_Composer, yaml.SafeLoader):
    """PyYAML's parser, whose errors explain what is wrong in a text."""


_LOADERS: list[Any] = [_Loader]
_READ_OTHERWISE = re.compile("[\t!?%\ufeff]|[|>][-+0-9]*#")
"""Texts that libyaml accepts and PyYAML refuses: tabs between values, `?` in a flow, a comment right after `|`."""
if yaml.__with_libyaml__:
    from yaml.cyaml import CParser  # pyright: ignore[reportAttributeAccessIssue]

    class _FastLoader(_Composer, CParser, SafeConstructor, Resolver):
        """libyaml's parser, which is four times faster than PyYAML's."""

        def __init__(self, text: str) -> None:
            CParser.__init__(self, text)
            _Composer.__init__(self)
            SafeConstructor.__init__(self)
            Resolver.__init__(self)

    _LOADERS.insert(0, _FastLoader)

# PyYAML follows YAML 1.1, in which `1.0e7` is text, `no` is false, `12:30` is 750 and 2013-01-01 is a date.
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
for _class in _LOADERS:
    _class.yaml_implicit_resolvers = {}
    for _tag, _pattern, _first in _SIMPLE:
        _class.add_implicit_resolver(_tag, re.compile(_pattern), list(_first))


def _parse_decimal(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    if len(text) > 40 or not re.fullmatch("[-+]?[0-9]+", text):
        raise _build_type_error("whole number", node)
    return int(text)  # YAML 1.1 would read 010 as 8


def _parse_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    text = str(loader.construct_scalar(node)).lower().replace(".inf", "inf").replace(".nan", "nan")
    try:
        return float(text)
    except ValueError as error:
        raise _build_type_error("number", node) from error


def _parse_bool(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> bool:
    text = str(loader.construct_scalar(node)).lower()
    if text not in ("true", "false"):
        raise _build_type_error("true or false", node)
    return text == "true"


def _build_type_error(what: str, node: yaml.ScalarNode) -> YamlError:
    text = node.value if len(node.value) <= 40 else node.value[:37] + "..."
    mark = node.start_mark
    return YamlError(f"{text!r} is not a {what}".replace("a true", "true"), mark.line + 1, mark.column + 1)


for _class in _LOADERS:
    _class.add_constructor("tag:yaml.org,2002:bool", _parse_bool)
    _class.add_constructor("tag:yaml.org,2002:int", _parse_decimal)
    _class.add_constructor("tag:yaml.org,2002:float", _parse_float)


def parse(text: str) -> Document:
    """Parse one YAML document.

    Raises:
        YamlError: the text is not YAML, repeats a key, contains a cycle, is too deep or too large, or uses a tag for a
            type other than text, numbers, lists and mappings.
    """
    if not _READ_OTHERWISE.search(text):
        for loader in _LOADERS[:-1]:
            # Below, PyYAML reports the problem.
            with suppress(YamlError, yaml.YAMLError, ValueError, OverflowError):
                return _compose_document(loader(text))
    loader: Any = None
    try:
        loader = _Loader(text)
        return _compose_document(loader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(f"has a character that YAML does not allow (code {error.character})", line) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(str(error.problem or error.context or error).split())
        raise YamlError(problem, mark.line + 1 if mark else 1, mark.column + 1 if mark else 0) from error
    except (ValueError, OverflowError) as error:  # "\U00110000", or the version in a %YAML line
        raise YamlError("has an escape or a number beyond what YAML allows", loader.line + 1) from error


def _compose_document(loader: Any) -> Document:
    try:
        node = loader.get_single_node()
        if node is None:
            return Document(None, {(): 1})
        lines: dict[Path, int] = {}
        _walk(node, (), lines, set())
        return Document(loader.construct_document(node), lines)
    finally:
        loader.dispose()


def _walk(node: yaml.Node, path: Path, lines: dict[Path, int], above: set[int]) -> None:
    line = node.start_mark.line + 1
    lines.setdefault(path, line)
    if id(node) in above:
        raise YamlError("contains itself through an alias", line, path=path)
    if len(lines) > 2 * MOST_NODES:  # each alias adds the content that it repeats
        raise YamlError(_TOO_LARGE, line, path=path)
    if len(path) > DEEPEST:
        raise YamlError(_TOO_DEEP, line, path=path)
    _check_node(node, line, path)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise YamlError(
                    "has a list or a mapping as the name of a field", key.start_mark.line + 1, path=path
                )
            _check_node(key, key.start_mark.line + 1, path)
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


def _check_node(node: yaml.Node, line: int, path: Path) -> None:
    if node.tag not in _TAGS:
        raise YamlError(
            f"has the tag {node.tag.rpartition(':')[2][:40]!r}, which a spec does not use", line, path=path
        )
    if isinstance(node, yaml.ScalarNode) and _UNFIT.search(node.value):
        raise YamlError("has a text with an escape that is no character", line, path=path)


_PLAIN = re.compile(r"[^\W\d](?:[\w.]*\w)?")
_NO_TEXTS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}
"""Words that some YAML readers do not read as a text but as another type."""


def format_flow(value: Any) -> str:
    """Return a value on one line that all readers of YAML 1.1 and 1.2 parse to the same value."""
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{format_flow(name)}: {format_flow(one)}" for name, one in value.items()) + "}"
        )
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_flow, value))}]"
    if isinstance(value, float):
        text = repr(value)
        return text.replace("e", ".0e") if "e" in text and "." not in text else text
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN.fullmatch(value) and value.casefold() not in _NO_TEXTS:
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(one if one.isprintable() else f"\\U{ord(one):08x}" for one in escaped) + '"'
