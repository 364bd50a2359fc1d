"""Whole-encoder graphs: images of any size, packed and padded into a ladder of token budgets."""
