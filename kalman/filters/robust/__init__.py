"""Gates, Student-t and Huber updates, and adaptive noise."""
