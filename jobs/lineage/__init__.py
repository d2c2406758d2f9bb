"""The live generation of a model, its lease, its compatibility with the deployed spec, and its start."""
