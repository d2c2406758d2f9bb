"""Run fuzz cases and print what became of them: `python -m tests.fuzz [--cases N] [--seed N] [--kinds CSV gzip]`.

Every case has a seed of its own, so that one that failed can be run again by itself: `--only CSV:17`.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import tempfile
import zlib
from collections import Counter
from pathlib import Path

from tests.fuzz.judge import CLEAR, QUARANTINED, REFUSED, Wrong, judged
from tests.fuzz.kinds import HARD, KINDS

HARD_FILES = "hard files"
NAMES = [*KINDS, HARD_FILES]


def run(kind: str, number: int, seed: int) -> str:
    """Run one case and return its outcome. Raises Wrong."""
    chance = random.Random(f"{kind} {number} {seed}")
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        case = HARD[number % len(HARD)] if kind == HARD_FILES else KINDS[kind]
        return judged(lambda: case(chance, Path(folder)))


def main() -> int:
    """Run the cases; the exit code is 1 if one of them failed."""
    parser = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=50, help="of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", default=NAMES)
    parser.add_argument("--only", help="one case: KIND:NUMBER")
    parser.add_argument(
        "--journal", type=Path, help="where the case that runs is named, should the process be killed"
    )
    options = parser.parse_args()
    chosen = [(kind, number) for kind in options.kinds for number in range(options.cases)]
    if options.only:
        kind, _, number = options.only.rpartition(":")
        chosen = [(kind, int(number))]
    counts: dict[str, Counter[str]] = {}
    failures = 0
    for kind, number in chosen:
        if options.journal is not None:
            options.journal.write_text(f"{kind}:{number}")
        try:
            outcome = run(kind, number, options.seed)
        except Wrong as error:
            failures += 1
            outcome = "wrong"
            print(f"{kind}:{number}: {error}", file=sys.stderr, flush=True)
        counts.setdefault(kind, Counter())[outcome] += 1
    print(json.dumps({kind: dict(found) for kind, found in counts.items()}))
    columns = (CLEAR, REFUSED, QUARANTINED, "wrong")
    print(f"| {'kind':14} | {'cases':>6} | " + " | ".join(f"{one:>11}" for one in columns) + " |")
    for kind, found in counts.items():
        numbers = " | ".join(f"{found[one]:>11,}" for one in columns)
        print(f"| {kind:14} | {sum(found.values()):>6,} | {numbers} |")
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"seed {options.seed}, at most {most:,} MiB, checksum {zlib.crc32(repr(counts).encode()):08x}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
