"""Small matrices of many keys, the keys on the last axis: packing, factorisations, straight-line programs."""
