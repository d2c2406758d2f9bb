"""The record of the kills that were made, a JSON line each, and the table of them for docs/proofs.md.

python -m tests.jobs.soak.results var/kills.jsonl
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.jobs.soak.kills import BOTH, FREEZE, JAVA, KILL, PYTHON, VERBS

VARIABLE = "KALMAN_KILLS_RECORD"
MISSED, VIOLATED, BROKEN = "missed", "violated", "broken"


def path() -> Path:
    return Path(os.environ.get(VARIABLE) or "var/kills.jsonl")


def write(record: dict[str, Any]) -> None:
    """Append a record to the file of results."""
    path().parent.mkdir(parents=True, exist_ok=True)
    with path().open("a") as file:
        file.write(json.dumps(record) + "\n")


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines() if line.strip()]


def struck(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records of kills that were made; the others are of moments that came too late, and of `verify`."""
    return [one for one in records if "seed" in one and one["verdict"] not in (MISSED, BROKEN)]


def table(records: list[dict[str, Any]]) -> list[str]:
    """Return the table in Markdown: kills that were made, by verb, by how and whose, and what they left."""
    made = struck(records)
    kinds = [(how, victim) for how in (KILL, FREEZE) for victim in (PYTHON, JAVA, BOTH)]
    names = {(KILL, BOTH): "killed: both", (FREEZE, BOTH): "frozen: both"}
    heads = [
        names.get((how, victim), f"{'killed' if how == KILL else 'frozen'}: {victim}")
        for how, victim in kinds
    ]
    lines = [
        f"| verb | {' | '.join(heads)} | between two commits | in all | unharmed |",
        "|" + "---|" * (len(kinds) + 4),
    ]
    for verb in (*VERBS, None):
        mine = [one for one in made if verb in (None, one["verb"])]
        if not mine:
            continue
        by = Counter((one["how"], one["victim"]) for one in mine)
        aimed = sum(one["aim"] != "a random moment" for one in mine)
        good = sum(one["verdict"] != VIOLATED for one in mine)
        numbers = [*(by[kind] for kind in kinds), aimed, len(mine), good]
        lines.append(f"| {f'`{verb}`' if verb else '**all**'} | {' | '.join(map(str, numbers))} |")
    return lines


def summary(records: list[dict[str, Any]]) -> list[str]:
    """Return the table, and a line for each violation with the command that repeats it."""
    said = [
        f"- seed {one['seed']}: {one['verb']}, {one['how']} of {one['victim']}, {one['aim']}; "
        f"last seen: {one['seen'][-1:]}; {'; '.join(one['problems'])} "
        f"(`KALMAN_KILLS={one['seed']} python -m pytest -m soak tests/jobs/test_hundred_kills.py`)"
        for one in struck(records)
        if one["verdict"] == VIOLATED
    ]
    looks = [one for one in records if "verify" in one]
    said += [f"- world {one['world']}: verify: {one['said']}" for one in looks if one["verdict"] == VIOLATED]
    twice = [str(one["seed"]) for one in records if one.get("generations_made", 0) > 1]
    seeds = sorted({one["seed"] for one in struck(records)})
    verified = (
        f"verify looked at {len(looks)} worlds: {sum(one['estimates'] for one in looks):,} estimates and "
        f"{sum(one['states'] for one in looks):,} states equal to the bit; of "
        f"{sum(one['verify'] != 'equal' for one in looks)} it left a part out"
    )
    return [
        *table(records),
        "",
        f"seeds {seeds}",
        f"more than one generation made: {twice}",
        verified,
        "",
        *said,
    ]


if __name__ == "__main__":
    print("\n".join(summary(read(Path(sys.argv[1])))))
