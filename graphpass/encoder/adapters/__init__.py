"""Adapters: stock towers as encoders that whole-encoder graphs can run, found by the tower's class."""
