"""Noise laws and how they are drawn."""
