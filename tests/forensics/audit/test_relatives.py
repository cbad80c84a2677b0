"""The related defects: launch arithmetic, who zeroes the row states, the histogram ring run here, and FlashInfer's source text."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dsv4_repro.errors import DownloadError
from dsv4_repro.forensics.audit.recipe import Recipe
from dsv4_repro.forensics.audit.relatives import histogram_ring, occupancy, row_state
from dsv4_repro.forensics.audit.relatives_source import flashinfer_findings, flashinfer_version, sentinel_fill
from dsv4_repro.forensics.audit.release_source import ReleaseSource
from dsv4_repro.forensics.audit.slices import SliceStore
from dsv4_repro.kernels.build import builtin_image
from dsv4_repro.kernels.plan import release_profile


def test_the_release_without_headroom_can_starve_a_member() -> None:
    (first, *_) = occupancy(Recipe(), 120, release_profile("0.20.0"), "this release")
    assert (first.word, first.number, first.arch) == ("VULNERABLE", "vllm#41189", "sm_120")
    assert "never start" in first.why


def test_headroom_holds_and_where_it_is_silently_skipped_is_said() -> None:
    (first, second) = occupancy(Recipe(), 121, release_profile("0.27.1"), "this release")
    assert first.word == "HOLDS"
    assert "headroom is silently skipped" in first.why
    assert "48 slots" in first.why  # GB10: 48 SMs, one CTA each
    assert (second.name, second.word) == ("oversubscribed fallback", "VULNERABLE")
    assert "RuntimeError instead of a launch" in second.why


def test_the_later_fallback_is_another_operator() -> None:
    found = occupancy(Recipe(), 121, release_profile("0.30.0"), "this release")
    assert [(item.name, item.word) for item in found] == [("co-residency", "HOLDS"), ("oversubscribed fallback", "HOLDS")]
    assert "top_k_per_row_decode" in found[1].why


def test_an_architecture_without_a_card_is_cannot_tell() -> None:
    assert [item.word for item in occupancy(Recipe(), 42, release_profile("0.27.1"), "")] == ["CANNOT TELL"]


@pytest.mark.parametrize(
    ("version", "word"), [("0.20.0", "VULNERABLE"), ("0.20.1", "VULNERABLE"), ("0.20.2", "HOLDS"), ("0.33.0", "HOLDS")]
)
def test_who_zeroes_the_row_states(version: str, word: str) -> None:
    image = builtin_image("guard", 120, 512, 4)
    found = row_state(release_profile(version), "this release", [(image, SliceStore().whole(image))])
    assert found.word == word


def test_an_unknown_build_s_host_code_is_not_guessed() -> None:
    image = builtin_image("guard", 120, 512, 4)
    assert row_state(None, "", [(image, SliceStore().whole(image))]).word == "CANNOT TELL"


def test_a_kernel_that_writes_the_counter_itself_is_caught_in_its_code() -> None:
    image = builtin_image("reset-race", 120, 512, 4)
    found = row_state(release_profile("0.27.1"), "this release", [(image, SliceStore().whole(image))])
    assert found.word == "VULNERABLE"
    assert "STG" in found.evidence[0]


def test_the_histogram_ring_is_run_not_recited() -> None:
    assert histogram_ring(builtin_image("guard", 120, 512, 4)).word == "HOLDS"
    found = histogram_ring(builtin_image("ring-misaligned", 120, 512, 4))
    assert found.word == "VULNERABLE"
    assert "rows [2, 4, 6]" in found.why
    # An unguarded length plays no role here: the rows are legal.
    assert histogram_ring(builtin_image("unguarded", 120, 512, 4)).word == "HOLDS"


#: A header written here in the shape of FlashInfer's: who resets, and whether the CTA converges before it arrives.
HEADER = """
__device__ void AdvanceRadixGroupBarrier(RadixRowState* state, int& phase, uint32_t ctas, uint32_t tx) {
  %(converge)s
  if (tx == 0) {
    red_release(&state->arrival_counter, 1);  // publish
  }
  wait_ge(&state->arrival_counter, (phase + 1) * ctas, tx);
  phase++;
}
template <int N>
__global__ void kernel(RadixRowState* state) {
  for (uint32_t i = tx; i < 256; i += N) {
    state->histogram[i] = 0;
  }
  %(sync)s
  AdvanceRadixGroupBarrier(state, phase, ctas, tx);
  /* the end: */
  if (%(who)s) {
    if (tx == 0) {
      st_release(&state->arrival_counter, 0);
    }
  }
}
"""


@pytest.mark.parametrize(
    ("who", "converge", "sync", "words"),
    [
        ("cta_in_group == 0", "", "", ["VULNERABLE", "VULNERABLE"]),
        ("s_is_last_cta", "", "__syncthreads();", ["HOLDS", "HOLDS"]),
        ("s_is_last_cta", "__syncthreads();", "", ["HOLDS", "HOLDS"]),
        ("s_is_last_cta", "// __syncthreads();", "", ["HOLDS", "VULNERABLE"]),
        ("something_else", "", "__syncthreads();", ["CANNOT TELL", "HOLDS"]),
    ],
)  # fmt: skip
def test_flashinfer_s_reset_and_arrival(who: str, converge: str, sync: str, words: list[str]) -> None:
    text = HEADER % {"who": who, "converge": converge, "sync": sync}
    found = flashinfer_findings("1.2.3", lambda version: text)
    assert [item.word for item in found] == words
    assert all("1.2.3" in item.why for item in found)
    assert [item.number for item in found] == ["flashinfer#3610", "flashinfer#4131"]


def refusing(version: str) -> str:
    raise DownloadError("no network")


@pytest.mark.parametrize(
    ("version", "header"), [(None, refusing), ("1.0", refusing), ("1.0", lambda version: ""), ("1.0", lambda version: "{" * 9999)]
)
def test_no_source_is_cannot_tell(version: str | None, header: Callable[[str], str]) -> None:
    assert [item.word for item in flashinfer_findings(version, header)] == ["CANNOT TELL", "CANNOT TELL"]


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (b"Name: vllm\nRequires-Dist: flashinfer-python==0.6.16.post3\n", "0.6.16.post3"),
        (b"Requires-Dist: flashinfer-python (==0.6.12)\n", "0.6.12"),
        (b"Requires-Dist: flashinfer-python>=0.6\n", None), (b"Requires-Dist: flashinfer-cubin==0.6.12\n", None),
        (b"\xff\xfe\x00", None),
    ],
)  # fmt: skip
def test_which_flashinfer_the_build_pins(metadata: bytes, expected: str | None) -> None:
    assert flashinfer_version({"vllm-1.dist-info/METADATA": metadata, "other.py": b""}) == expected


SENTINEL = """
def combine(topk, out=None):
    if out is None:
        combined_indices = torch.full((4, 8), fill_value=-1)
    else:
        combined_indices, lens = out
        {fill}
    kernel(combined_indices)
"""


@pytest.mark.parametrize(
    ("fill", "word"), [("combined_indices.fill_(-1)", "HOLDS"), ("combined_indices.fill_(0)", "VULNERABLE"), ("pass", "VULNERABLE")]
)
def test_a_caller_s_buffer_is_filled_with_the_sentinel(fill: str, word: str) -> None:
    source = ReleaseSource({"vllm/a.py": SENTINEL.replace("{fill}", fill).encode()})
    found = sentinel_fill(source)
    assert (found.word, found.how, found.number) == (word, "syntax", "vllm#55299")


def test_no_such_buffer() -> None:
    assert sentinel_fill(ReleaseSource({"vllm/a.py": b"x = 1", "vllm/b.py": b"def ("})).word == "NOT PRESENT"
    assert sentinel_fill(ReleaseSource({"vllm/amd/a.py": SENTINEL.replace("{fill}", "pass").encode()})).word == "NOT PRESENT"
