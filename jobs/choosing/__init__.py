"""Choose a model for data: what its columns are, which structure predicts it best, and the spec that says so."""
