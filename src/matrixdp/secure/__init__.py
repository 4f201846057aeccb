"""How noise is drawn: entropy, exact tables on grids, and the kernels for CPUs and CUDA devices."""
