"""LoRA adapters whose slots are chosen token by token inside one graph."""

from graphpass.text.lora.adapters import AdapterBatch, LoraAdapters, LoraModel

__all__ = ["AdapterBatch", "LoraAdapters", "LoraModel"]
