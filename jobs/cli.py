"""The command `kalman-pipeline`: its verbs, in the order of a model's life.

The options, run and report of a verb are in `jobs/VERB.py`. The import of a verb loads no heavy module, so `--help` and
a mistyped option answer at once.
"""

from __future__ import annotations

from jobs import (
    compare,
    describe,
    doctor,
    estimate,
    export,
    filter,
    forecast,
    import_states,
    ingest,
    init,
    inputs,
    maintain,
    migrate,
    monitor,
    plot,
    pretrain,
    promote,
    quarantine,
    report,
    resume,
    retire,
    rollback,
    schema,
    skill,
    status,
    stop,
    stream,
    upgrade,
    verify,
)
from jobs.core.command import PROGRAM, build_application, leave_own_folder

VERBS = {
    "describe": describe.run,
    "init": init.run,
    "ingest": ingest.run,
    "inputs": inputs.run,
    "pretrain": pretrain.run,
    "estimate": estimate.run,
    "stream": stream.run,
    "monitor": monitor.run,
    "skill": skill.run,
    "stop": stop.run,
    "resume": resume.run,
    "export": export.run,
    "import": import_states.run,
    "migrate": migrate.run,
    "upgrade": upgrade.run,
    "promote": promote.run,
    "rollback": rollback.run,
    "retire": retire.run,
    "verify": verify.run,
    "maintain": maintain.run,
    "report": report.run,
    "status": status.run,
    "filter": filter.run,
    "forecast": forecast.run,
    "plot": plot.run,
    "compare": compare.run,
    "schema": schema.run,
    "quarantine": quarantine.run,
    "doctor": doctor.run,
}

app = build_application()
for name, verb in VERBS.items():
    verb.add_to(app, name)


def main() -> None:
    """Run the command."""
    leave_own_folder()
    app(prog_name=PROGRAM)


if __name__ == "__main__":
    main()
