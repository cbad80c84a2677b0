"""The name under which a server serves its model: ``/v1/models``, asked once, bounded, with the headers that it wants."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ...errors import ServerError, UsageError
from ...forensics.collect.engine_metrics import read_page
from ...forensics.device_state import Unread
from .completion_stream import scrub, shown_url

__all__ = ["served_model"]

_TIMEOUT_S = 10.0


def served_model(base_url: str, headers: Mapping[str, str] | None = None, *, timeout_s: float = _TIMEOUT_S) -> str:
    """The first model's id, within ``timeout_s`` seconds in all, whatever the server drips. UsageError: no HTTP address.
    ServerError: no answer, or none that names a model."""
    shown = shown_url(base_url)
    if not shown:
        raise UsageError(
            f"--url {base_url.rpartition('@')[2][:120]}: not an HTTP address", help_text="For example --url http://127.0.0.1:8000"
        )
    url = f"{shown}/v1/models"
    page = read_page(base_url, "/v1/models", timeout_s=timeout_s, headers=headers)
    if isinstance(page, Unread):
        why = scrub(page.why, headers or {})
        raise ServerError(f"{url} does not answer: {why}", help_text="Is the server up? dsv4-repro why")
    status, body = page
    if status != 200:
        wants = " It wants a key: set VLLM_API_KEY." if status in (401, 403) else ""
        raise ServerError(f"{url} answers with status {status}", help_text=f"Is that a vLLM server?{wants}")
    try:
        name = json.loads(body)["data"][0]["id"]
    except (KeyError, IndexError, TypeError, ValueError, RecursionError):
        name = None
    if not isinstance(name, str) or not 0 < len(name) < 4096:
        raise ServerError(f"{url} names no model", help_text="Is that a vLLM server? Name it: --model NAME")
    return name
