"""Saved starts: a directory of artifacts, and what has to be equal for one to be used. See Note [Saved starts]."""
