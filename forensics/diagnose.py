"""From a device state, a core dump or a debugger transcript to the diagnosis document. The only place here that disassembles.

``diagnose_state`` is what a run calls with the state that its collectors saw; ``diagnose_dump`` and ``diagnose_transcript`` read a
file first. The judging itself is ``judge``; this module brings code and memory to it and writes down what came of it.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol

from ..errors import CubinError, DeadlineError, TranscriptError, UnavailableError
from ..kernels.abi import RADIX_THRESHOLD, param_base
from ..kernels.sasstext import SassLine
from . import limits
from .barrier import GridView, view_grid
from .chain import ChainInput, StepFacts, causal_chain
from .corefile import CoreDump, Fault, open_core
from .device_state import DeviceState, GridState, Unread
from .identity import base_name, readable_name
from .judge import Judged, judge
from .ledger import abi_params
from .printed import by_name
from .records import Diagnosis, Evidence, UnreadItem, Verdict, Wait, Window, outcome_of

__all__ = ["Experiment", "diagnose_dump", "diagnose_state", "diagnose_transcript"]

Ground = Literal["server", "gpu", "cpu", "process", "file"]
Word = Callable[[int], int | None]

#: Exception words of a core dump and the cause they are.
_FAULT_CAUSES = {"illegal": "illegal-access", "misaligned": "misaligned", "cluster": "cluster-target"}


class Experiment(Protocol):
    """The outcome of writing a large count into the counter (``repro.ground.UnwedgeOutcome``)."""

    @property
    def attempted(self) -> bool: ...
    @property
    def retired(self) -> bool: ...
    @property
    def milliseconds(self) -> float | None: ...


def diagnose_state(
    state: DeviceState,
    *,
    ground: Ground,
    step: StepFacts | None = None,
    evidence: Sequence[Evidence] = (),
    unwedge: Experiment | None = None,
    hung: bool | None = None,
    host: str = "",
    memory: Word | None = None,
    faults: Sequence[Fault] = (),
    extra: Mapping[str, Any] | None = None,
) -> Diagnosis:
    """The diagnosis of one device state.

    ``hung``: whether somebody watched and saw no progress; by default true on the grounds that watch (server, gpu, cpu).
    ``memory``: reads a u32 of device memory of the same moment, None where it cannot. ``host``: what is known of the host, as one
    sentence. ``extra``: further keys of the document. Needs no device; disassembly comes from the cache or nvdisasm, and where
    neither is there the diagnosis says so in ``unread``.
    """
    watched = ground in ("server", "gpu", "cpu") if hung is None else hung
    read = _reader(state, memory)
    unread = list(state.unread)
    views = [view_grid(state, grid, _lines(grid, unread), read) for grid in state.grids]
    views = _with_printed(state, views)
    found = _fault(faults) or judge(state, views, hung=watched)
    if not found.waits and found.class_ in ("unknown", "gpu-kernel-stuck"):
        found = by_name(state, views, hung=watched) or found
    signature, why_not = _signature(found, state)
    view = found.view or next((item for item in views if item.ctas), None)
    seen = _chain_input(state, found, view, read, host, unwedge)
    unread += _without_params(views, unread)
    items = tuple(UnreadItem(what=item.what, why=item.why, remedy=item.remedy) for item in dict.fromkeys(unread))
    items += _missing_words(found)
    document: dict[str, Any] = {
        "outcome": outcome_of(found.class_),
        "ground": ground,
        "verdict": Verdict.model_validate({
            "class": found.class_, "cause": found.cause, "confidence": found.confidence, "signature": signature,
            "identity": found.identity, "sentence": found.sentence,
        }),
        "waits": _interpreted_waits(found.waits) if state.origin == "interpreted" else found.waits,
        "ledger": found.ledger,
        "chain": causal_chain(seen, step, _cited(evidence)),
        "window": _window(step),
        "unread": items,
        "evidence": tuple(evidence),
        "next": _next(found, view, state),
        "rules": [{"cause": rule.cause, "judgement": rule.judgement, "reasons": list(rule.reasons)} for rule in found.rules],
        "candidates": list(found.candidates),
        "notes": list(found.notes),
        "signature_reasons": list(why_not),
        **(extra or {}),
    }  # fmt: skip
    return Diagnosis.model_validate(document)


def diagnose_dump(
    path: str | Path, *, ground: Ground = "file", step: StepFacts | None = None, hung: bool | None = None
) -> Diagnosis:
    """The diagnosis of a GPU core dump. Raises CoreFileError if the file is no such dump; partial dumps give partial answers."""
    with open_core(path) as dump:
        evidence = (_dump_evidence(Path(path), dump),)
        extra = {"dump": dict(dump.metadata)} if dump.metadata else {}
        return diagnose_state(
            dump.state, ground=ground, step=step, evidence=evidence, hung=hung, memory=dump.word, faults=dump.faults, extra=extra
        )  # fmt: skip


def diagnose_transcript(path: str | Path, *, ground: Ground = "file", hung: bool | None = None) -> Diagnosis:
    """The diagnosis of a file with a cuda-gdb transcript. Raises TranscriptError if there is nothing of cuda-gdb in it."""
    from .cuda_gdb_text import read_transcript

    try:
        with Path(path).open("rb") as stream:
            raw = stream.read(limits.MAX_TRANSCRIPT_BYTES + 1)
    except OSError as error:
        raise TranscriptError(f"cannot be read: {error.strerror}", path=str(path)) from None
    found = read_transcript(raw.decode("utf-8", "replace"), source=str(path), origin="reported")
    evidence = Evidence(
        id="cuda-gdb", kind="cuda-gdb-transcript", path=str(path), sha256=hashlib.sha256(raw).hexdigest(), origin="reported"
    )
    return diagnose_state(found.state, ground=ground, evidence=(evidence,), hung=hung)


# ---------------------------------------------------------------------------------------------------------------------------------
# What the judge is given


def _interpreted_waits(waits: Sequence[Wait]) -> tuple[Wait, ...]:
    """What is read from a register of a device is measured; of the interpreter's, interpreted."""
    keys = ("address_status", "value_status", "target_status")
    changed = []
    for wait in waits:
        known = {key: "interpreted" for key in keys if (wait.model_extra or {}).get(key) == "measured"}
        changed.append(wait.model_copy(update=known) if known else wait)
    return tuple(changed)


