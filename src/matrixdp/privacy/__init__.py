"""What noise guarantees: profiles, certificates."""
