"""The table of inputs that belong to keys: read at a version, pinned per micro-batch, joined to rows."""
