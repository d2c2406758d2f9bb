"""One bucket of keys: how its state is stored, and how rows change it. Batch, stream, replay and offline share it."""
