"""What a hostile or damaged dump may make the reader do, at most. Each limit is far above what hardware can hold.

A limit that is hit is never silent: the rest is reported as unread, with the count.
"""

from __future__ import annotations

#: Sections whose headers are read (with every lane of a full H200 resident: 0.9 million); 36 bytes of memory each.
MAX_SECTIONS = 3 << 19
#: Rows of one table of each kind.
MAX_DEVICES = 64
MAX_CONTEXTS = 1024
MAX_MODULES = 1 << 16
MAX_GRIDS = 4096
MAX_SMS = 1024
MAX_CTAS_PER_SM = 64
MAX_WARPS_PER_CTA = 64
MAX_LANES = 32
#: Resident CTAs and warps in all.
MAX_CTAS = 1 << 15
MAX_WARPS = 1 << 16
#: Up to this many resident lanes, registers of every lane are read; beyond, of one lane for each distinct PC of each warp.
MAX_FULL_LANES = 8192
#: Lanes kept in all.
MAX_KEPT_LANES = 1 << 16
#: Registers, uniform registers and predicates of one lane or warp.
MAX_REGISTERS = 256
#: Bytes of kernel parameters (the hardware's limit is 32764).
MAX_PARAMETERS = 1 << 16
#: An embedded cubin: bytes of its symbol and string tables, of one function's code, and sections.
MAX_IMAGE_SYMBOLS = 1 << 20
MAX_IMAGE_STRINGS = 64 << 20
MAX_FUNCTION_BYTES = 32 << 20
MAX_IMAGE_SECTIONS = 1 << 17
#: Embedded images whose symbols are searched for one function when the module table does not say which.
MAX_IMAGES_SEARCHED = 4096
#: Bytes of section and symbol tables of embedded images kept in all, and look-ups of an address in an image.
MAX_IMAGE_TABLES = 96 << 20
MAX_IMAGE_LOOKUPS = 20_000
#: Memory sections of a full dump that are indexed; up to this many bytes in all become part of the state word by word.
MAX_MEMORY_SECTIONS = 1 << 16
MAX_STATE_MEMORY = 1 << 16
#: Bytes hashed of a dump; a larger file carries no sha256 in the evidence list.
MAX_HASHED_BYTES = 4 << 30
#: Bytes of a debugger transcript that are read, and of one line.
MAX_TRANSCRIPT_BYTES = 64 << 20
MAX_TRANSCRIPT_LINE = 8192
#: Blocks that a coalesced line of a transcript may stand for.
MAX_TRANSCRIPT_BLOCKS = 1 << 16
#: Items of ``unread`` kept of one dump.
MAX_UNREAD = 200
#: Waits that a diagnosis lists, and instructions of a loop that are analysed.
MAX_WAITS = 4096
MAX_LOOP_INSTRUCTIONS = 4096
#: Blocks of a grid that a ledger names one by one.
MAX_LEDGER_BLOCKS = 1 << 16
