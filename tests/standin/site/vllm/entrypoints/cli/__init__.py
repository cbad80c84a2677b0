"""Not vLLM: tests/standin."""
