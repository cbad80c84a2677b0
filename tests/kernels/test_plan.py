"""Every number of the launch that was measured, reported or computed for a release is checked here, with its source."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_repro.errors import KernelNotFoundError, PlanError
from dsv4_repro.kernels.abi import ARRIVAL_COUNTER_OFFSET, ROW_STATE_SIZE
from dsv4_repro.kernels.plan import (
    device_for_sm,
    device_named,
    known_profiles,
    max_chunk_elements,
    named_devices,
    padded_stride,
    plan_launch,
    release_profile,
    resident_ctas_per_sm,
    smem_budget,
    vector_width,
)

PRO_6000 = device_named("RTX PRO 6000 Blackwell")
H200 = device_named("H200")
L20 = device_named("L20")
GB10 = device_named("GB10")


@pytest.mark.parametrize(
    ("rows", "device", "chunk"),
    [
        (1, PRO_6000, 8472),
        (4, H200, 8472),
        (5, PRO_6000, 11768),
        (8, H200, 11768),
        (9, PRO_6000, 24824),
        (32, PRO_6000, 24824),
        (9, H200, 57592),
    ],
)
def test_the_most_elements_of_a_cta(rows: int, device: Any, chunk: int) -> None:
    assert max_chunk_elements(smem_budget(rows, device), 4) == chunk


def test_the_launch_of_the_reproducer() -> None:
    # vLLM #51593: 8 rows of 16384; measured on an H200 and computed for sm_120.
    for device in (PRO_6000, H200):
        plan = plan_launch(8, 16384, 16384, 512, device)
        assert (plan.ctas_per_group, plan.chunk_size, plan.dynamic_smem, plan.groups, plan.grid) == (2, 8192, 35968, 8, 16)
        assert (plan.smem_budget, plan.vec, plan.path, plan.state_bytes) == (49152, 4, "persistent", 24704)
        assert plan.peers_leave
        assert plan.wedges_on_negative_length
        assert plan.leader_block(6) == 12
        assert 6 * ROW_STATE_SIZE + ARRIVAL_COUNTER_OFFSET == 21608


def test_the_parameters_that_a_core_dump_of_the_hang_holds() -> None:
    # Measured on an H200: num_rows 8, stride 16384, top_k 512, chunk_size 8192, ctas_per_group 2, max_seq_len 16384.
    params = plan_launch(8, 16384, 16384, 512, H200).params(input=1, output=2, lengths=3, row_states=4)
    assert (params.num_rows, params.stride, params.top_k) == (8, 16384, 512)
    assert (params.chunk_size, params.ctas_per_group, params.max_seq_len) == (8192, 2, 16384)
    assert (params.input, params.output, params.lengths, params.row_states) == (1, 2, 3, 4)


def test_occupancy_by_threads_registers_and_shared_memory() -> None:
    assert resident_ctas_per_sm(PRO_6000, dynamic_smem=35968, registers=64) == 1
    assert resident_ctas_per_sm(H200, dynamic_smem=35968, registers=32) == 2
    # Measured on an H200: 2 CTAs per SM at 100 KiB of dynamic shared memory, 264 slots in all.
    assert resident_ctas_per_sm(H200, dynamic_smem=100 * 1024, registers=32) * H200.num_sms == 264
    assert resident_ctas_per_sm(H200, dynamic_smem=120 * 1024, registers=32) == 1
    assert resident_ctas_per_sm(H200, dynamic_smem=35968, registers=33) == 1
    assert resident_ctas_per_sm(H200, dynamic_smem=H200.smem_optin, registers=32) == 1
    assert resident_ctas_per_sm(H200, dynamic_smem=H200.smem_optin + 1, registers=32) == 0
    assert resident_ctas_per_sm(H200, dynamic_smem=35968, registers=65) == 0
    assert resident_ctas_per_sm(device_named("T4"), dynamic_smem=35968, registers=64) == 1


def test_occupancy_is_the_drivers_on_an_h200() -> None:
    # cuOccupancyMaxActiveBlocksPerMultiprocessor on an H200, the nine sm_90 instantiations of vLLM 0.20.2, 0.27.1 and 0.33.0 (32
    # registers, no static shared memory): the same for all 27; two CTAs up to 115712 bytes of dynamic shared memory, then one.
    # Device attributes: 132 SMs, 233472 bytes per SM, 232448 by opt-in, 1024 reserved, 2048 threads, 65536 registers.
    said = {0: 2, 35968: 2, 36000: 2, 49152: 2, 65536: 2, 102400: 2, 115000: 2, 115584: 2, 115585: 2, 115712: 2}
    said |= {115713: 1, 116000: 1, 116736: 1, 122880: 1, 200000: 1, 232448: 1}
    for dynamic_smem, ctas in said.items():
        assert resident_ctas_per_sm(H200, dynamic_smem=dynamic_smem, registers=32) == ctas, dynamic_smem
    assert (H200.num_sms, H200.smem_per_sm, H200.smem_optin, H200.reserved_smem_per_cta) == (132, 233472, 232448, 1024)
    assert (H200.max_threads_per_sm, H200.registers_per_sm) == (2048, 65536)


def test_a_length_that_fits_one_group_of_128_ctas() -> None:
    # Measured on an H200: a row of 262144 with chunk 2048 completes; the launcher itself takes larger chunks.
    plan = plan_launch(1, 262144, 262144, 512, H200)
    assert plan.ctas_per_group == -(-262144 // 8472) == 31
    assert not plan.oversubscribed
    assert plan.path == "persistent"


@pytest.mark.parametrize(("width", "path", "total"), [(779424, "persistent", 92), (779425, "refused", 93)])
def test_the_edge_of_the_l20(width: int, path: str, total: int) -> None:
    # yhfgyyf/vllm-deepseek-v4-sm89 #110: passes at 779424, fails at 779425 with total_ctas=93 > 92.
    plan = plan_launch(1, width, width, 512, L20)
    assert (plan.path, plan.grid, plan.resident_cap) == (path, total, 92)
    assert ("total_ctas=93 > num_sms*occupancy=92" in plan.refusal) == (path == "refused")


def test_gb10_refuses_400_k_and_takes_384_k() -> None:
    # vLLM #41834: 49 CTAs > 48 at 400 k context, clean to 384 k.
    refused = plan_launch(2, 400 * 1024, 400 * 1024, 512, GB10)
    assert (refused.path, refused.grid, refused.resident_cap) == ("refused", 49, 48)
    assert "49 > num_sms*occupancy=48" in refused.refusal
    assert plan_launch(2, 384 * 1024, 384 * 1024, 512, GB10).path == "persistent"


def test_what_an_oversubscribed_launch_becomes_differs_by_release() -> None:
    wide = 400 * 1024
    by_release = {
        version: plan_launch(2, wide, wide, 512, GB10, release_profile=version)
        for version in ("0.20.0", "0.20.1", "0.29.0", "0.30.0", "0.33.0")
    }
    assert [plan.path for plan in by_release.values()] == ["persistent", "refused", "refused", "decode", "decode"]
    assert by_release["0.20.0"].oversubscribed
    assert any("members never start" in note for note in by_release["0.20.0"].notes)
    # Where FilteredTopK has its 128 KiB, it takes over from 0.20.1 on.
    few = dataclasses.replace(H200, num_sms=10)
    assert plan_launch(2, wide, wide, 512, few, release_profile="0.20.1").path == "filtered"
    assert plan_launch(2, wide, wide, 512, few, release_profile="0.20.0").path == "persistent"


def test_headroom_is_kept_only_where_the_barrier_is_needed() -> None:
    # vLLM #41189: one CTA per SM when occupancy > 1, else one CTA, never below one group.
    cooperative = plan_launch(32, 65536, 65536, 512, H200)
    assert (cooperative.occupancy, cooperative.resident_cap) == (1, 132)
    assert cooperative.groups * cooperative.ctas_per_group <= 131
    two = plan_launch(4, 262144, 262144, 512, H200)
    assert (two.occupancy, two.resident_cap) == (2, 264)
    assert two.grid <= 132
    assert plan_launch(4, 262144, 262144, 512, H200, release_profile="0.20.0").grid <= 264
    assert plan_launch(4, 262144 * 3, 262144 * 3, 512, H200).grid <= 132
    assert (
        plan_launch(4, 262144 * 3, 262144 * 3, 512, H200, release_profile="0.20.0").groups
        > plan_launch(4, 262144 * 3, 262144 * 3, 512, H200).groups
    )
    assert plan_launch(32, 32768, 32768, 512, PRO_6000).groups == 32


def test_large_batches_take_filtered_topk_where_there_is_room_for_it() -> None:
    assert plan_launch(33, 16384, 16384, 512, H200).path == "filtered"
    assert plan_launch(33, 16384, 16384, 512, PRO_6000).path == "persistent"
    assert plan_launch(32, 16384, 16384, 512, H200).path == "persistent"
    assert plan_launch(65, 98304, 98304, 512, H200, release_profile="0.33.0").path == "sampled"
    assert plan_launch(65, 98303, 98303, 512, H200, release_profile="0.33.0").path == "filtered"
    assert plan_launch(65, 65536, 65536, 1024, H200, release_profile="0.33.0").path == "sampled"
    assert plan_launch(65, 98304, 98304, 512, H200, release_profile="0.30.0").path == "filtered"
    assert not plan_launch(33, 16384, 16384, 512, H200).wedges_on_negative_length


def test_vectors_follow_the_stride() -> None:
    assert [vector_width(stride) for stride in (16384, 16386, 16387)] == [4, 2, 1]
    assert plan_launch(8, 11769, 11769, 512, PRO_6000).ctas_per_group == 2
    assert plan_launch(8, 11768, 11768, 512, PRO_6000).ctas_per_group == 1
    odd = plan_launch(8, 11769, 11769, 512, PRO_6000)
    assert (odd.vec, odd.chunk_size) == (1, 5885)


#: Rows that 3, 5 to 7, 9 to 11 and 13 to 15 live requests of two query tokens are padded to, by vLLM's default list.
PADDED = (8, 16, 24, 32)


def _wedging(max_model_len: int, device: Any, *, stride_padding: int = 1) -> tuple[int, ...]:
    """Of ``PADDED``, those whose leader an unfixed build lets wait for ever, as callers from 0.25.0 to 0.30.0 launch."""
    width = max_model_len // 4
    stride = padded_stride(width, stride_padding)
    return tuple(rows for rows in PADDED if plan_launch(rows, stride, width, 512, device).wedges_on_negative_length)


@pytest.mark.parametrize(
    ("max_model_len", "on_sm120", "on_h200"),
    [
        (32768, (), ()),
        (47075, (), ()),
        (47076, (8,), (8,)),
        (65536, (8,), (8,)),
        (99296, (8,), (8,)),
        (99299, (8,), (8,)),
        (99300, PADDED, (8,)),
        (131072, PADDED, (8,)),
        (131075, PADDED, (8,)),
        (131076, (), ()),
        (1048576, (), ()),
    ],
)
def test_which_padded_batches_wedge(max_model_len: int, on_sm120: tuple[int, ...], on_h200: tuple[int, ...]) -> None:
    assert _wedging(max_model_len, PRO_6000) == on_sm120
    assert _wedging(max_model_len, H200) == on_h200


@pytest.mark.parametrize(
    ("max_model_len", "wedging"),
    [(46083, ()), (46084, (8,)), (65536, (8,)), (98307, (8,)), (98308, PADDED), (131072, PADDED), (131076, ())],
)
def test_the_edges_where_the_stride_is_padded_to_256_floats(max_model_len: int, wedging: tuple[int, ...]) -> None:
    assert _wedging(max_model_len, PRO_6000, stride_padding=256) == wedging
    assert padded_stride(16384, 256) == 16384


def test_three_query_tokens_wedge_where_their_own_size_was_captured() -> None:
    # Their lengths are negative on the SM100 family only: elsewhere such a padding slot makes no row (drain_steps).
    assert plan_launch(6, 16384, 16384, 512, device_named("B200")).wedges_on_negative_length


def test_callers_that_promise_the_uncompressed_length_keep_the_peers() -> None:
    # 0.20.0 to 0.24.0 and 0.33.0 pass max_model_len: 65536 > 32768, peers stay.
    launch = plan_launch(8, 16384, 65536, 512, PRO_6000)
    assert not launch.peers_leave
    assert not launch.wedges_on_negative_length
    assert launch.ctas_per_group == 2


def test_a_real_server_of_another_model_wedges_at_three() -> None:
    # Measured with vLLM 0.23.0 on an H200: max_model_len 16384, compress ratio 1, k 2048: wedges at 3, not at 5 to 15.
    launches = {rows: plan_launch(rows, 16384, 16384, 2048, H200, release_profile="0.23.0") for rows in PADDED}
    assert [rows for rows, launch in launches.items() if launch.wedges_on_negative_length] == [8]


def test_the_published_launch_has_peers_that_leave_and_the_next_size_has_none() -> None:
    launch = plan_launch(8, 16384, 16384, 512, PRO_6000)
    assert (launch.grid, launch.ctas_per_group, launch.peers_leave) == (16, 2, True)
    assert plan_launch(16, 16384, 16384, 512, PRO_6000).ctas_per_group == 1


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"rows": 0}, "rows"),
        ({"rows": -1}, "rows"),
        ({"rows": 1 << 30}, "rows"),
        ({"rows": True}, "rows"),
        ({"stride": 0}, "stride"),
        ({"stride": 1 << 31}, "stride"),
        ({"max_seq_len": -1}, "max_seq_len"),
        ({"max_seq_len": 1 << 31}, "max_seq_len"),
        ({"top_k": 100}, "top_k"),
    ],
)
def test_nonsense_is_named_with_its_value(arguments: dict[str, int], what: str) -> None:
    given_values: dict[str, Any] = {"rows": 8, "stride": 16384, "max_seq_len": 16384, "top_k": 512, **arguments}
    with pytest.raises(PlanError, match=what) as caught:
        plan_launch(device=PRO_6000, **given_values)
    assert str(next(iter(arguments.values()))) in str(caught.value)


def test_devices_are_found_by_name_and_unknown_ones_list_the_known() -> None:
    assert device_named("nvidia h200") is H200
    assert device_named("NVIDIA GeForce RTX 5090").num_sms == 170
    assert (PRO_6000.num_sms, PRO_6000.smem_optin, PRO_6000.sm, GB10.num_sms, GB10.sm) == (188, 101376, 120, 48, 121)
    assert (H200.num_sms, H200.smem_optin, L20.num_sms, L20.smem_optin) == (132, 232448, 92, 101376)
    with pytest.raises(KernelNotFoundError, match="GB10"):
        device_named("Voodoo 2")
    with pytest.raises(KernelNotFoundError, match="sm_90"):
        device_for_sm(42)
    assert device_for_sm(120) is PRO_6000
    assert all(device.source for device in named_devices())
    assert len({device.name for device in named_devices()}) == len(named_devices())


def test_release_profiles_are_in_order_and_without_overlap() -> None:
    from packaging.version import Version

    profiles = known_profiles()
    edges = [Version(edge) for profile in profiles for edge in (profile.first, profile.last)]
    assert edges == sorted(edges)
    assert all(profile.source for profile in profiles)
    assert [release_profile(version).guarded for version in ("0.20.0", "0.27.1", "0.28.0", "0.33.0", "9.9")] == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert [release_profile(version).caller_max_seq_len for version in ("0.24.0", "0.25.1", "0.27.1", "0.33.0")] == [
        "batch",
        "width",
        "width",
        "batch",
    ]
    assert [release_profile(version).zeroed for version in ("0.20.0", "0.20.1", "0.20.2")] == ["never", "radix only", "always"]
    for nonsense in ("0.19.1", "0.1", "newest", ""):
        with pytest.raises(KernelNotFoundError):
            release_profile(nonsense)


@settings(max_examples=300, deadline=None)
@given(
    rows=st.integers(1, 200),
    stride=st.integers(1, 2_000_000),
    max_seq_len=st.integers(0, 2_000_000),
    device=st.sampled_from(named_devices()),
    release=st.sampled_from(["0.20.0", "0.20.1", "0.27.1", "0.30.0", "0.33.0"]),
    top_k=st.sampled_from([512, 1024, 2048]),
)
def test_any_persistent_launch_covers_its_rows(
    rows: int, stride: int, max_seq_len: int, device: Any, release: str, top_k: int
) -> None:
    plan = plan_launch(rows, stride, max_seq_len, top_k, device, release_profile=release)
    if plan.path != "persistent":
        return
    assert plan.chunk_size * plan.ctas_per_group >= stride
    assert plan.chunk_size * (plan.ctas_per_group - 1) < stride + plan.vec * plan.ctas_per_group
    assert plan.chunk_size % plan.vec == 0
    assert plan.grid == plan.groups * plan.ctas_per_group
    assert 1 <= plan.groups <= rows
    assert plan.dynamic_smem <= max(plan.smem_budget, 35968)
    if release != "0.20.0":
        assert not plan.oversubscribed
    assert plan.lines()[0].startswith(f"{rows} rows x {stride}")
