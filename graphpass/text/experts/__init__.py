"""Mixtures of experts that keep the tokens of a batch apart."""
