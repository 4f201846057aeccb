"""Noise laws and covariances. They describe noise and draw single samples; they claim nothing about privacy."""

from matrixdp.distributions.base import NoiseLaw, generator
from matrixdp.distributions.gaussian import Gaussian
from matrixdp.distributions.product import Product
from matrixdp.distributions.quantile_search import QuantileSearch
from matrixdp.distributions.spherical import Spherical, radius_moment

__all__ = ["Gaussian", "NoiseLaw", "Product", "QuantileSearch", "Spherical", "generator", "radius_moment"]
