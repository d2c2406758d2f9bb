"""Print what users rely on as JSON: `python scripts/interface.py`.

Commands with their options and defaults, columns of the tables with their types, fields of a spec with their types and
defaults. `tests/test_interface.py` compares it with the interface of an earlier release.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import reference
import typer

from jobs.cli import VERBS
from jobs.core.command import build_application
from jobs.specs.model_spec import ModelSpec
from jobs.storage.dictionary import TABLES

DEEPEST = 12
"""Sections of a spec that contain themselves are followed so far."""


def list_commands() -> dict[str, dict[str, str]]:
    """Return the default of each option (`required` if there is none) by command."""
    app = build_application()
    for name, verb in VERBS.items():
        verb.add_to(app, name)
    root: Any = typer.main.get_command(app)
    leaves = [("", root)]
    leaves += [leaf for name, one in root.commands.items() for leaf in reference.list_leaves(name, one)]
    return {
        name: {
            option: "required" if one.required else str(reference.format_default(one)).strip("`")
            for one in command.params
            if one.name != "help"
            for option in (
                [*one.opts, *one.secondary_opts] if one.param_type_name != "argument" else [one.name]
            )
        }
        for name, command in leaves
    }


def list_columns() -> dict[str, dict[str, str]]:
    """Return the type of each column by table."""
    return {kind: reference.types_of(kind) for kind in TABLES}


def list_fields(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the types and the default of each field of a spec, by its path in the JSON schema."""
    return dict(_walk(schema, schema, "", ()))


def _walk(
    schema: Mapping[str, Any], node: Mapping[str, Any], path: str, within: tuple[str, ...]
) -> Iterator[tuple[str, Any]]:
    """Yield the fields below a node; a section that contains itself is not entered again."""
    reference_to = node.get("$ref")
    if reference_to is not None:
        if reference_to in within or len(within) > DEEPEST:
            return
        name = reference_to.rpartition("/")[2]
        yield from _walk(schema, schema["$defs"][name], path, (*within, reference_to))
        return
    for many in ("anyOf", "oneOf", "allOf"):
        for one in node.get(many, ()):
            yield from _walk(schema, one, path, within)
    for name, one in node.get("properties", {}).items():
        at = f"{path}.{name}".strip(".")
        yield at, {"default": one.get("default"), "required": name in node.get("required", ())}
        yield from _walk(schema, one, at, within)
    if isinstance(node.get("items"), dict):
        yield from _walk(schema, node["items"], f"{path}[]", within)
    if isinstance(node.get("additionalProperties"), dict):
        yield from _walk(schema, node["additionalProperties"], f"{path}{{}}", within)
    for value in [*node.get("enum", ()), *([node["const"]] if "const" in node else [])]:
        yield f"{path} = {value}", True


def describe_interface() -> dict[str, Any]:
    """Return the commands, the columns of the tables and the fields of a spec."""
    return {
        "commands": list_commands(),
        "columns": list_columns(),
        "fields": list_fields(ModelSpec.model_json_schema()),
    }


if __name__ == "__main__":
    print(json.dumps(describe_interface(), indent=0, sort_keys=True))
