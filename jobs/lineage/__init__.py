"""The live generation of a model, its lease, its start, its compatibility with the spec, and its keys' inputs."""
