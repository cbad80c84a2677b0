"""gpu-lost, gpu-fault, launch-refused, wrong-result: the device said no, or the answer is wrong.

Order matters: a fault that the log shows after the engine had already given up is a consequence of ending it. A Xid after which
tokens flowed again, or of a process that is no part of the engine, is old or foreign.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..evidence.facts import KernelEvent, LogEvent
from ..evidence.kernel_log import XID_FAULT, XID_LOST
from ..evidence.refs import Ref
from .base import FAIR, STRONG, WEAK, Finding, contradicted, supported, unknown
from .view import View

__all__ = ["rule_device_exception", "rule_launch_refused", "rule_lost_device", "rule_wrong_result", "rule_xid"]

_OURS = re.compile(r"vllm|python|pt_main|ray|sglang|Engine|Worker|trtllm|tritonserver", re.IGNORECASE)
_ILLEGAL = re.compile(
    r"illegal memory access|IllegalAddress|ILLEGAL_ADDRESS|Illegal Address|OUT_OF_RANGE|Out Of Range|MMU Fault|ACCESS_TYPE|"
    r"FAULT_P[DT]E|ILLEGAL_INSTRUCTION_ADDRESS"
)
_MISALIGNED = re.compile(r"misaligned|MISALIGNED|Misaligned")
_CLUSTER = re.compile(
    r"[Cc]luster target block not present|CLUSTER_(?:TARGET_)?BLOCK_NOT_PRESENT|CTA [Nn]ot [Pp]resent|cluster block not present"
    r"|Cluster target block",
    re.IGNORECASE,
)
_FAULT_TEXT = re.compile(
    r"illegal|IllegalAddress|ILLEGAL|misaligned|MISALIGNED|assert|ASSERT|launch failure|LAUNCH_FAILED|LaunchFailure|hardware stack|"
    r"HARDWARE_STACK|invalid program counter|INVALID_PC|invalid address space|INVALID_ADDRESS_SPACE|cluster|"
    r"exception|ecc|ECC", re.IGNORECASE
)  # fmt: skip
_NO_FAULT = re.compile(
    r"out of memory|OUT_OF_MEMORY|MemoryAllocation|no kernel image|NoKernelImage|initialization error|not ready|invalid argument|"
    r"InvalidValue"
    r"|NO_DEVICE|driver version|insufficient|peer access",
    re.IGNORECASE,
)
_LOST_TEXT = re.compile(r"ecc|ECC_UNCORRECTABLE|fallen off|DEVICE_UNAVAILABLE|device is lost|SYSTEM_NOT_READY")


def cause_of(text: str) -> str | None:
    """The fault's cause word that a text names."""
    if _CLUSTER.search(text):
        return "cluster-target"
    if _MISALIGNED.search(text):
        return "misaligned"
    if _ILLEGAL.search(text):
        return "illegal-access"
    return None


def _foreign(event: KernelEvent) -> bool:
    return bool(event.name) and event.name != "<unknown>" and not _OURS.search(event.name)


def _in_window(view: View, events: list[KernelEvent]) -> tuple[list[KernelEvent], list[KernelEvent]]:
    good = [e for e in events if not _foreign(e) and view.kernel_link(e) != "old"]
    return good, [e for e in events if e not in good]


def rule_lost_device(view: View) -> Iterator[Finding]:
    lost = [e for e in view.case.kernel if (e.kind == "xid" and e.number in XID_LOST) or e.kind == "gpu-gone" or e.kind == "sxid"]
    good, other = _in_window(view, lost)
    hard = [e for e in good if e.number != 74 and e.kind != "sxid"]
    gone = [g for g in view.case.gpus if g.lost]
    texts = [e for e in view.events("cuda-error") if _LOST_TEXT.search(" ".join(e.fields.values()))]
    unkillable = [p for p in view.case.procs if any(name.startswith("uvm_spin") for name in p.kernel_stack)]
    if hard or gone:
        words = ", ".join(
            dict.fromkeys(
                f"Xid {e.number} ({XID_LOST[e.number]})" if e.number else "the GPU is off the bus" for e in hard if e.kind != "sxid"
            )
        )
        strength = STRONG if hard or any("lost" in g.ref.text for g in gone) else FAIR
        yield supported("lost-device", "gpu-lost", strength, words or "nvidia-smi says that the GPU is lost",
                        [*(e.ref for e in hard), *(g.ref for g in gone)], "xid" if any(e.number for e in hard)
                            else None)  # fmt: skip
    elif good or texts or unkillable:
        yield supported("lost-device", "gpu-lost", WEAK, "NVLink, ECC or driver trouble that may or may not have cost the device",
                        [*(e.ref for e in good), *(t.ref for t in texts), *(p.ref for p in unkillable)])  # fmt: skip
    elif other:
        yield contradicted(
            "lost-device",
            "gpu-lost",
            "the Xid is old or of another process: tokens flowed after it, or it lies long before",
            [e.ref for e in other],
            WEAK,
        )
    elif view.case.kernel_log_seen:
        yield contradicted(
            "lost-device", "gpu-lost", "the kernel log was read and has no Xid of a lost device", view.case.kernel_log_seen, WEAK
        )
    else:
        yield unknown("lost-device", "gpu-lost", "no kernel log", "dmesg -T | grep -E 'NVRM|Xid|nvswitch'")


def _after_giving_up(view: View, event: LogEvent) -> bool:
    return any(view.before(timeout, event) for timeout in view.gave_up)


