"""The state of one bucket of keys: its storage, and its changes by rows. Batch, stream, replay and offline share it."""
