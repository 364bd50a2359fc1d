"""Running a whole model over its graphs: dispatch, pad, replay, cut."""

from graphpass.manager.graphed import GraphedModel, graphed

__all__ = ["GraphedModel", "graphed"]
