"""Struct layouts, thresholds and constant-bank bases of the persistent radix top-k family.

Source of the facts: the public headers of vLLM 0.20.1 to 0.33.0 (``persistent_topk.cuh``, ``topk.cu``), checked by compiling them
for sm_90 and sm_120 and by reading the metadata of the shipped cubins (``EIATTR_PARAM_CBANK``, ``EIATTR_KPARAM_INFO``).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

__all__ = [
    "FIXED_SMEM_LARGE",
    "HIST2048_THRESHOLD",
    "PARAMS_SIZE",
    "RADIX_THRESHOLD",
    "RELEASE_COUNT",
    "ROW_STATE",
    "ROW_STATE_SIZE",
    "SMEM_MEDIUM",
    "THREADS_PER_CTA",
    "TOP_K_VALUES",
    "VECTOR_WIDTHS",
    "WORKSPACE_BYTES",
    "Field",
    "TopKParams",
    "param_base",
    "row_state_field",
]

#: Threads of every CTA of the kernel (``__launch_bounds__(1024, 2)``).
THREADS_PER_CTA = 1024
#: Rows with more candidates than this take the multi-CTA radix path; peers leave when the host's max_seq_len is at most this.
RADIX_THRESHOLD = 32768
#: Rows up to this length take the 2048-bin histogram path of one CTA.
HIST2048_THRESHOLD = 8192
#: Fixed part of the shared memory of the radix path, bytes.
FIXED_SMEM_LARGE = 2080
#: Shared memory of the single-CTA medium path, bytes: the least that a launch asks for.
SMEM_MEDIUM = 35968
#: What vLLM's caller allocates for row states, bytes (RADIX_TOPK_WORKSPACE_SIZE).
WORKSPACE_BYTES = 1 << 20
TOP_K_VALUES = (512, 1024, 2048)
VECTOR_WIDTHS = (4, 2, 1)

#: A count that satisfies every later ``counter >= (phase + 1) * ctas_per_group`` of the launch in which it is written (measured
#: on an H200: the kernel retires 0.7 ms after the write).
RELEASE_COUNT = 0x3FFFFFFF


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a device structure: byte offset from its start, size in bytes, C type."""

    name: str
    offset: int
    size: int
    ctype: str


#: RadixRowState, one per CTA group.
ROW_STATE: tuple[Field, ...] = (
    Field("histogram", 0, 3072, "uint32[3][256]"),
    Field("remaining_k", 3072, 4, "uint32"),
    Field("prefix", 3076, 4, "uint32"),
    Field("arrival_counter", 3080, 4, "int32"),
    Field("output_counter", 3084, 4, "int32"),
)
ROW_STATE_SIZE = 3088
ARRIVAL_COUNTER_OFFSET = 3080

PARAMS_SIZE = 56
_PARAMS = struct.Struct("<4Q6I")

#: Byte offset of the kernel parameters in constant bank 0, by compute capability major (read from shipped cubins; a cubin's own
#: EIATTR_PARAM_CBANK wins over this table).
_PARAM_BASES = {7: 0x160, 8: 0x160, 9: 0x210, 10: 0x380, 11: 0x380, 12: 0x380}


def param_base(sm: int) -> int | None:
    """Constant-bank byte offset of the parameters for an architecture such as 90 or 120, None if not known."""
    return _PARAM_BASES.get(sm // 10)


def row_state_field(offset: int) -> Field | None:
    """The row-state field that holds byte ``offset`` (0 to 3087), None outside."""
    for field in ROW_STATE:
        if field.offset <= offset < field.offset + field.size:
            return field
    return None


@dataclass(frozen=True, slots=True)
class TopKParams:
    """PersistentTopKParams: 56 bytes, four device pointers (uint64) and six uint32, in this order.

    ``input`` fp32 [num_rows, stride]; ``lengths`` int32 [num_rows]; ``output`` int32 [num_rows, top_k]; ``row_states``
    RadixRowState [groups]; ``stride`` and ``chunk_size`` in elements.
    """

    input: int
    output: int
    lengths: int
    row_states: int
    num_rows: int
    stride: int
    top_k: int
    chunk_size: int
    ctas_per_group: int
    max_seq_len: int

    def pack(self) -> bytes:
        """The 56 bytes as the kernel reads them."""
        return _PARAMS.pack(
            self.input, self.output, self.lengths, self.row_states,
            self.num_rows, self.stride, self.top_k, self.chunk_size, self.ctas_per_group, self.max_seq_len,
        )  # fmt: skip

    @classmethod
    def unpack(cls, raw: bytes) -> TopKParams:
        """From the first 56 bytes of ``raw``; ValueError if there are fewer."""
        if len(raw) < PARAMS_SIZE:
            raise ValueError(f"{len(raw)} bytes of kernel parameters, {PARAMS_SIZE} expected")
        return cls(*_PARAMS.unpack(raw[:PARAMS_SIZE]))

    @property
    def plausible(self) -> bool:
        """Whether the values can come from the launcher: guards against another kernel's 56-byte parameters."""
        return (
            self.top_k in TOP_K_VALUES
            and 0 < self.num_rows < 1 << 24
            and 0 < self.stride < 1 << 31
            and 0 < self.ctas_per_group <= 4096
            and 0 < self.chunk_size < 1 << 31
        )
