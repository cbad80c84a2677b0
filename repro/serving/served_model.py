"""The name under which a server serves its model: ``/v1/models``, asked once, bounded, with the headers that it wants."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping

from ...errors import ServerError, UsageError

__all__ = ["served_model"]

_MOST = 1 << 20
_TIMEOUT_S = 10.0


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_arguments: object, **_more: object) -> None:
        return None


def served_model(base_url: str, headers: Mapping[str, str] | None = None, *, timeout_s: float = _TIMEOUT_S) -> str:
    """The first model's id. UsageError: no HTTP address. ServerError: no answer, or none that names a model."""
    if not base_url.startswith(("http://", "https://")):
        raise UsageError(f"--url {base_url[:120]}: not an HTTP address", help_text="For example --url http://127.0.0.1:8000")
    url = f"{base_url.rstrip('/')}/v1/models"
    try:
        request = urllib.request.Request(url, headers=dict(headers or {}))
        opener = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=timeout_s) as answer:
            document = json.loads(answer.read(_MOST))
        name = document["data"][0]["id"]
    except urllib.error.HTTPError as error:
        wants = " It wants a key: set VLLM_API_KEY." if error.code in (401, 403) else ""
        error.close()
        raise ServerError(f"{url} answers with status {error.code}", help_text=f"Is that a vLLM server?{wants}") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        raise ServerError(f"{url} does not answer: {why}"[:400], help_text="Is the server up? dsv4-repro why") from None
    except (KeyError, IndexError, TypeError, RecursionError):
        raise ServerError(f"{url} names no model", help_text="Is that a vLLM server? Name it: --model NAME") from None
    if not isinstance(name, str) or not 0 < len(name) < 4096:
        raise ServerError(f"{url} names no model", help_text="Is that a vLLM server? Name it: --model NAME")
    return name
