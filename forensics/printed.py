"""A transcript that names the counter and the block but holds no code and no registers: what can still be said of it.

In the grouped top-k kernels a member adds its own arrival before it waits, so a counter below one under a waiting member was
written over, and a counter of exactly one is that member's own arrival. Anything else stays open.
"""

from __future__ import annotations

from collections.abc import Sequence

from .barrier import GridView
from .device_state import DeviceState
from .identity import hang_identity, readable_name
from .judge import Judged
from .ledger import group_model
from .records import LedgerGroup, Wait

__all__ = ["by_name"]


def by_name(state: DeviceState, views: Sequence[GridView], *, hung: bool) -> Judged | None:
    """The verdict from a counter printed by name; None unless exactly one block is resident, of a kernel of that family.

    That the block waits is nowhere in such a transcript, so it takes a watchdog (``hung``) to call it a hang.
    """
    counter = state.printed.get("arrival_counter")
    resident = [(view, cta) for view in views for cta in view.ctas]
    if counter is None or len(resident) != 1 or any(not view.grid.complete or view.grid.ctas is None for view in views):
        return None
    view, cta = resident[0]
    model = group_model(view)
    if model is None or model.kind == "grid" or cta.kind in ("running", "leaving"):
        return None
    role = model.role(cta.linear)
    name = readable_name(view.grid.kernel)
    group = model.group(cta.linear) if model.certain else None
    wait = Wait(
        kernel=name, grid=view.grid.grid_dim, block=cta.block, value=counter, state_field="arrival_counter", group=group, role=role,
        device=view.grid.device,
    )  # fmt: skip
    who = f"block {cta.linear}" + (f" ({role})" if role else "")
    head = f"{who} of {name} is the only resident block, and arrival_counter is {counter}"
    if counter <= 0 and role == "peer":
        cause, tail = "reset-race", "a waiting member has added its own arrival, so the counter was reset; its leader is gone"
    elif counter == 1 and role == "leader":
        cause, tail = "peer-left", "that is its own arrival: the rest of its group left without arriving"
    else:
        return None
    if not hung:
        text = f"{head}; whether it waits is not in this evidence (no machine code, no registers)"
        return Judged("unknown", None, "low", text, (wait,), view=view, model=model, candidates=("gpu-spin-barrier", "not-hung"))
    rest = (LedgerGroup(group=group, spinning=(cta.linear,), exited=tuple(
        block for block in range(group * model.ctas, (group + 1) * model.ctas) if block != cta.linear
    ), inferred="the only resident block waits; nothing keeps the others from starting"),) if group is not None else ()  # fmt: skip
    identity = hang_identity(
        view.grid.kernel, class_="gpu-spin-barrier", cause=cause, field="arrival_counter", comparison=None, bits=None, scope="",
        phase=f"counter {counter}", missing=role or "",
    )  # fmt: skip
    return Judged(
        "gpu-spin-barrier", cause, "medium", f"{head}; {tail}", (wait,), rest, view=view, model=model, identity=identity,
        notes=("no machine code and no registers: the wait itself was not seen",),
    )  # fmt: skip