def _reader(state: DeviceState, memory: Word | None) -> Word:
    def read(address: int) -> int | None:
        found = state.memory.get(address)
        return found if found is not None or memory is None else memory(address)

    return read


def _lines(grid: GridState, unread: list[Unread]) -> Sequence[SassLine] | None:
    """A grid's machine code as instructions; None (and why, in ``unread``) if it cannot be had or nobody stands in it."""
    if grid.code is None or not grid.ctas:
        return None
    from ..kernels.disasm import disassemble

    try:
        return disassemble(grid.code.cubin, grid.code.function).lines
    except (CubinError, DeadlineError, UnavailableError) as error:
        unread.append(Unread(f"machine code of {readable_name(grid.kernel)}", str(error), error.help_text))
    return None


def _with_printed(state: DeviceState, views: list[GridView]) -> list[GridView]:
    """A counter printed by name belongs to the one block that waits, if only one does and its value is not known."""
    counter = state.printed.get("arrival_counter")
    spinning = [(view, cta) for view in views for cta in view.spinning()]
    if counter is None or len(spinning) != 1:
        return views
    view, cta = spinning[0]
    waits = tuple(
        replace(wait, live=counter & 0xFFFFFFFF, name="arrival_counter") if wait.value is None else wait for wait in cta.waits
    )
    changed = replace(view, ctas=tuple(replace(cta, waits=waits) if item is cta else item for item in view.ctas))
    return [changed if item is view else item for item in views]


def _without_params(views: Sequence[GridView], unread: Sequence[Unread]) -> list[Unread]:
    """The parameters of the kernel whose layout is known, where the evidence has none and its reader did not say so."""
    said = any(item.what.startswith("parameters of") for item in unread)
    return [
        Unread(
            "parameters of " + readable_name(view.grid.kernel), "not in this evidence", "cuda-gdb: x/14xw $_cuda_const_bank(0,BASE)"
        )
        for view in views
        if view.ctas and view.grid.params is None and "persistent_topk_kernel" in view.grid.kernel and not said
    ]


def _fault(faults: Sequence[Fault]) -> Judged | None:
    if not faults:
        return None
    first = next((fault for fault in faults if fault.lane is not None), faults[0])
    cause = next((cause for word, cause in _FAULT_CAUSES.items() if word in first.what), None)
    where = f"block {first.block[0]}, warp {first.warp}, lane {first.lane}" if first.block is not None else f"SM {first.sm}"
    return Judged("gpu-fault", cause, "high" if cause else "medium", f"the GPU recorded an exception at {where}: {first.what}")


