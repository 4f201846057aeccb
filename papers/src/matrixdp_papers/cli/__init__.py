"""The commands that this distribution adds to `matrixdp`, one file each."""
