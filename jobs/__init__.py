"""The pipeline's verbs, and the rooms that they share."""
