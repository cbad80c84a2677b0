"""The agent is a distribution of its own: here it is imported from its folder, as it would be from PYTHONPATH."""

from __future__ import annotations

import sys
from pathlib import Path

AGENT = Path(__file__).resolve().parents[2] / "repro" / "agent"
if str(AGENT / "src") not in sys.path:
    sys.path.insert(0, str(AGENT / "src"))
