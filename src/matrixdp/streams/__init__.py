"""A value that is released again and again: running totals and windows of daily counts, with durable state."""

from matrixdp.streams.stream import Answer, Stream

__all__ = ["Answer", "Stream"]
