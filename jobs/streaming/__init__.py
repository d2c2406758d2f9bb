"""The streaming query of a generation: source, operator, sinks, driver, and the export of its state."""