# ---------------------------------------------------------------------------------------------------------------------------------
# What is written down


def _relative_signature(found: Judged, state: DeviceState, kernel: str) -> tuple[str | None, tuple[str, ...]] | None:
    """The published case of another cause than the defining one's; None where that cause has none of its own."""
    base = base_name(kernel)
    vllm = "persistent_topk_kernel" in kernel
    if found.cause in ("reset-race", "missing-fence"):
        case = {"reset-race": "flashinfer-3610", "missing-fence": "aiter-4007"}[found.cause]
        if found.cause == "reset-race" and base.startswith("Radix") and found.confidence != "low":
            return case, ()
        return None, (f"the cause is that of {case}, the kernel is {base}: the same mechanism, not that case",)
    if found.cause not in ("not-co-resident", "init-race") or found.facts is None:
        return None
    if not vllm:
        return None, (f"the kernel is {base}, not persistent_topk_kernel",)
    if found.confidence == "low":
        return None, (f"the cause {found.cause} is only likely",)
    if found.cause == "init-race":
        return "vllm-41444", ()
    # One group, alone on the device and larger than it: #41834. Several groups, or slots that another kernel holds: #41189.
    resident = [grid for grid in state.grids if grid.ctas]
    alone = len(resident) == 1 and len(found.ledger) == 1
    return ("vllm-41834" if alone else "vllm-41189"), ()


def _signature(found: Judged, state: DeviceState) -> tuple[str | None, tuple[str, ...]]:
    """The published case all of whose conditions hold; else None and the conditions that do not, or were not read."""
    if found.class_ != "gpu-spin-barrier" or found.view is None or found.facts is None or found.primary is None:
        return None, ()
    kernel = found.view.grid.kernel
    other = _relative_signature(found, state, kernel)
    if other is not None:
        return other
    named = f"the kernel is {base_name(kernel)}, not persistent_topk_kernel"
    reasons = []
    params = abi_params(found.view)
    if "persistent_topk_kernel" not in kernel:
        reasons.append(named)
    if found.cause != "peer-left":
        reasons.append(f"the cause is {found.cause or 'not known'}, not peer-left")
    if found.facts.value != 1:
        reasons.append(f"the counter is {found.facts.value}, not 1")
    if params is None:
        reasons.append("max_seq_len was not read")
    elif params.max_seq_len > RADIX_THRESHOLD:
        reasons.append(f"max_seq_len {params.max_seq_len} > {RADIX_THRESHOLD}")
    return (None, tuple(reasons)) if reasons else ("vllm-51593", ())


def _chain_input(
    state: DeviceState, found: Judged, view: GridView | None, read: Word, host: str, unwedge: Experiment | None
) -> ChainInput:
    seen: Literal["measured", "interpreted"] = "interpreted" if state.origin == "interpreted" else "measured"
    if view is None:
        return ChainInput(seen, host=host)
    params = abi_params(view)
    row = length = None
    if params is not None and found.facts is not None and found.model is not None:
        row, length = _row_length(params.lengths, params.num_rows, found.facts.group, found.model.count, read)
    early = found.cause == "peer-left" and params is not None and params.max_seq_len <= RADIX_THRESHOLD
    disagreement = ""
    if early and params is not None and found.facts is not None:
        disagreement = (
            f"peers decide once, from max_seq_len {params.max_seq_len} <= {RADIX_THRESHOLD}, and return; the leader decides per "
            f"row, from device memory: block {found.facts.spinning[0]} took the path that all of its group must take"
        )
    elif found.cause is not None:
        rule = next((rule for rule in found.rules if rule.cause == found.cause), None)
        disagreement = "; ".join(rule.reasons) if rule is not None else found.sentence
    return ChainInput(
        seen, readable_name(view.grid.kernel), view.grid.grid_dim, params, row, length, found.cause, early, disagreement,
        _equation_text(found), _experiment(unwedge), host,
    )  # fmt: skip


def _row_length(lengths: int, rows: int, group: int, groups: int, read: Word) -> tuple[int | None, int | None]:
    """The row that a group handles, if it handles only one, and its length from memory (int32)."""
    if groups < 1 or group >= rows or group + groups < rows:
        return None, None
    word = read(lengths + 4 * group)
    return group, None if word is None else word - (1 << 32) if word >> 31 else word


