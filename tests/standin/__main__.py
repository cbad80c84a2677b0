"""``python tests/standin``: the stand-in server, started by path."""

import importlib
import sys
from pathlib import Path

here = Path(__file__).resolve().parent
# The folder's own modules must not be importable without their package.
sys.path[:] = [str(here.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != here)]

if __name__ == "__main__":
    sys.exit(importlib.import_module("standin.server").main(sys.argv[1:]))
