"""Gradients per record of each kind of layer, one file per kind; a rule is found by the layer's type.

A new layer gets a function decorated with `register`, in a file that is imported here.
"""

from matrixdp.learn.layers import convolution, embedding, linear, normalization
from matrixdp.learn.layers.registry import register, rule_for

__all__ = ["convolution", "embedding", "linear", "normalization", "register", "rule_for"]
