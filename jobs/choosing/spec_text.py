"""Write the found model as a spec with comments, and check the spec by loading it as every command does."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

from jobs.choosing.model_finding import ModelFinding
from jobs.choosing.ranking import Ranking
from jobs.choosing.rhythm import format_span
from jobs.choosing.search import LEVEL
from jobs.core.errors import UserError
from jobs.core.report import format_count
from jobs.landing.values.number_reading import format_setting
from jobs.specs.model_spec import DEFAULT_MISSING, ModelSpec
from jobs.specs.yaml_text import format_flow
from jobs.state.kernel import load_checked_spec


def format_spec(name: str, input: str, found: ModelFinding) -> str:
    """Return the spec as text: every chosen field, with the reason for the choice."""
    time, rhythm, keys = found.roles.time, found.rhythm, found.keys
    lines = [
        f"# Written by `kalman-pipeline init --input {shlex.quote(input)}`: what was found in the files, and why. Edit "
        "it freely.",
        f"name: {name}",
        "version: 1",
        f"key: {format_flow(keys.columns)}{_format_margin(keys.why)}",
    ]
    if keys.from_name is not None:
        lines.append(
            f"key_from_name: {format_flow(keys.from_name)}{_format_margin('the value is the name of the file')}"
        )
    lines += _format_files(found)
    lines.append(
        f"time: {format_flow(time.written)}"
        + (_format_margin("the columns make the time together") if time.parts else "")
    )
    if time.time_format is not None:
        lines.append(f"time_format: {json.dumps(time.time_format)}")
    if found.spec.time_zone != "UTC":
        lines.append(f"time_zone: {found.spec.time_zone}")
    lines += [
        "time_unit: "
        f"{rhythm.unit}{_format_margin(f'the usual step is {format_span(rhythm.step)} ({rhythm.regular:.0%} of all)')}",
        *_format_comment(_format_rhythm(found)),
        f"measurement: {format_flow([one.name for one in found.measurements])}",
    ]
    if len(found.spec.missing_values) > len(DEFAULT_MISSING):
        lines.append(f"missing_values: {json.dumps(found.spec.missing_values, ensure_ascii=False)}")
    lines += [*_format_refused(found), *_format_ranking(found), *_format_model(found)]
    if rhythm.repeats:
        lines += [
            f"# {rhythm.repeats:,} rows repeat key and time of another; each counts, unless the first one does:",
            "# duplicates: {action: drop}",
        ]
    lines.append(
        "sinks: {latest: true}" + _format_margin("forecast starts from the live stream's newest states")
    )
    return "\n".join(lines) + "\n"


def _format_files(found: ModelFinding) -> list[str]:
    """Return the settings that readers need for the files."""
    files = found.files
    said = files.model_dump(exclude_defaults=True)
    if not said:
        return []
    if files.wide is not None:
        said["wide"] = {name: value for name, value in said["wide"].items() if value}
    why = "the files have no header; rename the columns here" if files.columns else ""
    if files.wide is not None:
        each = "series" if files.wide.time is None else "time"
        why = f"a column for each {each}: each filled cell is a row"
    return [format_setting(said) + (_format_margin(why) if why else "")]


def _format_rhythm(found: ModelFinding) -> str:
    rhythm = found.rhythm
    words = []
    if rhythm.gaps:
        words.append(
            f"{rhythm.gaps:,} pauses are longer, up to {format_span(rhythm.longest)}: the state moves by "
            f"the time that passed"
        )
    if found.season is not None:
        words.append(
            f"a season of {found.season.name} stands out, {found.season.peak:.0f} times its background"
        )
    return "; ".join(words)


def _format_refused(found: ModelFinding) -> list[str]:
    refused = list(found.roles.refused.items())[:30]
    others = [(name, reason) for name, reason in refused if name not in found.keys.columns]
    lines = [" ".join(f"#   {name}: {reason}".splitlines()) for name, reason in others]
    return ["# Other columns:", *lines] if lines else []


def _format_ranking(found: ModelFinding) -> list[str]:
    """Return the ranking as a comment."""
    ranking = found.choice.ranking
    lines = [
        f"# Structures by the log-likelihood of a held-out row ({ranking.keys:,} series, {ranking.rows:,} rows), "
        "against the best:"
    ]
    chosen = set(found.choice.names)
    for one in ranking.scores:
        mark = "  <- chosen" if one.name in chosen else ""
        lines.append(f"#   {one.name:<22} {0.0 - one.behind:+.3f} +- {one.error:.3f}{mark}")
    return [*lines, *_format_comment(explain_choice(found))]


def explain_choice(found: ModelFinding) -> str:
    """Explain the choice in at most three short sentences."""
    names, ranking = found.choice.names, found.choice.ranking
    if len(set(names)) > 1:
        each = zip((one.name for one in found.measurements), names, strict=True)
        return "chosen: " + ", ".join(f"{name} for {measurement}" for measurement, name in each)
    why = "as --structure asks" if found.choice.is_wanted else explain_structure(ranking, names[0])
    return f"chosen: {names[0]}, {why}"


def explain_structure(ranking: Ranking, name: str) -> str:
    """Explain why a structure is chosen, from its place in the ranking."""
    one, best = ranking.of(name), ranking.best
    if one is best:
        rest = [other for other in ranking.equals if other is not one]
        return "the best" + (
            f"; it cannot be told apart from {', '.join(other.name for other in rest)}" if rest else ""
        )
    if one.name == LEVEL and not ranking.may_replace_the_simplest(best):
        losers = round((1 - best.at_least) * ranking.keys)
        return (
            f"the simplest. {best.name} is better on average ({one.behind:.3f} a row), but worse for {losers:,} of "
            f"{format_count(ranking.keys, 'series', '')}. To take it: --structure {shlex.quote(best.name)}"
        )
    if not one.is_apart:
        return f"the simplest of those that cannot be told apart from {best.name}"
    return f"{one.behind:.3f} a row behind {best.name}"


def _format_model(found: ModelFinding) -> list[str]:
    composed, robust = found.final.composed, found.choice.robust
    several = len(found.series.keys) > 1
    of = f"the medians of {len(found.series.keys):,} keys" if several else "the values learned from its rows"
    lines = [
        "filter: linear",
        f"states: {format_flow(composed.states)}",
        *_format_process(composed.process, of),
    ]
    observation: dict[str, Any] = {"R": composed.R}
    if len(found.measurements) > 1:
        observation = {"H": composed.H, **observation}
    lines += [
        f"observation: {format_flow(observation)}",
        "initial: {diffuse: true}" + _format_margin("nothing is known of a key before its first rows"),
        f"learn: {{parameters: {format_flow(composed.learned)}, scope: key}}"
        + _format_margin("what pretrain learns, for each key"),
    ]
    if robust is not None:
        lines.append(
            f"robust: {format_flow(robust)}" + _format_margin("rows far from their prediction count less")
        )
    return lines


def _format_process(process: dict[str, Any], of: str) -> list[str]:
    if "parts" not in process:
        return [f"process: {format_flow(process)}{_format_margin(of)}"]
    parts = (f"    - {format_flow(part)}" for part in process["parts"])
    return ["process:", f"  kind: {process['kind']}", "  parts:", *parts]


def _format_comment(text: str) -> list[str]:
    return [f"# {text}"] if text else []


def _format_margin(comment: str) -> str:
    return f"    # {comment}"


def write_spec(path: Path, text: str, is_forced: bool) -> ModelSpec:
    """Load a spec as every command does, then write it atomically.

    Raises:
        UserError: the file exists and may not be replaced, or cannot be written; or the spec is refused.
    """
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.part.yaml")
    try:
        temporary.write_text(text)
        spec = load_checked_spec(temporary)
        if is_forced:
            os.replace(temporary, path)
        else:
            os.link(temporary, path)  # fails if another process has written this file since the check
    except FileExistsError:
        raise UserError(exists(path)) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        temporary.unlink(missing_ok=True)
    return spec.with_folder(str(path.parent))


def exists(path: Path) -> str:
    """Return the error message for a spec file that exists already."""
    return f"{path}: is there already; give another --output, or replace it with --force"
