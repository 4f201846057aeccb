"""The papers' task-specific rivals for histograms and principal components, each with a guarantee of its own.

They are for studies: noise is drawn in floating point, and every guarantee is that of the mechanism on real numbers.
Unlike a noise law they cannot be certified as they stand (MOD-SULQ can, and is), so each function states in its
docstring what it guarantees, and the tests audit it.
"""
