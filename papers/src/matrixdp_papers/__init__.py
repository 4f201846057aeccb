"""Reproductions of the papers behind matrixdp: studies, rivals, datasets, networks, composition theorems, claims."""
