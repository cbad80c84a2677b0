"""GPU core dumps among the evidence, and the bridge from a read device state to the classifier's ``DeviceFacts``."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import EvidenceError, ReproError
from ..device_state import CtaState, DeviceState
from ..identity import readable_name
from ..records import UnreadItem
from .archive import Leaf
from .casefile import CaseFile, InputPart
from .device_text import family_of, read_device_text
from .facts import DeviceFacts, DeviceKernel, ResidentBlock
from .refs import Hints, Ref, Section, hints_of

if TYPE_CHECKING:
    from ..corefile import Fault

__all__ = ["facts_of_state", "judge_transcript", "judged", "read_core_leaf", "read_device_part"]

Word = Callable[[int], int | None]

_MAX_CORE = 8 << 30


def facts_of_state(state: DeviceState, ref: Ref, hints: Hints, exception: str, sample: int) -> DeviceFacts:
    """The resident grids of a state as facts. Blocks get their meaning from the diagnosis, not from here."""
    num_sms = next((sms for _, _, sms in state.devices.values() if sms), None)
    kernels = tuple(
        DeviceKernel(
            readable_name(grid.kernel), ref, grid.grid_dim, grid.block_dim, grid.device, str(grid.grid_id),
            None if grid.ctas is None else tuple(_block(cta) for cta in grid.ctas), (), family_of(grid.kernel),
        )
        for grid in state.grids
    )  # fmt: skip
    return DeviceFacts(
        ref, "interpreted" if state.origin == "interpreted" else "measured", hints.pid, hints.rank, kernels, exception, num_sms,
            sample,
        hints.repeat, tuple((item.what, item.why, item.remedy) for item in state.unread),
    )  # fmt: skip


def _block(cta: CtaState) -> ResidentBlock:
    pcs = tuple(sorted({warp.pc_offset for warp in cta.warps if warp.pc_offset is not None}))
    return ResidentBlock(cta.block_idx, "unknown", pcs[:16])


def read_core_leaf(leaf: Leaf, path: Path | None, case: CaseFile) -> None:
    """Read a GPU core dump; a packed one is first unpacked into a private temporary file (its name is not used). ``path``: where
    its very bytes lie, None if they come out of something."""
    assert leaf.stream is not None
    if path is not None:
        while leaf.stream.read(1 << 20):  # the file's hash is taken while it goes by
            continue
        _read_core(leaf, path, case)
        return
    with tempfile.NamedTemporaryFile(suffix=".nvcudmp") as copy:
        size = 0
        while block := leaf.stream.read(1 << 20):
            size += len(block)
            if size > _MAX_CORE:
                case.unread.append(
                    UnreadItem(what=leaf.path, why="a packed core dump of more than 8 GiB", remedy="unpack it first")
                )
                case.parts.append(InputPart(leaf.path, "", "unread", note="larger than 8 GiB"))
                return
            copy.write(block)
        copy.flush()
        leaf.size = size
        if trouble := leaf.trouble():
            case.unread.append(UnreadItem(what=leaf.path, why=trouble, remedy="get the whole file"))
        _read_core(leaf, Path(copy.name), case)


def _place(fault: Fault) -> str:
    """An exception and where the hardware recorded it; lanes of one warp are one place."""
    if fault.block is None:
        return f"{fault.what} on SM {fault.sm}"
    return f"{fault.what} in block {fault.block}" + (f", warp {fault.warp}" if fault.warp is not None else "")


def _read_core(leaf: Leaf, path: Path, case: CaseFile) -> None:
    from ..corefile import open_core

    ref = Ref(leaf.path, 0, max((leaf.size or 1) - 1, 0), "byte", "GPU core dump")
    hints = hints_of(leaf.path.rsplit("/", 1)[-1])
    sample = sum(1 for facts in case.devices if facts.origin == "measured")
    try:
        with open_core(path) as dump:
            exception = "; ".join(dict.fromkeys(_place(fault) for fault in dump.faults[:64]))
            facts = facts_of_state(dump.state, ref, hints, exception, sample)
            facts = judged(facts, dump.state, case, memory=dump.word, faults=dump.faults)
    except EvidenceError as error:
        why = str(error).removeprefix(f"{path}: ")  # a packed one lies under a name that nobody gave and that is gone afterwards
        case.unread.append(UnreadItem(what=leaf.path, why=why, remedy=error.help_text))
        case.parts.append(InputPart(leaf.path, "", "unread", ("GPU core dump",), note=why[:300]))
        return
    case.devices.append(facts)
    case.parts.append(InputPart(leaf.path, "", "read", ("GPU core dump",)))
    case.unread.extend(UnreadItem(what=what, why=why, remedy=remedy) for what, why, remedy in facts.unread)


def read_device_part(section: Section, case: CaseFile) -> None:
    """The light reading of a part, and beside it the full reader's judgement where that can read it."""
    before = len(case.devices)
    read_device_text(section, case)
    for index in range(before, len(case.devices)):
        case.devices[index] = judge_transcript(section, case, case.devices[index])


def judge_transcript(section: Section, case: CaseFile, facts: DeviceFacts) -> DeviceFacts:
    """Let the full reader of transcripts read the same part; what it cannot read stays with the light reading."""
    from ..cuda_gdb_text import looks_like_transcript, read_transcript

    if facts.kernels is None or not looks_like_transcript(section.text):
        return facts
    try:
        found = read_transcript(section.text, source=section.source, origin="reported")
    except EvidenceError:
        return facts
    return judged(facts, found.state, case)


def judged(
    facts: DeviceFacts, state: DeviceState, case: CaseFile, *, memory: Word | None = None, faults: Sequence[Any] = ()
) -> DeviceFacts:
    """The facts with the full judgement of the same state beside them, once as one look and once as a watched hang."""
    from ..diagnose import diagnose_state

    try:
        once = diagnose_state(state, ground="file", memory=memory, faults=faults)
        watched = diagnose_state(state, ground="file", memory=memory, faults=faults, hung=True)
    except ReproError as error:
        case.unread.append(UnreadItem(what=f"judgement of {facts.ref.source}", why=str(error), remedy=error.help_text))
        return replace(facts, state=state)
    return replace(facts, diagnosis=once, diagnosis_hung=watched, state=state)
