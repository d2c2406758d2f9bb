"""Code shared by the DAG files: the operators, their launchers and trigger, common arguments, and the pools."""
