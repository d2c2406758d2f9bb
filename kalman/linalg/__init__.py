"""Arrays of small matrices with keys on the last axis: packing, factorisations, and programs of straight-line arithmetic."""
