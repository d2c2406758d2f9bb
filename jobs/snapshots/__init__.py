"""A snapshot: manifest, state rows, waiting rows and remembered ids; write, find, verify and seed a stream."""
