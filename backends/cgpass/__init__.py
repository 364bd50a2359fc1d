"""The ``cgpass`` backend of torch.compile: partition, compile, capture.

``torch.compile(model, backend="cgpass")`` loads it through its entry point; no import is needed. This package is the
only one that uses ``graphpass.regions``, ``graphpass.compile`` and ``graphpass.capture`` together.
"""

from cgpass.graphrecord import explain
from cgpass.pipeline import backend
from graphpass.options import options

__all__ = ["backend", "explain", "options"]
