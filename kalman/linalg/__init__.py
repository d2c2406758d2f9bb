"""Small matrices of many keys, with the keys on the last axis: packing, factorisations, straight-line programs."""
