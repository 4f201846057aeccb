"""Values released day by day, such as running totals and windows of daily counts, with durable state."""

from matrixdp.streams.answers import Answer
from matrixdp.streams.stream import Stream

__all__ = ["Answer", "Stream"]
