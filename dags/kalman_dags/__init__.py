"""What the DAG files share: the operator, the families' common parts, the pools."""
