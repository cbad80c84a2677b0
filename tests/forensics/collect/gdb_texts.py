"""What cuda-gdb shows of one waiting block on an H200, for the stand-ins of its Python module: kernels, blocks, code, registers."""

from __future__ import annotations

__all__ = ["BLOCKS", "POLL", "REGISTERS", "kernels"]

BLOCKS = "  BlockIdx   State    Dev SM\nKernel 0\n* (12,0,0) running   0    8\n"
#: The loop that waits on the arrival counter at R5:R6 + 0xc08.
POLL = """   0x7fd0 <k+7312>:\tIMAD.U32 R5,RZ,RZ,UR12
   0x7fe0 <k+7344>:\tIMAD.MOV.U32 R4,RZ,RZ,R6
   0x7ff0 <k+7376>:\tLDG.E.STRONG.GPU R4,desc[UR16][R4.64+0xc08]
=> 0x8000 <k+7392>:\tCCTL.IVALL
   0x8010 <k+7408>:\tYIELD
   0x8020 <k+7424>:\tISETP.GE.AND P0,PT,R4,R9,PT
   0x8030 <k+7440>:\t@!P0 BRA 0x7fd0
"""
REGISTERS = {"R4": 1, "R6": 0x7BE88A60, "R9": 2, "UR12": 0x7FD6, "R5": 0x7FD6}


def kernels(invocation: str) -> str:
    """``info cuda kernels`` with one kernel, launched as ``invocation``."""
    return (
        "  Kernel Parent Dev Grid Status SMs Mask GridDim BlockDim Invocation\n"
        f"*      0      -   0    5 Active 0x100 (16,1,1) (1024,1,1) {invocation}\n"
    )
