"""dsv4-repro: reproduce, capture and explain GPU barrier deadlocks of LLM serving.

The packages and the direction of their imports (arrows go down only) are described in ``docs/whats-here.md``.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
