"""The host launcher's arithmetic of the persistent top-k, for any device: grid, group size, chunk, shared memory, and refusals.

Source: ``topk.cu`` of vLLM 0.20.0 to 0.33.0 (differences by release: ``release_profiles``). In a server all of it is computed at
CUDA graph capture and frozen; at replay only the lengths on the device change. Nothing here touches a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import PlanError
from .abi import (
    FIXED_SMEM_LARGE,
    RADIX_THRESHOLD,
    ROW_STATE_SIZE,
    SMEM_MEDIUM,
    THREADS_PER_CTA,
    TOP_K_VALUES,
    TopKParams,
)
from .devices import ArchLimits, DeviceDescription, arch_limits, device_for_sm, device_named, named_devices
from .release_profiles import DEFAULT_PROFILE, ReleaseProfile, known_profiles, release_profile

__all__ = [
    "DEFAULT_PROFILE",
    "ArchLimits",
    "DeviceDescription",
    "LaunchPlan",
    "ReleaseProfile",
    "arch_limits",
    "default_registers",
    "device_for_sm",
    "device_named",
    "known_profiles",
    "max_chunk_elements",
    "named_devices",
    "padded_stride",
    "plan_launch",
    "release_profile",
    "resident_ctas_per_sm",
    "smem_budget",
    "vector_width",
]

#: FilteredTopK takes batches of more rows than this, where a block may have 128 KiB of shared memory.
FILTERED_ROWS = 32
FILTERED_SMEM = 128 * 1024
#: From 0.31.0 a sampled kernel takes more rows than this, where a block may have 144 KiB and rows may be this long (by k).
SAMPLED_ROWS = 64
SAMPLED_SMEM = 144 * 1024
SAMPLED_MIN_LENGTH = {512: 98304, 1024: 65536, 2048: 65536}
#: Shared memory that a batch of at most 8 rows may use per CTA, bytes.
SMEM_CAP_8_ROWS = 48 * 1024

_INT32_MAX = (1 << 31) - 1
_MAX_ROWS = 1 << 20

Path = Literal["persistent", "filtered", "sampled", "decode", "refused"]


def default_registers(sm: int) -> int:
    """Registers per thread of the shipped kernel, read from release cubins: 32 where two CTAs fit an SM, else 64."""
    return 32 if sm in (80, 90, 100, 103) else 64


def _ceil_div(value: int, by: int) -> int:
    return -(-value // by)


def vector_width(stride: int) -> int:
    """The widest load that keeps rows aligned: 4, 2 or 1 floats (a base that is less aligned than 16 bytes is not modelled)."""
    if stride % 4 == 0:
        return 4
    return 2 if stride % 2 == 0 else 1


def smem_budget(rows: int, device: DeviceDescription) -> int:
    """Shared memory per CTA that the launcher allows itself, bytes: 35968 up to 4 rows, 48 KiB up to 8, else the opt-in."""
    if rows <= 4:
        return min(device.smem_optin, SMEM_MEDIUM)
    if rows <= 8:
        return min(device.smem_optin, SMEM_CAP_8_ROWS)
    return device.smem_optin


def max_chunk_elements(budget: int, vec: int) -> int:
    """Elements of a row that one CTA can hold in ``budget`` bytes of shared memory, at least 1024 vectors."""
    chunk = (budget - FIXED_SMEM_LARGE) // 4 // vec * vec
    return max(chunk, vec * THREADS_PER_CTA)


def resident_ctas_per_sm(device: DeviceDescription, *, dynamic_smem: int, registers: int, static_smem: int = 0) -> int:
    """How many CTAs of 1024 threads an SM holds at once: by threads, by registers, by shared memory. 0 if one does not fit.

    Registers are allocated per warp in units of 256, shared memory per CTA in units of 128 bytes (256 on sm_75), plus what the
    system reserves (CUDA C++ Programming Guide). Equal to the driver's answer on an H200 for the shipped kernels of three releases.
    """
    by_threads = device.max_threads_per_sm // THREADS_PER_CTA
    per_warp = _ceil_div(registers * 32, 256) * 256
    by_registers = device.registers_per_sm // (per_warp * (THREADS_PER_CTA // 32)) if registers > 0 else by_threads
    unit = 256 if device.sm < 80 else 128
    per_cta = _ceil_div(dynamic_smem + static_smem + device.reserved_smem_per_cta, unit) * unit
    return min(by_threads, by_registers, device.smem_per_sm // per_cta)


def padded_stride(width: int, multiple: int = 1) -> int:
    """The row stride, in floats, of logits ``width`` wide whose rows are padded to a multiple (DeepGEMM's callers: 256)."""
    return _ceil_div(width, multiple) * multiple


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """One launch, as the host computes it. Sizes in elements (fp32) unless they say bytes.

    ``path``: ``persistent`` (this kernel), ``filtered`` / ``sampled`` / ``decode`` (another, single-CTA kernel takes the batch) or
    ``refused`` (an error instead of a launch: ``refusal`` says which). Where the path is not persistent, ``ctas_per_group``,
    ``groups`` and ``grid`` are what the persistent launch would have had (0 if the launcher never computed them).
    ``resident_cap``: CTAs that the device holds at once; ``oversubscribed``: the grid is larger than that and the barrier may be
    used. ``notes``: what a reader should know, e.g. which assumption stands in for something that was not measured.
    """

    rows: int
    stride: int
    top_k: int
    vec: int
    chunk_size: int
    ctas_per_group: int
    groups: int
    grid: int
    dynamic_smem: int
    max_seq_len: int
    smem_budget: int
    occupancy: int
    num_sms: int
    resident_cap: int
    path: Path
    oversubscribed: bool
    refusal: str
    release: str
    notes: tuple[str, ...] = ()

    @property
    def state_bytes(self) -> int:
        """Bytes of row states that the launch uses (and the host zeroes)."""
        return self.groups * ROW_STATE_SIZE

    @property
    def peers_leave(self) -> bool:
        """Whether CTAs other than a group's leader return at entry: the host promised that no row is long."""
        return self.max_seq_len <= RADIX_THRESHOLD

    @property
    def wedges_on_negative_length(self) -> bool:
        """Whether an unguarded kernel waits for ever on a negative length: groups of several CTAs whose peers have left."""
        return self.path == "persistent" and self.ctas_per_group >= 2 and self.peers_leave

    def leader_block(self, row: int) -> int:
        """blockIdx.x of the leader of the group that handles ``row`` (rows go to groups in turn)."""
        return row % self.groups * self.ctas_per_group

    def params(self, *, input: int, output: int, lengths: int, row_states: int) -> TopKParams:
        """The kernel parameters of this launch with these device addresses."""
        return TopKParams(
            input=input,
            output=output,
            lengths=lengths,
            row_states=row_states,
            num_rows=self.rows,
            stride=self.stride,
            top_k=self.top_k,
            chunk_size=self.chunk_size,
            ctas_per_group=self.ctas_per_group,
            max_seq_len=self.max_seq_len,
        )

    def lines(self) -> list[str]:
        """What a person reads about this launch."""
        head = (
            f"{self.rows} rows x {self.stride}, k {self.top_k}, vec {self.vec}: {self.groups} groups of {self.ctas_per_group} CTAs"
            f", chunk {self.chunk_size}, grid {self.grid}, {self.dynamic_smem} B dynamic shared memory, "
            f"max_seq_len {self.max_seq_len} ({'peers leave at entry' if self.peers_leave else 'peers stay'})"
        )
        if self.path != "persistent":
            head = f"{self.rows} rows x {self.stride}, k {self.top_k}: {self.path}"
        return [head, *([self.refusal] if self.refusal else []), *self.notes]


def _check(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise PlanError(f"{name} must be an integer, got {value!r}")
    if not low <= value <= high:
        raise PlanError(f"{name} must be {low} to {high}, got {value}")


def plan_launch(
    rows: int,
    stride: int,
    max_seq_len: int,
    top_k: int,
    device: DeviceDescription,
    *,
    release_profile: str | ReleaseProfile = DEFAULT_PROFILE,
    registers: int | None = None,
    static_smem: int = 0,
) -> LaunchPlan:
    """The launch that vLLM's launcher makes for ``rows`` rows of ``stride`` floats.

    ``max_seq_len``: the host scalar that the caller passes. ``registers`` and ``static_smem``: of the kernel that will be launched,
    for its occupancy; None takes the shipped kernel's. PlanError if a value is out of range.
    """
    _check("rows", rows, 1, _MAX_ROWS)
    _check("stride", stride, 1, _INT32_MAX)
    _check("max_seq_len", max_seq_len, 0, _INT32_MAX)
    if top_k not in TOP_K_VALUES:
        raise PlanError(f"top_k must be one of {', '.join(map(str, TOP_K_VALUES))}, got {top_k}")
    _check("num_sms", device.num_sms, 1, 1 << 16)
    _check("smem_optin", device.smem_optin, FIXED_SMEM_LARGE + 4, 1 << 30)
    profile = release_profile if isinstance(release_profile, ReleaseProfile) else _profile(release_profile)
    notes: list[str] = []

    vec = vector_width(stride)
    budget = smem_budget(rows, device)
    if profile.sampled and rows > SAMPLED_ROWS and max_seq_len >= SAMPLED_MIN_LENGTH[top_k] and device.smem_optin >= SAMPLED_SMEM:
        return _other(rows, stride, max_seq_len, top_k, vec, budget, device, profile, "sampled")
    if rows > FILTERED_ROWS and device.smem_optin >= FILTERED_SMEM:
        return _other(rows, stride, max_seq_len, top_k, vec, budget, device, profile, "filtered")

    largest = max_chunk_elements(budget, vec)
    ctas_per_group = _ceil_div(stride, largest)
    chunk = min(_ceil_div(_ceil_div(stride, ctas_per_group), vec) * vec, largest)
    dynamic_smem = max(FIXED_SMEM_LARGE + 4 * chunk, SMEM_MEDIUM)

    if registers is None:
        registers = default_registers(device.sm)
        notes.append(f"occupancy assumes {registers} registers a thread, as in release cubins of sm_{device.sm}")
    occupancy = resident_ctas_per_sm(device, dynamic_smem=dynamic_smem, registers=registers, static_smem=static_smem)
    if occupancy < 1:
        notes.append("not one CTA fits an SM; the launcher counts one all the same")
        occupancy = 1
    if profile.occupancy_of_vec4 and vec != 4:
        notes.append("this release asks for the occupancy of the vec-4 instantiation and launches another (#41189)")

    cooperative = max_seq_len > RADIX_THRESHOLD
    cap = device.num_sms * occupancy
    usable = cap
    if cooperative and profile.headroom:
        headroom = device.num_sms if occupancy > 1 else 1
        if usable >= headroom + ctas_per_group:
            usable -= headroom
    groups = max(min(usable // ctas_per_group, rows), 1)
    grid = groups * ctas_per_group
    oversubscribed = cooperative and grid > cap

    path: Path = "persistent"
    refusal = ""
    if oversubscribed:
        small = device.smem_optin < FILTERED_SMEM
        if profile.oversubscribed == "launch":
            notes.append(
                f"oversubscribed: {grid} CTAs > {cap} that can be resident; this release launches it, and members never start"
            )
        elif not small:
            path = "filtered"
        elif profile.oversubscribed == "decode":
            path = "decode"
        else:
            path = "refused"
            refusal = (
                f"RuntimeError: the launch would oversubscribe (total_ctas={grid} > num_sms*occupancy={cap}) and "
                f"FilteredTopK needs 128 KiB of shared memory per block, {device.smem_optin} bytes there; under a FULL graph "
                "reported as a silent wedge (vLLM #41834)"
            )
    elif grid > cap:
        notes.append(f"{grid} CTAs > {cap} that can be resident at once; harmless where peers leave at entry")
    return LaunchPlan(
        rows=rows, stride=stride, top_k=top_k, vec=vec, chunk_size=chunk, ctas_per_group=ctas_per_group, groups=groups, grid=grid,
        dynamic_smem=dynamic_smem, max_seq_len=max_seq_len, smem_budget=budget, occupancy=occupancy, num_sms=device.num_sms,
        resident_cap=cap, path=path, oversubscribed=oversubscribed, refusal=refusal, release=profile.first, notes=tuple(notes),
    )  # fmt: skip


def _profile(version: str) -> ReleaseProfile:
    return release_profile(version)


def _other(
    rows: int,
    stride: int,
    max_seq_len: int,
    top_k: int,
    vec: int,
    budget: int,
    device: DeviceDescription,
    profile: ReleaseProfile,
    path: Literal["filtered", "sampled"],
) -> LaunchPlan:
    note = f"more than {FILTERED_ROWS if path == 'filtered' else SAMPLED_ROWS} rows: one CTA a row, no barrier between CTAs"
    return LaunchPlan(
        rows=rows, stride=stride, top_k=top_k, vec=vec, chunk_size=0, ctas_per_group=0, groups=0, grid=0, dynamic_smem=0,
        max_seq_len=max_seq_len, smem_budget=budget, occupancy=0, num_sms=device.num_sms, resident_cap=0, path=path,
        oversubscribed=False, refusal="", release=profile.first, notes=(note,),
    )  # fmt: skip
