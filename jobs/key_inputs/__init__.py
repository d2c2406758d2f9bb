"""The table of key inputs: read at a version, pinned per micro-batch, joined to rows."""