def _equation_text(found: Judged) -> str:
    if not found.waits:
        return ""
    wait = next((item for item in found.waits if found.primary is not None and item.block == found.primary.block), found.waits[0])
    name = wait.state_field or "the polled word"
    where = f" at {wait.address}" if wait.address else ""
    target = "a target that was not read" if wait.target is None else str(wait.target)
    more = f" ({len(found.waits)} waits in all)" if len(found.waits) > 1 else ""
    value = "?" if wait.value is None else wait.value
    return f"{name}{where} is {value}, block {wait.block[0]} waits until it is {wait.comparison or 'met by'} {target}{more}"


def _experiment(unwedge: Experiment | None) -> str:
    if unwedge is None or not unwedge.attempted:
        return ""
    if not unwedge.retired:
        return "experiment: a large count was written into the counter, and the kernel did not retire"
    after = f" {unwedge.milliseconds:.2f} ms later" if unwedge.milliseconds is not None else ""
    return f"experiment: a large count was written into the counter, and the kernel retired{after}"


def _missing_words(found: Judged) -> tuple[UnreadItem, ...]:
    """Words of the equation that no source held."""
    if found.primary is None:
        return ()
    wait = found.primary
    missing = [
        word
        for word, known in (("address", wait.seen.address), ("value", wait.value), ("target", wait.seen.target))
        if known is None
    ]
    if not missing:
        return ()
    why = "the registers that hold it were not read, or its way through the loop is not understood"
    remedy = "cuda-gdb: focus on the lane that polls, then info registers"
    return tuple(UnreadItem(what=f"{word} of the wait", why=why, remedy=remedy) for word in missing)


def _window(step: StepFacts | None) -> Window:
    if step is None:
        return Window()
    return Window(
        live_requests=step.live_requests, rows=step.rows, graph_rows=step.graph_rows, padded_requests=step.padded_requests,
        reached=True,
    )  # fmt: skip


def _cited(evidence: Sequence[Evidence]) -> list[str]:
    """Ids of the evidence that shows the device; all of it if none says so."""
    device = [
        item.id for item in evidence if any(word in item.kind for word in ("core", "gdb", "row-state", "row_state", "device"))
    ]
    return device or [item.id for item in evidence]


def _next(found: Judged, view: GridView | None, state: DeviceState) -> str:
    """The cheapest next measurement."""
    if view is None:
        return "dsv4-repro autopsy PID --attach    # while it hangs; this evidence shows no kernel"
    params, sm = abi_params(view), state.devices.get(view.grid.device, ("", None, None))[1]
    base = param_base(sm) if sm else None
    if found.cause is not None and params is None and "persistent_topk_kernel" in view.grid.kernel:
        where = f"(0,{base:#x})" if base is not None else "(0,BASE)"
        return f"cuda-gdb -p PID -batch -ex 'x/14xw $_cuda_const_bank{where}'    # the kernel's parameters: group size, max_seq_len"
    if found.cause == "peer-left":
        return "dsv4-repro audit vllm==0.27.1    # is the build that you serve affected? its release, a wheel, or the server's PID"
    if found.cause is not None:
        return f"dsv4-repro list    # which scenario shows this cause, {found.cause}, and what repairs it"
    if found.class_ == "unknown" and view.ctas:
        return "dsv4-repro autopsy PID --attach    # a second look, 20 s later: the same PCs mean a deadlock"
    if found.primary is not None and found.primary.live is None and found.primary.seen.address is not None:
        address = f"{found.primary.seen.address:#x}"
        return f"cuda-gdb -p PID -batch -ex 'print *(@global int*){address}'    # the counter as memory holds it"
    if view.code is None and view.ctas:
        return "dsv4-repro autopsy FILE    # of a dump that holds the code: armed without skip_relocated_elf_images"
    return "dsv4-repro autopsy PID --attach    # a second look, 20 s later: what has moved since?"


def _dump_evidence(path: Path, dump: CoreDump) -> Evidence:
    stamp = dump.metadata.get("timestamp") or 0
    when = datetime.datetime.fromtimestamp(stamp, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if stamp else None
    origin: Literal["measured", "interpreted"] = "interpreted" if dump.state.origin == "interpreted" else "measured"
    return Evidence(id="dump", kind="gpu-core-dump", path=str(path), sha256=_sha256(path), origin=origin, when=when)


def _sha256(path: Path) -> str | None:
    try:
        if path.stat().st_size > limits.MAX_HASHED_BYTES:
            return None
        digest = hashlib.sha256()
        with path.open("rb") as stream:
            while piece := stream.read(1 << 20):
                digest.update(piece)
        return digest.hexdigest()
    except OSError:
        return None
