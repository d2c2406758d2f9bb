"""The stateful operators of a stream, and the wrappers around them."""
