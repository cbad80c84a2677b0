"""The lines that cuda-gdb 12.x and 13.x print, as patterns, and what its refusals mean. Data only."""

from __future__ import annotations

import re

DIM = r"\((\d{1,10}),\s*(\d{1,10}),\s*(\d{1,10})\)"
HEX = r"0x[0-9a-fA-F]{1,16}"
#: Numbers are bounded: no more than 4300 digits can be made a number, and none of these has more than twenty.
FOCUS = re.compile(
    rf"CUDA kernel (\d{{1,20}}), grid (-?\d{{1,20}}),(?: cluster {DIM},)? block {DIM}, thread {DIM}, "
    r"device (\d{1,9}), sm (\d{1,9}), warp (\d{1,9}), lane (\d{1,9})"
)
DEVICE = re.compile(r"^\s*(?:\*\s*)?(\d{1,4})\s+(\S.{0,300}?)\s{1,100}sm_(\d{1,4})[a-z]?\s+(\d{1,9})\s+\d+\s+\d+\s+\d+\s+0x")
KERNEL = re.compile(
    r"^\s*(?:\*\s*)?(\d{1,20})\s+\S+\s+(\d{1,20})\s+(-?\d{1,20})\s+(Active|Pending|Sleeping|Running|Suspended)\s+"
    rf"{HEX}\S*\s+{DIM}\s+{DIM}\s+(?:{DIM}\s+)?(\S.*)$"
)
FRAME = re.compile(rf"^#0\s+(?:({HEX}) in )?(.{{1,2000}}?)<<<{DIM},\s*{DIM}>>>")
HERE = re.compile(rf"^({HEX}) in (.{{1,2000}}?)<<<{DIM},\s*{DIM}>>>")
KERNEL_HEAD = re.compile(r"^\s*Kernel (\d{1,20})\s*$")
COALESCED = re.compile(rf"^\s*(?:\*\s*)?{DIM}\s+{DIM}\s+(\d{{1,20}})\s+([a-z]+)\b")
BLOCK = re.compile(rf"^\s*(?:\*\s*)?{DIM}\s+([a-z]+)\s+(\d{{1,9}})\s+(\d{{1,9}})\b")
SM_HEAD = re.compile(r"^\s*Device (\d{1,9}) SM (\d{1,9})(?: Warp (\d{1,9}))?\s*$")
WARP = re.compile(rf"^\s*(?:\*\s*)?(\d{{1,3}})\s+(0x[0-9a-fA-F]{{8}})\s+(0x[0-9a-fA-F]{{8}})\s+({HEX})\s+(\d{{1,20}})\s+(.*)$")
LANE = re.compile(rf"^\s*(?:\*\s*)?(\d{{1,2}})\s+(active|divergent|inactive|exited)\s+({HEX})\s+{DIM}")
REGISTER = re.compile(r"^(UR|UP|R|P)(\d{1,3})\s+(0x[0-9a-fA-F]{1,8})(?:\s|$)")
PC = re.compile(rf"^pc\s+({HEX})\b")
WORDS = re.compile(rf"^({HEX})(?:\s+<[^>]*>)?:((?:\s+0x[0-9a-fA-F]{{8}})+)\s*$")
CODE = re.compile(
    rf"^\s*(?:(?:=>|\*>)\s*)?{HEX}\s*(?:<([^>]{{1,4000}}?)(?:\+\d+)?>\s*)?:\s*(?:@!?U?P\w\s+)?[A-Z][A-Z0-9]{{1,15}}[ .;,]?"
)
PRINTED = re.compile(r"\b([A-Za-z_][A-Za-z0-9_]{2,40}) = (-?\d{1,20}|0x[0-9a-fA-F]{1,16})\b")
VALUE = re.compile(r"^\$\d+ = ")
#: Our own script's count of the rows it was shown.
COUNTED = re.compile(r"^dsv4-repro: kernel (\d{1,6}): (\d{1,9}) blocks resident\b")
COMMAND = re.compile(r"^\(cuda-gdb\) (.*)$")
READS = re.compile(rf"^(?:print|p|output)(?:/\w)? \*?\(?\*?\(@global[^)]*\*\)\s*({HEX})")
READS_PARAMETERS = re.compile(r"^x/\d+\w* \$_cuda_const_bank\(0,\s*(0x[0-9a-fA-F]+|\d+)\)")
DETACHED = re.compile(r"\(process (\d{1,10})\) detached|Detaching from program: .*process (\d{1,10})\b")
EXCEPTION = re.compile(r"CUDA Exception: ([^\r\n]{1,200})|received signal (CUDA_EXCEPTION_\d+[^\r\n]{0,100})")
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

PTRACE = "run as root, or sysctl kernel.yama.ptrace_scope=0; Docker: --cap-add=SYS_PTRACE; Kubernetes: SYS_PTRACE in capabilities"
#: Refusals: what they say, what they mean, the remedy.
REFUSALS = (
    ("ptrace: Operation not permitted", "device state", "the kernel refused ptrace", PTRACE),
    ("is already traced by process", "device state", "another debugger holds the process", "end it: its pid stands in the line"),
    ("ptrace: No such process", "device state", "the process was gone", ""),
    ("No CUDA kernels", "kernels", "the debugger saw none: wrong process or rank, too early, or truly none", "attach to each rank"),
    ("No CUDA devices", "devices", "the debugger saw none in this process", "attach to the worker process that holds the GPU"),
    ("cudbgApiAttach", "device state", "the debugger could not attach to the CUDA driver", "use the driver's own cuda-gdb version"),
    ("hit an internal error while attaching", "device state", "the debugger failed while attaching", "use a newer cuda-gdb"),
    ("could not allocate operating system resources for attaching", "device state", "the debugger failed while attaching",
     "free file handles and /tmp"),
    ("CUDBG_ERROR_", "part of the device state", "the debugger's interface reported an error", ""),
)  # fmt: skip
