"""The ``cgpass`` backend of torch.compile: partition, compile, capture.

``torch.compile(model, backend="cgpass")`` finds it through its entry point; no import is needed. This package is the
only place where partition, compile and capture meet.
"""

from cgpass.explain import explain
from cgpass.pipeline import backend
from graphpass.options import options

__all__ = ["backend", "explain", "options"]
