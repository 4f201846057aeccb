"""The papers behind matrixdp, run again: studies, rivals, data sets, networks, composition theorems and claims."""
