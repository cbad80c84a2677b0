"""The guard: the producer's clamp (vLLM #51538) at run time, for builds that lack it.

Whether a build lacks it is not taken from its version: its own function is run on the CPU on a batch with a padding slot, and the
negative length is there or it is not.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from .said import Said

__all__ = ["Guard", "clamp", "expansion_of_padding", "load_clamp"]

LIVE_LENGTH = 3059
_ROOM = 64


def expansion_of_padding(function: Any) -> list[int]:
    """Context lengths that the builder's ``_prepare_decode_tensors`` makes of one live request (3059) and one padding slot (0), two
    query tokens each, on the native path: unfixed ``[3058, 3059, -1, 0]``, fixed ``[3058, 3059, 0, 0]``.

    Runs on the CPU, on tensors made here. Raises whatever the function raises where it needs more than is given to it.
    """
    import torch

    def zeros(*shape: int) -> Any:
        return torch.zeros(shape, dtype=torch.int32, device="cpu")

    last: Exception | None = None
    # One buffer of rows, or one of (slots, next_n): both exist, and the function asserts which one it wants.
    for buffer in (zeros(_ROOM), zeros(_ROOM // 2, 2)):
        builder = SimpleNamespace(
            decode_seq_lens_buffer=buffer,
            offsets_buffer=torch.arange(2, dtype=torch.int32, device="cpu"),
            arange_buffer=torch.arange(_ROOM, dtype=torch.int32, device="cpu"),
            decode_lens_buffer=zeros(_ROOM),
            expanded_block_table_buffer=zeros(_ROOM, 4),
            expanded_seq_lens_buffer=zeros(_ROOM),
            vllm_config=SimpleNamespace(speculative_config=None),
            supports_varlen=False,
            use_flattening=False,
        )
        try:
            result = function(
                builder,
                seq_lens=torch.tensor([LIVE_LENGTH, 0], dtype=torch.int32, device="cpu"),
                block_table=zeros(2, 4),
                decode_lens=torch.tensor([2, 0], dtype=torch.int32, device="cpu"),
                decode_lens_cpu=torch.tensor([2, 0], dtype=torch.int32, device="cpu"),
                query_start_loc=torch.tensor([0, 2], dtype=torch.int32, device="cpu"),
                num_decodes=2,
                num_decode_tokens=4,
                use_native=True,
                next_n=2,
                max_decode_len=2,
            )
        except Exception as error:  # the function is another project's: whatever it raises is the answer "could not be run"
            last = error
            continue
        return [int(value) for value in result[0].flatten().tolist()]
    assert last is not None
    raise last


def clamp(result: Any, shared: Any) -> bool:
    """Clamp the expanded lengths at 0, in place: the graph reads this very buffer.

    ``shared`` is the caller's tensor of lengths, which is left alone (plain decode returns it). Returns whether it was clamped.
    """
    lengths = result[0]
    if lengths is shared or lengths.data_ptr() == shared.data_ptr():
        return False
    lengths.clamp_(min=0)
    return True


def load_clamp(lengths: Any) -> None:
    """Run the clamp once on memory of its own that is laid out as ``lengths``: same type, device, strides and alignment, which
    choose the kernel.

    CUDA loads a kernel at its first launch, and that waits for the device: armed for the first time while the GPU is wedged, the
    clamp blocked the driver and with it the rescue's copies (seen on an H200, vLLM 0.23.0).
    """
    import torch

    size, stride = tuple(lengths.shape), tuple(lengths.stride())
    extent = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True) if length)
    first = lengths.data_ptr() % 16 // lengths.element_size()
    room = torch.zeros(extent + first, dtype=lengths.dtype, device=lengths.device)
    torch.as_strided(room, size, stride, first).clamp_(min=0)


class Guard:
    """``active``: lengths are clamped. ``needed``: the build lacks the clamp (None: not known yet, or it cannot be told)."""

    def __init__(self, said: Said, *, wanted: bool) -> None:
        self._said = said
        self.wanted = wanted
        self.needed: bool | None = None
        #: Metadata builds that were clamped.
        self.clamped = 0
        self._loaded: set[tuple[Any, ...]] = set()

    def examine(self, function: Any) -> None:
        """Run the build's own function and say what follows."""
        try:
            lengths = expansion_of_padding(function)
        except Exception as error:
            self._said.feature(
                "guard", False, f"steps aside: the producer cannot be run by itself ({type(error).__name__}: {error})"
            )
            return
        live, padding = lengths[:2], lengths[2:]
        if live != [LIVE_LENGTH - 1, LIVE_LENGTH] or padding not in ([-1, 0], [0, 0]):
            self._said.feature(
                "guard", False, f"steps aside: the producer makes {lengths}, which is neither the defect nor the fix"
            )
            return
        self.needed = padding[0] < 0
        self._say()

    def _say(self) -> None:
        if self.needed is False:
            self._said.feature("guard", True, "does nothing: this build's producer clamps by itself")
        elif self.needed:
            state = "clamps" if self.wanted else "ready, not armed"
            self._said.feature("guard", True, f"{state}: this build's producer makes -1 of a padding slot")

    @property
    def active(self) -> bool:
        return self.wanted and self.needed is True

    def arm(self, wanted: bool, why: str) -> None:
        """Switch it on or off (the control file, the first rescue)."""
        if wanted != self.wanted:
            self.wanted = wanted
            self._said.event("guard on" if wanted else "guard off", why=why, effective=self.active)
            self._say()

    def step_aside(self, error: BaseException) -> None:
        """Something was not as expected: never again in this process."""
        self.wanted, self.needed = False, None
        self._said.feature("guard", False, f"steps aside: {type(error).__name__}: {error}")

    def apply(self, result: Any, shared: Any) -> bool:
        """Clamp if active. Returns whether it did."""
        if self.needed is True:
            self._load(result[0])
        done = self.active and clamp(result, shared)
        self.clamped += done
        return done

    def _load(self, lengths: Any) -> None:
        """The clamp's kernel, before it is needed; not while a graph is captured, which would keep it."""
        if lengths.device.type != "cuda":
            return
        key = (lengths.device, lengths.dtype, lengths.is_contiguous(), lengths.dim(), lengths.data_ptr() % 16)
        if key in self._loaded:
            return
        import torch

        if not torch.cuda.is_current_stream_capturing():
            self._loaded.add(key)
            load_clamp(lengths)
