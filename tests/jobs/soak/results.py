"""The record of the kills that were made, a JSON line each, and tables of them.

python -m tests.jobs.soak.results var/kills.jsonl

Strikes at the state (`test_state_kills`) have records and a table of their own.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.jobs.soak.kills import BOTH, FREEZE, HANG, JAVA, KILL, PYTHON, VERBS
from tests.jobs.soak.state_kills import MOMENTS

VARIABLE = "KALMAN_KILLS_RECORD"
MISSED, VIOLATED, BROKEN = "missed", "violated", "broken"


def write(record: dict[str, Any]) -> None:
    """Append a record to the file of results."""
    usual = "var/state-kills.jsonl" if at_state(record) else "var/kills.jsonl"
    path = Path(os.environ.get(VARIABLE) or usual)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def at_state(record: dict[str, Any]) -> bool:
    return "order" in record


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines() if line.strip()]


def struck(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records of kills that were made; the others are of moments that came too late."""
    return [one for one in records if one["verdict"] not in (MISSED, BROKEN)]


def table(records: list[dict[str, Any]], by: str = "verb") -> list[str]:
    """Return the table in Markdown: kills that were made, by verb or aim, by how and whose, and what they left."""
    made = struck(records)
    kinds = [(how, victim) for how in (KILL, FREEZE) for victim in (PYTHON, JAVA, BOTH)]
    kinds += [(HANG, PYTHON)] if any(one["how"] == HANG for one in made) else []
    hows = {KILL: "killed", FREEZE: "frozen", HANG: "frozen, then killed with Java"}
    heads = [f"{hows[how]}: {victim}" for how, victim in kinds]
    lines = [
        f"| {by} | {' | '.join(heads)} | between two commits | in all | unharmed |",
        "|" + "---|" * (len(kinds) + 4),
    ]
    for name in (*(VERBS if by == "verb" else MOMENTS), None):
        mine = [one for one in made if name in (None, one[by])]
        if not mine:
            continue
        counts = Counter((one["how"], one["victim"]) for one in mine)
        aimed = sum(one["aim"] != "a random moment" for one in mine)
        good = sum(one["verdict"] != VIOLATED for one in mine)
        numbers = [*(counts[kind] for kind in kinds), aimed, len(mine), good]
        lines.append(f"| {f'`{name}`' if name else '**all**'} | {' | '.join(map(str, numbers))} |")
    return lines


def layouts(records: list[dict[str, Any]]) -> list[str]:
    """Return how many strikes at the state each layout and kind of micro-batch had, and how long one took."""
    made = struck(records)
    copies = {True: "with a copy", False: "without a copy", None: "by event time"}
    counts = {
        "order and partitions": Counter(f"{one['order']}, {one['partitions']}" for one in made),
        "struck driver": Counter(copies[one["copy"]] for one in made),
        "micro-batch": Counter(one["target"] for one in made),
    }
    seconds = sorted(sum(one["seconds"].values()) for one in made)
    return [
        *(
            f"{what}: {', '.join(f'{name}: {n}' for name, n in sorted(of.items()))}"
            for what, of in counts.items()
        ),
        f"seconds a strike: median {seconds[len(seconds) // 2]:.0f}, longest {seconds[-1]:.0f}",
    ]


def summary(records: list[dict[str, Any]]) -> list[str]:
    """Return the table, and a line for each violation with the command that repeats it."""
    states = any(map(at_state, records))
    test = "test_state_kills.py" if states else "test_hundred_kills.py"
    said = [
        f"- seed {one['seed']}: {one['verb']}, {one['how']} of {one['victim']}, {one['aim']}; "
        f"last seen: {one['seen'][-1:]}; {'; '.join(one['problems'])} "
        f"(`KALMAN_KILLS={one['seed']} python -m pytest -m soak tests/jobs/{test}`)"
        for one in struck(records)
        if one["verdict"] == VIOLATED
    ]
    looks = [one for one in struck(records) if "verify" in one]
    twice = [str(one["seed"]) for one in records if one.get("generations_made", 0) > 1]
    seeds = sorted({one["seed"] for one in struck(records)})
    verified = (
        f"verify looked {len(looks)} times: {sum(one['estimates'] for one in looks):,} estimates and "
        f"{sum(one['states'] for one in looks):,} states equal to the bit; of "
        f"{sum(one['verify'] != 'equal' for one in looks)} it left a part out"
    )
    return [
        *table(records, "aim" if states else "verb"),
        *(layouts(records) if states and struck(records) else []),
        "",
        f"seeds {seeds}",
        f"more than one generation made: {twice}",
        *([verified] if looks else []),
        "",
        *said,
    ]


if __name__ == "__main__":
    known = [
        one for one in read(Path(sys.argv[1])) if "seed" in one
    ]  # not of worlds that broke before a kill
    for states in (False, True):
        mine = [one for one in known if at_state(one) == states]
        if mine:
            print("\n".join(summary(mine)))
