"""The catalogue of published cases: it loads, and a match says what it saw."""

from __future__ import annotations

import re

import pytest

from dsv4_repro.errors import OurFaultError
from dsv4_repro.forensics.autopsy import autopsy_case
from dsv4_repro.forensics.evidence.gather import read_text
from dsv4_repro.forensics.records import CLASSES
from dsv4_repro.forensics.signature import catalogue, load_signature

DEVICE = """=== cuda-gdb -p 9 ===
  Kernel Parent Dev   Grid Status           SMs Mask  GridDim   BlockDim Invocation
*      0      -   0     88 Active 0x020000000000 ({grid},1,1) (1024,1,1) {kernel}(...)
  BlockIdx To BlockIdx Count   State
Kernel 0
* ({block},0,0)    ({block},0,0)     1 running
[Switching focus to CUDA kernel 0, grid 88, block ({block},0,0), thread (0,0,0), device 0, sm 41, warp 0, lane 0]
=> 0x7f4b00001cd0 <k+7376>:	LDG.E.STRONG.GPU R22, desc[UR8][R2.64+0xc08]
   0x7f4b00001ce0 <k+7392>:	CCTL.IVALL
   0x7f4b00001cf0 <k+7408>:	ISETP.GE.AND P0, PT, R22, R31, PT
   0x7f4b00001d00 <k+7424>:	@!P0 BRA 0x7f4b00001cd0
R22            {value:#x} {value}
R31            {target:#x} {target}
"""


def document(text: str):  # type: ignore[no-untyped-def]
    return autopsy_case(read_text("x", text)).diagnosis


def test_the_catalogue_is_whole() -> None:
    names = [s.name for s in catalogue()]
    assert len(names) == len(set(names)) >= 50
    for signature in catalogue():
        assert re.fullmatch(r"[a-z0-9-]+-\d+", signature.name)
        assert signature.class_ in CLASSES
        assert signature.upstream
        assert signature.must or signature.similar_only
    assert {"vllm-51593", "flashinfer-3610", "vllm-41189", "sglang-31117", "vllm-49210"} <= set(names)


def test_the_target_is_named_and_its_neighbours_are_not() -> None:
    found = document(DEVICE.format(grid=16, kernel="vllm::persistent::persistent_topk_kernel<512, 4>", block=12, value=1, target=2))
    assert found.verdict.signature == "vllm-51593"
    by_name = {m["name"]: m for m in found.signatures}
    assert by_name["vllm-51593"]["standing"] == "match"
    assert any("persistent_topk" in text for text in by_name["vllm-51593"]["seen"])
    assert any("max_seq_len" in text for text in by_name["vllm-51593"]["not_read"])


def test_the_same_class_but_not_this_bug() -> None:
    found = document(DEVICE.format(grid=16, kernel="acme::grid_reduce_kernel<4>", block=12, value=1, target=2))
    assert (found.verdict.class_, found.verdict.cause, found.verdict.signature) == ("gpu-spin-barrier", "peer-left", None)
    match = next(m for m in found.signatures if m["name"] == "vllm-51593")
    assert match["standing"] == "not this bug"
    assert "not so: the resident kernel is persistent_topk" in match["against"]


def test_a_fixed_release_is_not_this_bug() -> None:
    log = "=== log ===\nINFO 11-28 09:00:00 [core.py:77] Initializing a V1 LLM engine (v{}) with config: model='m'\n"
    device = DEVICE.format(grid=16, kernel="persistent_topk_kernel", block=12, value=1, target=2)
    assert document(log.format("0.27.1") + device).verdict.signature == "vllm-51593"
    found = document(log.format("0.33.0") + device)
    assert found.verdict.signature is None
    assert any("0.33.0 is not affected" in text for m in found.signatures for text in m["against"])
    # A build that is no release is judged by what was seen, not by its number.
    found = document(log.format("0.33.1rc1.dev5+gabc") + device)
    assert found.verdict.signature == "vllm-51593"


def test_identities_are_stable_and_differ_between_bugs() -> None:
    first = document(DEVICE.format(grid=16, kernel="vllm::persistent::persistent_topk_kernel<512, 4>", block=12, value=1, target=2))
    again = document(
        DEVICE.format(grid=16, kernel="vllm::persistent::persistent_topk_kernel<512, 4>", block=12, value=1, target=2).replace(
            "-p 9", "-p 4242"
        )
    )
    other = document(
        DEVICE.format(grid=24, kernel="flashinfer::sampling::RadixTopKMaskLogitsKernel_MultiCTA<512>", block=7, value=0, target=6)
    )
    assert first.verdict.identity == again.verdict.identity
    assert other.verdict.class_ == "gpu-spin-barrier"
    assert other.verdict.identity not in (None, first.verdict.identity)


GOOD = 'name = "x-1"\ntitle = "t"\nclass = "gpu-fault"\nupstream = ["x#1"]\n'


@pytest.mark.parametrize(
    "text",
    [
        "not toml = = =",
        GOOD.replace('"gpu-fault"', '"gpu-hungry"'),
        GOOD + 'cause = "peer-left"\n',
        GOOD.replace('title = "t"\n', ""),
        GOOD + 'affected = "about 3"\n',
        GOOD + '[[must]]\nsay = "s"\n',
        GOOD + '[[must]]\nsay = "s"\nkernel = "a"\nlog = "b"\n',
        GOOD + '[[must]]\nsay = "s"\nkernel = "("\n',
        GOOD + '[[must]]\nkernel = "a"\n',
    ],
)
def test_a_broken_signature_is_our_fault_and_says_where(text: str) -> None:
    with pytest.raises(OurFaultError, match=r"file\.toml"):
        load_signature(text, "file.toml")
