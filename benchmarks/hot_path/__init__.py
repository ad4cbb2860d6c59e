"""kvpool's hot paths against the MooncakeStore connector of the installed vLLM: ``python -m benchmarks.hot_path``."""
