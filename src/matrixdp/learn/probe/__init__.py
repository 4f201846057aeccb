"""Whether a network treats each record on its own and stores none of them, as far as trying can tell."""
