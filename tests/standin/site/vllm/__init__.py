"""Not vLLM: the stand-in of tests/standin under its name, for tests that start ``python -m vllm…``."""

__version__ = "0.23.0+standin"
