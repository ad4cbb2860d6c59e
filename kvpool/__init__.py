"""kvpool: share an LLM engine's KV cache through pluggable stores."""

__version__ = "0.1.0.dev0"
