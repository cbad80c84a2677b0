"""Both questions on kernels of our own, with every guard and every wrong guard, and the witnesses run on the CPU ground."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4_repro.errors import CubinError
from dsv4_repro.forensics.audit.conditions import LaunchConditions
from dsv4_repro.forensics.audit.consumer import examine_images
from dsv4_repro.forensics.audit.replay import Replayer
from dsv4_repro.forensics.audit.slices import SliceStore, facts_from_json, facts_to_json
from dsv4_repro.forensics.audit.verdicts import ConsumerFinding, Witness
from dsv4_repro.kernels.build import builtin_image
from dsv4_repro.kernels.cache import Cache
from dsv4_repro.kernels.image import KernelImage
from dsv4_repro.kernels.plan import device_for_sm, plan_launch
from dsv4_repro.kernels.sass.symbolic_solver import Solver


def findings(
    name: str, sm: int = 120, *, replay: bool = False, exhaustive: bool = False, vec: int = 4
) -> dict[str, ConsumerFinding]:
    image = builtin_image(name, sm, 512, vec)
    found = examine_images(
        [image], store=SliceStore(), solver=Solver(), replay=Replayer() if replay else None, exhaustive=exhaustive
    )
    return {item.question: item for item in found}


@pytest.mark.parametrize("sm", [90, 100, 120])
def test_the_unguarded_kernel_is_vulnerable_and_its_witness_deadlocks(sm: int) -> None:
    found = findings("unguarded", sm, replay=True)
    agreement = found["agreement"]
    assert agreement.word == "VULNERABLE"
    witness = agreement.witness
    assert witness is not None
    assert (witness.length, witness.max_seq_len, witness.stride, witness.ctas_per_group) == (-1, 16384, 16384, 2)
    assert witness.replayed is True
    assert "stuck CTAs [12], arrival counter 1 of 2" in witness.replay
    assert any(text.startswith("LDG") for _, text in witness.instructions)
    assert found["bounds"].word == "VULNERABLE"


@pytest.mark.parametrize("sm", [90, 100, 120])
def test_the_guarded_kernel_is_proved(sm: int) -> None:
    found = findings("guard", sm)
    assert {item.word for item in found.values()} == {"PROVED"}
    assert "every later row by induction" in found["agreement"].covered


@pytest.mark.parametrize(
    ("name", "agreement", "bounds"),
    [
        ("guard-after-cast", "VULNERABLE", "VULNERABLE"),  # clamps after the cast: too late
        ("guard-one-path", "VULNERABLE", "VULNERABLE"),  # guards one path of two
        ("guard-stride-only", "VULNERABLE", "VULNERABLE"),  # bounded by the wrong one: peers leave by max_seq_len
        ("guard-max-seq-only", "PROVED", "VULNERABLE"),  # agrees with the peers, but reads past a shorter row
        ("guard-min-only", "PROVED", "PROVED"),  # a negative length becomes a full row: no disagreement, nothing past the row
    ],
)  # fmt: skip
def test_wrong_guards_are_caught_with_a_witness_each(name: str, agreement: str, bounds: str) -> None:
    found = findings(name, replay=True)
    assert (found["agreement"].word, found["bounds"].word) == (agreement, bounds)
    for item in found.values():
        if item.word == "VULNERABLE":
            assert item.witness is not None
            assert item.witness.launcher
            assert not item.witness.launcher.startswith("not shown")
    if agreement == "VULNERABLE":
        assert found["agreement"].witness is not None
        assert found["agreement"].witness.replayed is True
    if name == "guard-min-only":
        assert "negative length is taken for a full row" in found["bounds"].condition


@pytest.mark.parametrize("vec", [2, 1])
def test_the_other_vector_widths(vec: int) -> None:
    assert findings("unguarded", vec=vec)["agreement"].word == "VULNERABLE"
    assert findings("guard", vec=vec)["agreement"].word == "PROVED"


def test_a_second_run_needs_no_disassembler_and_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    images = [builtin_image(name, 90, 512, 4) for name in ("unguarded", "guard")]
    first = examine_images(images, store=SliceStore(), solver=Solver())

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the disassembler was called")

    monkeypatch.setattr("dsv4_repro.forensics.audit.slices.disassemble_functions", refuse)
    store = SliceStore()
    second = examine_images(images, store=store, solver=Solver())
    assert [(item.word, item.condition, item.witness) for item in second] == [
        (item.word, item.condition, item.witness) for item in first
    ]
    assert store.disassembler_calls == 0


def test_one_disassembler_call_a_cubin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [builtin_image("guard", 120, 512, 4), builtin_image("unguarded", 120, 512, 4)]
    store = SliceStore(Cache("slice", tmp_path), Cache("sass", tmp_path))
    examine_images(images, store=store, solver=Solver())
    assert store.disassembler_calls == len({image.cubin_sha256 for image in images})


@pytest.mark.parametrize("damage", [b"", b"no", zlib.compress(b"[]"), zlib.compress(b'{"name": 1}'), zlib.compress(b"{}" * 10)])
def test_a_damaged_cache_entry_is_made_again(damage: bytes, tmp_path: Path) -> None:
    image = builtin_image("guard", 120, 512, 4)
    cache = Cache("slice", tmp_path)
    store = SliceStore(cache)
    cache.store(store._key(image), damage)
    assert store.cached(image) is None
    assert {item.word for item in examine_images([image], store=store, solver=Solver())} == {"PROVED"}
    assert store.cached(image) is not None


def test_facts_survive_the_cache() -> None:
    image = builtin_image("guard", 120, 512, 4)
    facts = SliceStore().whole(image)
    assert facts_from_json(facts_to_json(facts)) == facts


def test_a_bounded_solver_says_cannot_tell() -> None:
    class Tired(Solver):
        def ask(self, conditions: object) -> object:  # type: ignore[override]
            from dsv4_repro.kernels.sass.symbolic_solver import Answer

            return Answer("unknown", reason="timeout")

    image = builtin_image("guard", 120, 512, 4)
    found = examine_images([image], store=SliceStore(), solver=Tired())
    assert {item.word for item in found} == {"CANNOT TELL"}
    assert all("timeout" in item.why for item in found)


def test_a_cubin_that_cannot_be_read_is_cannot_tell_not_a_crash() -> None:
    image = builtin_image("guard", 120, 512, 4)
    broken = replace(image, cubin=image.cubin[: len(image.cubin) // 2], cubin_sha256="0" * 64)
    (found,) = examine_images([broken], store=SliceStore(), solver=Solver())
    assert found.word == "CANNOT TELL"
    assert found.why


def test_a_kernel_without_a_barrier_is_cannot_tell(tmp_path: Path) -> None:
    image = builtin_image("guard", 120, 512, 4)
    store = SliceStore(Cache("slice", tmp_path))  # not the session's: what is kept here is made up
    facts = store.whole(image)
    store.keep(image, replace(facts, polls=()), facts.rows)
    (found,) = examine_images([image], store=store, solver=Solver())
    assert (found.word, "no poll" in found.why) == ("CANNOT TELL", True)


def test_an_unknown_architecture_is_cannot_tell() -> None:
    image = replace(builtin_image("guard", 120, 512, 4), sm=65)
    (found, *_) = examine_images([image], store=SliceStore(), solver=Solver())
    assert found.word == "CANNOT TELL"


def test_solver_and_interpreter_that_disagree_are_not_hidden() -> None:
    image = builtin_image("unguarded", 120, 512, 4)
    found = examine_images([image], store=SliceStore(), solver=Solver(), replay=lambda image, finding: (False, "completed"))
    agreement = next(item for item in found if item.question == "agreement")
    assert agreement.word == "CANNOT TELL"
    assert "disagree" in agreement.why


def test_values_that_may_be_read_are_holds_only_after_a_run() -> None:
    image = builtin_image("guard", 120, 512, 4)
    raw = ConsumerFinding(
        arch="sm_120", top_k=512, vec=4, question="bounds", word="CANNOT TELL", why="R1 is live", condition="R1 at +0x10",
        witness=Witness(length=20000, max_seq_len=16384, stride=16384),
    )  # fmt: skip
    outcome, text = Replayer()(image, raw)
    assert outcome is False
    assert "no index behind it" in text
    outcome, text = Replayer()(builtin_image("guard-stride-only", 120, 512, 4), raw)
    assert outcome is True
    assert "behind the row" in text or "fault" in text


def test_replays_are_kept_by_content(tmp_path: Path) -> None:
    image = builtin_image("unguarded", 120, 512, 4)
    first, second = Replayer(Cache("replay", tmp_path)), Replayer(Cache("replay", tmp_path))
    one = examine_images([image], store=SliceStore(), solver=Solver(), replay=first)
    two = examine_images([image], store=SliceStore(), solver=Solver(), replay=second)
    assert (first.runs, second.runs) == (1, 0)
    assert one[0].witness is not None
    assert two[0].witness is not None
    assert two[0].witness.replay == one[0].witness.replay + " (kept from an earlier run)"


def test_the_conditions_name_the_rows_that_wait() -> None:
    conditions = LaunchConditions(SliceStore())
    plan = plan_launch(8, 16384, 16384, 512, device_for_sm(120))
    lengths = [4000, 4001, 16384, 0, -1, 5, 40000, 32768]
    assert conditions.waiting_rows(builtin_image("unguarded", 120, 512, 4), plan, lengths) == [4, 6]
    assert conditions.waiting_rows(builtin_image("guard", 120, 512, 4), plan, lengths) == []
    long = plan_launch(8, 16384, 65536, 512, device_for_sm(120))
    assert conditions.waiting_rows(builtin_image("unguarded", 120, 512, 4), long, lengths) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"), [("unguarded", (1 << 32) - 32769), ("guard", 0), ("guard-after-cast", (1 << 32) - 32769)]
)
def test_all_lengths_confirm_the_solver(name: str, count: int) -> None:
    assert findings(name, exhaustive=True)["agreement"].exhaustive == count


def test_images_of_no_cubin_at_all() -> None:
    assert examine_images([], store=SliceStore(), solver=Solver()) == []
    empty = KernelImage("x", b"", "0" * 64, 120, "f", 512, 4, 0x380, 56, 0, 64, 1024)
    (found,) = examine_images([empty], store=SliceStore(), solver=Solver())
    assert found.word == "CANNOT TELL"
    with pytest.raises(CubinError):
        SliceStore().whole(empty)
