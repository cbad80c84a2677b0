"""How long and how much memory the autopsy of a GPU core dump takes: a dump of 6 MB, cold and warm, and one of 1 GB.

    python benchmarks/autopsy_dump.py [--folder DIR] [--keep]

The dumps are synthetic, in the driver's format: one hung block of the kernel written here and 6 MB of loaded modules; and a
device of 132 SMs with all 270 336 lanes resident (0.8 million sections), modules and memory up to 1 GB. Each autopsy is a process
of its own; wall time is from its start to its end, imports included; peak memory is its VmHWM.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dsv4_repro.forensics.corewriter import CoreOptions, write_core
from dsv4_repro.forensics.device_state import CodeImage, CtaState, DeviceState, GridState, LaneState, WarpState
from dsv4_repro.forensics.operands import Memory, operand
from dsv4_repro.forensics.waitloop import CodeView
from dsv4_repro.kernels.abi import ROW_STATE_SIZE, TopKParams
from dsv4_repro.kernels.build import builtin_image, compile_kernel
from dsv4_repro.kernels.disasm import disassemble

ENTRY = 0x7F12_3400_0000
ROW_STATES = 0x7FD6_7BE0_0000
LIMITS = {"6 MB, cold": (2.5, 200), "6 MB, warm": (1.0, 200), "1 GB": (5.0, 300)}

CHILD = """
import json, re, sys
from dsv4_repro.forensics.diagnose import diagnose_dump
found = diagnose_dump(sys.argv[1])
# not ru_maxrss: that survives exec and would be the parent's
peak = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
print(json.dumps({"class": found.verdict.class_, "cause": found.verdict.cause, "waits": len(found.waits), "peak_mib": peak}))
"""


def hung(blocks: int, ctas: int, *, registers: int) -> DeviceState:
    """``blocks`` resident blocks of a launch in groups of ``ctas``, all polling, every lane of every warp there."""
    image = builtin_image("unguarded", 90)
    code = disassemble(image.cubin, image.function)
    loop = CodeView(code.lines).wait_loops()[0]
    memory = operand(loop.address)
    assert isinstance(memory, Memory)
    base = int(memory.bases[0].name[1:])
    load, compare = code.at(loop.load), code.at(loop.compare)
    assert load is not None
    assert compare is not None
    barrier = next(line.offset for line in code.lines if line.offset > loop.branch and line.base == "BAR")
    resident = []
    for index in range(blocks):
        block = index if ctas > 2 else 12
        bank = [0x1000 + number for number in range(registers)]
        word = ROW_STATES + block // ctas * ROW_STATE_SIZE
        bank[base], bank[base + 1] = word & 0xFFFFFFFF, word >> 32
        bank[int(load.operands[0][1:])] = blocks
        bank[int(compare.operands[3][1:])] = ctas
        values = tuple(bank)
        warps = []
        for warp in range(32):
            pcs = [loop.load + 16 if warp == 0 and lane == 0 else barrier - 16 if warp == 0 else barrier + 16 for lane in range(32)]
            lanes = tuple(LaneState(n, (32 * warp + n, 0, 0), pc, values, 8, ENTRY + pc) for n, pc in enumerate(pcs))
            warps.append(WarpState(warp, 0xFFFFFFFF, 1 if warp == 0 else 0xFFFFFFFF, pcs[0], lanes, values[:63], ENTRY + pcs[0]))
        resident.append(CtaState((block, 0, 0), index % 132, tuple(warps), (0, 0, 0)))
    longest = 16384 if ctas == 2 else 262144
    params = TopKParams(0x7F00_1000, 0x7F00_2000, 0x7F00_3000, ROW_STATES, 8, longest, 512, 8192, ctas, longest)
    grid = GridState(
        0, 5, image.function, (16 if ctas == 2 else ctas, 1, 1), (1024, 1, 1), tuple(resident), params=params.pack(),
        code=CodeImage(image.cubin, image.function, ENTRY, 90),
    )  # fmt: skip
    return DeviceState("benchmark", "measured", (grid,), {0: ("NVIDIA H200", 90, 132)})


def modules(size: int) -> list[bytes]:
    """Cubins of kernels written here, repeated up to ``size`` bytes."""
    pool = [compile_kernel("patients.cu", 90).cubin, builtin_image("guard", 90).cubin, builtin_image("unguarded", 90, 1024).cubin]
    found: list[bytes] = []
    while sum(map(len, found)) < size:
        found.append(pool[len(found) % len(pool)])
    return found


def autopsy(path: Path, cache: Path) -> tuple[float, float, dict[str, object]]:
    """Wall seconds and peak MiB of one autopsy in a process of its own, and what it found."""
    environment = {**os.environ, "DSV4_REPRO_CACHE": str(cache)}
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", CHILD, str(path)], env=environment, capture_output=True, text=True, check=True)
    wall = time.monotonic() - started
    found = json.loads(done.stdout)
    return wall, found.pop("peak_mib"), found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the dumps are written (1 GB; default: a temporary folder)")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        small = write_core(folder / "small.nvcudmp", hung(1, 2, registers=32), CoreOptions(modules=modules(5 << 20)))
        print(f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}")
        rows: list[tuple[str, Path, str]] = [("6 MB, cold", small, f"cold{n}") for n in range(options.repeat)]
        rows += [("6 MB, warm", small, "cold0")] * options.repeat
        best: dict[str, tuple[float, float, dict[str, object]]] = {}
        for label, path, cache in rows:
            best[label] = min(best.get(label, (1e9, 0.0, {})), autopsy(path, folder / cache), key=lambda row: row[0])
        memory: dict[int, bytes | int] = {0x7000_0000_0000: 512 << 20}
        state = hung(264, 300, registers=64)
        large = write_core(folder / "large.nvcudmp", state, CoreOptions(modules=modules(260 << 20), memory=memory))
        del state
        for _ in range(options.repeat):
            best["1 GB"] = min(best.get("1 GB", (1e9, 0.0, {})), autopsy(large, folder / "cold0"), key=lambda row: row[0])
        for label, (wall, peak, found) in best.items():
            size = (small if label.startswith("6") else large).stat().st_size / 1e6
            most_s, most_mib = LIMITS[label]
            good = wall <= most_s and peak <= most_mib
            failed |= not good
            verdict = "within" if good else "OVER"
            print(f"{label}: {size:.1f} MB, {wall:.2f} s, {peak:.0f} MiB peak ({verdict} {most_s:g} s, {most_mib} MiB); {found}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
