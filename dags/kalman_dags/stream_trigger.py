"""The former place of `StreamTrigger`: tasks that were deferred before it moved name this path. For one release."""

from .supervision.trigger import StreamTrigger

__all__ = ["StreamTrigger"]
