# Source this in a cuda-gdb without Python ("source hang.gdb"): reads the kernel, block and thread in focus, live or from a core dump.
# dsv4-repro runs the same lines one by one, so that one that fails does not stop the rest. Changes nothing in the target.
set pagination off
set width 0
set height 0
set confirm off
set cuda coalescing off
info cuda devices
info cuda kernels
info cuda blocks
cuda thread (0,0,0)
info cuda warps
x/48i $pc-384
info registers
