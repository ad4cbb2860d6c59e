"""The installed vLLM as an oracle: its decisions only, no engine is started."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
