"""Delta tables, small files, checkpoints and positions: everything below the warehouse's root."""
