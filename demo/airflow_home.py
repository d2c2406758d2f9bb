"""Make the demo's Airflow: `python -m demo.airflow_home`, with Airflow configured by the environment.

It is `airflow db migrate`, then `airflow dags reserialize`, in one process. The DAGs are read in once here
because two DAG runs that begin together would both want to write them first.
"""

from __future__ import annotations

COMMANDS = (["db", "migrate"], ["dags", "reserialize"])


def make() -> None:
    """Make the database and read the DAGs in."""
    from airflow.cli.cli_parser import get_parser

    parser = get_parser()
    for command in COMMANDS:
        arguments = parser.parse_args(command)
        arguments.func(arguments)


if __name__ == "__main__":
    make()
