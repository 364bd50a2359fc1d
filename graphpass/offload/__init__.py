"""Stores weights in host memory and copies them to the device ahead of the layers that read them."""

from graphpass.offload.offloader import WeightOffloader

__all__ = ["WeightOffloader"]
