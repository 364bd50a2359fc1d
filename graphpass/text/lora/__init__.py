"""LoRA adapters under captured graphs: each token of a batch selects its adapter inside one graph."""

from graphpass.text.lora.adapters import AdapterBatch, LoraAdapters, LoraModel

__all__ = ["AdapterBatch", "LoraAdapters", "LoraModel"]
