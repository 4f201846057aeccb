"""The papers' task-specific rivals for histograms and principal components, each with its own guarantee.

They are for studies: noise is drawn in floating point, and every guarantee is that of the mechanism on real numbers.
Unlike noise laws they cannot be certified (except MOD-SULQ, which is), so each docstring states the guarantee, and the
tests audit it.
"""
