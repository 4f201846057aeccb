"""What noise guarantees: privacy profiles and certificates."""