def rule_device_exception(view: View) -> Iterator[Finding]:
    """What CUDA reported to the program, and what the core-dump writer or the debugger detected."""
    errors = [
        e
        for e in view.events("cuda-error")
        if _FAULT_TEXT.search(" ".join(e.fields.values())) and not _NO_FAULT.search(" ".join(e.fields.values()))
    ]
    words = view.events("coredump-exception")
    looks = [d for d in view.case.devices if d.exception]
    detected: list[tuple[str, Ref]] = [(e.fields.get("word", ""), e.ref) for e in words] + [(d.exception, d.ref) for d in looks]
    first = [e for e in errors if not _after_giving_up(view, e)]
    late = [e for e in errors if e not in first]
    if not errors and not detected:
        yield unknown("device-exception", "gpu-fault", "no CUDA error and no device exception in what was read")
        return
    texts = [" ".join(e.fields.values()) for e in first] + [text for text, _ in detected]
    cause = next((found for text in texts for found in [cause_of(text)] if found == "cluster-target"), None) or next(
        (found for text in texts for found in [cause_of(text)] if found), None
    )
    refs = [*(e.ref for e in first), *(ref for _, ref in detected)]
    if first or detected:
        explicit = cause is not None
        # An "unspecified launch failure" alone is also what a process sees after its own user-triggered core dump.
        strength = STRONG if explicit else FAIR if any("assert" in t.lower() for t in texts) or len(texts) > 1 else WEAK
        yield supported("device-exception", "gpu-fault", strength, f"CUDA reported: {texts[0][:120]}", refs, cause)
    else:
        yield contradicted("device-exception", "gpu-fault", "the CUDA error came after the engine had given up: a consequence of "
            "ending it",
                           [e.ref for e in late], WEAK)  # fmt: skip


def rule_xid(view: View) -> Iterator[Finding]:
    rule_name = "xid"
    faults = [e for e in view.case.kernel if e.kind == "xid" and e.number in XID_FAULT]
    good, other = _in_window(view, faults)
    late = [e for e in good if any(view.before(t, e) for t in view.gave_up)]
    real = [e for e in good if e not in late and (e.number != 43 or len(good) > 1)]
    if late and not real:
        yield contradicted(
            rule_name,
            "gpu-fault",
            "the Xid came after the engine had given up: ending a process leaves one too",
            [e.ref for e in late],
            WEAK,
        )
        return
    if real:
        cause = next((found for e in real for found in [cause_of(e.detail)] if found == "cluster-target"), None) or next(
            (found for e in real for found in [cause_of(e.detail)] if found), None
        )
        ours = any(e.name and _OURS.search(e.name) for e in real)
        explicit = any(e.number == 31 or cause_of(e.detail) for e in real)
        strength = STRONG if ours and explicit else FAIR if explicit or len(real) > 1 else WEAK
        if all(view.kernel_link(e) == "open" for e in real):
            # Nothing ties it to an incident in time: a kernel log keeps its lines since boot, so this may be an old record.
            strength = WEAK
        numbers = ", ".join(dict.fromkeys(f"Xid {e.number}" for e in real))
        yield supported("xid", "gpu-fault", strength, f"the kernel log has {numbers}", [e.ref for e in real], cause)
    elif good:
        yield supported("xid", "gpu-fault", WEAK, "an Xid that also follows from ending the process", [e.ref for e in good])
    elif other:
        yield contradicted("xid", "gpu-fault", "the Xid is old or of another process", [e.ref for e in other], WEAK)
    elif view.case.kernel_log_seen:
        yield contradicted("xid", "gpu-fault", "the kernel log was read and has no Xid of a fault", view.case.kernel_log_seen, WEAK)
    else:
        yield unknown("xid", "gpu-fault", "no kernel log", "dmesg -T | grep -E 'NVRM|Xid'")


def rule_launch_refused(view: View) -> Iterator[Finding]:
    found = view.events("launch-refused")
    errors = [
        e
        for e in view.events("cuda-error")
        if re.search(r"invalid configuration|InvalidConfiguration|CooperativeLaunch|COOPERATIVE", " ".join(e.fields.values()))
    ]
    if not found and not errors:
        yield unknown("launch-refused", "launch-refused", "no refused launch in what was read")
        return
    numbers = next((e for e in found if "ctas" in e.fields), None)
    oversubscribed = [e for e in found if "too many resources" not in e.ref.text] + [
        e for e in errors if "ooperative" in e.ref.text or "COOP" in e.ref.text
    ]
    if numbers:
        text = (
            f"{numbers.fields['ctas']} CTAs asked for, {numbers.fields.get('slots', '?')} can be resident: the launch was refused"
        )
        if int(numbers.fields["ctas"]) <= int(numbers.fields.get("slots", "0") or 0):
            yield unknown(
                "launch-refused", "launch-refused", "the arithmetic in the text does not refuse the launch", refs=[numbers.ref]
            )
            return
    else:
        text = "the launch was refused"
    yield supported("launch-refused", "launch-refused", STRONG if numbers or oversubscribed else FAIR, text,
                    [e.ref for e in [*found, *errors]], "oversubscribed" if oversubscribed else None)  # fmt: skip


def rule_wrong_result(view: View) -> Iterator[Finding]:
    found = view.events("wrong-result")
    if not found:
        yield unknown("wrong-result", "wrong-result", "nothing compares results")
        return
    text = " ".join(e.ref.text for e in found)
    cause = (
        "histogram-ring" if re.search(r"histogram|short[ _]row|\bring\b", text, re.IGNORECASE)
        else "overflow" if re.search(r"overflow|one bin|same bin|candidate", text, re.IGNORECASE)
        else "padding" if re.search(r"padd", text, re.IGNORECASE) else None
    )  # fmt: skip
    yield supported("wrong-result", "wrong-result", FAIR, "results differ from the reference", [e.ref for e in found], cause)
