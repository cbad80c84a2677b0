"""host-weight-load: start-up reads weights. Progress between two samples is what tells loading from hanging."""

from __future__ import annotations

from collections.abc import Iterator

from .base import FAIR, STRONG, WEAK, Finding, contradicted, supported, unknown
from .view import View

__all__ = ["rule_weight_load"]


def rule_weight_load(view: View) -> Iterator[Finding]:
    rule = "weight-load"
    begun = view.events("load-start", "load-progress")
    done = view.events("load-done")
    finals = [
        *done,
        *view.events("compile-start", "compile-step", "compile-done", "capture-progress", "capture-done", "init-done", "serving"),
    ]
    pending = [e for e in begun if not any(view.before(e, d) for d in finals)]
    loading = [p for p in view.processes if p.doing("weight-load")]
    threads = [t for p in loading for t in p.threads if t.waits == "weight-load"]
    reads: dict[int | None, list[int]] = {}
    for sample in view.case.procs:
        value = sample.rchar if sample.rchar is not None else sample.read_bytes
        if value is not None:
            reads.setdefault(sample.pid, []).append(value)
    rising = {pid: values for pid, values in reads.items() if len(values) > 1 and values[-1] > values[0]}
    flat = {pid: values for pid, values in reads.items() if len(values) > 1 and values[-1] == values[0]}
    io_refs = [s.ref for s in view.case.procs if s.rchar is not None or s.read_bytes is not None]
    disk = [
        s.ref
        for s in view.case.procs
        if s.state == "D"
        or s.wchan.startswith(("folio_wait", "wait_on_page", "io_schedule", "nfs_", "rpc_wait", "fuse_", "lustre", "cl_sync"))
    ]
    progress = view.events("load-progress")
    steps = {e.fields.get("done") for e in pending if e.kind == "load-progress"}
    if done and not pending and not loading:
        yield contradicted(rule, "host-weight-load", "the weights were loaded", [e.ref for e in done[-1:]])
        return
    if not pending and not loading:
        if rising and disk:
            yield supported(
                rule, "host-weight-load", WEAK, "a process waits for the disk and what it has read grows", [*io_refs, *disk]
            )
        else:
            yield unknown(rule, "host-weight-load", "no sign of loading")
        return
    idle = bool(view.gpus) and all(g.state in ("idle", "low") for g in view.gpus)
    moving = len(steps) > 1 or bool(rising) or any(p.moved for p in loading)
    refs = [*(e.ref for e in pending[:1]), *(e.ref for e in pending[-2:]), *(t.ref for t in threads[:4]), *io_refs[:4], *disk[:2]]
    count = (len(steps) > 1) + bool(rising) + bool(disk) + idle + bool(loading)
    strength = STRONG if moving and count >= 2 else FAIR if moving or count >= 2 else WEAK
    text = "weights are being loaded"
    if progress:
        last = progress[-1].fields
        text += f": {last.get('done')} of {last.get('total')}"
    text += ", and it moves" if moving else ", and nothing was seen to move" if flat else ""
    if view.phase == "serving" and not loading:
        strength = WEAK
    yield supported(rule, "host-weight-load", strength, text, refs)
