"""Shared code of the DAG files: operators, launchers and trigger, common arguments, and pools."""
