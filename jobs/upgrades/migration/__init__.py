"""Convert the states of one model version to the states of another."""
