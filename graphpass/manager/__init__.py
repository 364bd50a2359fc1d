"""Running a whole model over its graphs: dispatch, pad, replay, cut."""

from graphpass.manager.graphed import GraphedModel, graphed
from graphpass.manager.masking import zero_padding

__all__ = ["GraphedModel", "graphed", "zero_padding"]
