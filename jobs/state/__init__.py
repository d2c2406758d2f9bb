"""One bucket of keys: how its state is stored and how a micro-batch of rows changes it. The same code in batch, stream, replay and offline."""
