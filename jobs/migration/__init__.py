"""Turn the states of one model version into those of another."""
