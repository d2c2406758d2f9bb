"""The former module of `StreamTrigger`, kept for one release: tasks deferred before the move name this path."""

from .supervision.trigger import StreamTrigger

__all__ = ["StreamTrigger"]
