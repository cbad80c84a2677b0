"""Not vLLM: ``python -m vllm.entrypoints.cli.main serve …`` becomes tests/standin."""

import runpy
import sys
from pathlib import Path

STANDIN = Path(__file__).resolve().parents[4]


def main() -> None:
    """Run the stand-in with this process's arguments."""
    sys.argv[0] = str(STANDIN)
    runpy.run_path(str(STANDIN), run_name="__main__")


if __name__ == "__main__":
    main()
