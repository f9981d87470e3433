"""Weights into memory (extra: p2pdist[torch]): see `safetensors`."""

from p2pdist.load.tensors import safetensors

__all__ = ["safetensors"]
