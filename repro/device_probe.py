"""What the driver says about one GPU, asked in a process of its own: this process makes no CUDA context and cannot hang on one.

``python -m dsv4_repro.repro.device_probe ORDINAL`` prints the description as JSON; ``describe_gpu`` runs that under a deadline.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import errors
from ..errors import DeadlineError, NoDeviceError, ReproError

if TYPE_CHECKING:
    from ..kernels.devices import DeviceDescription

__all__ = ["describe_gpu", "description_of", "main"]


def description_of(document: Mapping[str, Any]) -> DeviceDescription:
    """From a driver's answer (``DeviceInfo.document()``); limits that the driver was not asked for are the table's."""
    from ..kernels.devices import DeviceDescription, arch_limits

    sm = int(document["sm"])
    limits = arch_limits(sm)
    return DeviceDescription(
        name=str(document["name"]),
        sm=sm,
        num_sms=int(document["sm_count"]),
        smem_per_sm=int(document["smem_per_sm"]),
        smem_optin=int(document["smem_optin"]),
        max_threads_per_sm=int(document["threads_per_sm"]),
        reserved_smem_per_cta=limits.reserved_smem_per_cta,
        registers_per_sm=limits.registers_per_sm,
        source=f"the driver ({document.get('driver_version', 'version unknown')})",
    )


def describe_gpu(ordinal: int, *, timeout_s: float = 60.0) -> DeviceDescription:
    """Ask the driver about GPU ``ordinal``. NoDriverError, NoDeviceError, DeadlineError, or what else the driver said."""
    package = sys.modules[__name__.partition(".")[0]]
    folder = str(Path(package.__path__[0]).absolute().parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))}
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(ordinal)],
            capture_output=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    except subprocess.TimeoutExpired as error:
        raise DeadlineError(
            f"the driver did not describe GPU {ordinal} within {timeout_s:g} s: it may be wedged",
            help_text="nvidia-smi; dsv4-repro doctor",
        ) from error
    try:
        answer = json.loads(done.stdout.decode("utf-8", errors="replace").strip().splitlines()[-1])
    except (ValueError, IndexError) as error:
        tail = done.stderr.decode("utf-8", errors="replace").strip()[-400:]
        raise NoDeviceError(f"the driver gave no description of GPU {ordinal} (status {done.returncode}): {tail}") from error
    if "error" in answer:
        kind = getattr(errors, str(answer["error"]), NoDeviceError)
        raise (kind if isinstance(kind, type) and issubclass(kind, ReproError) else NoDeviceError)(str(answer["message"]))
    return description_of(answer)


def main(argv: list[str]) -> int:
    """Print one JSON object: the description, or the error's type and text."""
    from ..kernels.driver import Driver

    try:
        driver = Driver()
        driver.init()
        answer: dict[str, Any] = driver.describe(int(argv[1])).document()
    except ReproError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
