"""Former module of `StreamTrigger`, for one release: tasks that were deferred before the move name this path."""

from .supervision.trigger import StreamTrigger

__all__ = ["StreamTrigger"]
