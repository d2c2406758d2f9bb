"""The streaming query of a generation: source, operator, sinks, its driver, and the export of its state."""
