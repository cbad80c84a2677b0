"""The JSON files that the agents write beside their rings: read with bounds, by nothing but the standard library: a watch of weeks
reads them too (``agent_show`` has the models)."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from ..errors import EvidenceError
from ..forensics.evidence.opening import at_once

__all__ = ["MAX_STATUS", "read_document"]

MAX_STATUS = 1 << 20


def read_document(path: Path) -> dict[str, Any]:
    """A JSON object that an agent wrote, at most 1 MiB. Raises EvidenceError."""
    try:
        with open(path, "rb", opener=at_once) as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise EvidenceError("is not a regular file", path=str(path))
            raw = stream.read(MAX_STATUS + 1)
        document = json.loads(raw) if len(raw) <= MAX_STATUS else None
    except OSError as error:
        raise EvidenceError(f"cannot be read: {error.strerror or error}", path=str(path)) from None
    except (ValueError, RecursionError):
        raise EvidenceError("is not JSON", path=str(path)) from None
    if not isinstance(document, dict):
        raise EvidenceError("is no document of an agent", path=str(path))
    return document
