"""The document, the table, JUnit, and the verb's exit status."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from pydantic import ValidationError

from dsv4_repro.forensics.audit.build_audit import assemble
from dsv4_repro.forensics.audit.junit import junit_xml
from dsv4_repro.forensics.audit.recipe import Recipe
from dsv4_repro.forensics.audit.table import report_lines, summary_rows
from dsv4_repro.forensics.audit.verdicts import (
    ORDER,
    AuditReport,
    BuildAudit,
    BuildIdentity,
    ConsumerFinding,
    ProducerFinding,
    RecipeAnswer,
    Unread,
    Witness,
    Word,
    worst,
)
from dsv4_repro.repro.__main__ import main
from dsv4_repro.repro.audit_run import folded, parse_arch

WITNESS = Witness(
    length=-1, max_seq_len=16384, stride=16384, instructions=((16, "LDG.E R1,[R2]"),), replay="deadlock", replayed=True
)


def build(target: str = "x", word: Word = "VULNERABLE", recipe: Word = "HOLDS", known: bool = True) -> BuildAudit:
    finding = ConsumerFinding(
        arch="sm_120", top_k=512, vec=4, question="agreement", word=word, witness=WITNESS if word == "VULNERABLE" else None,
        why="why \x00 <&>" if word == "CANNOT TELL" else "",
    )  # fmt: skip
    answer = RecipeAnswer(arch="sm_120", word=recipe, wedges_at=(3,) if recipe == "VULNERABLE" else ())
    produced = ProducerFinding(path="native", word="VULNERABLE", lengths=(-1, 0), padding=(-1, 0))
    return BuildAudit(
        target=target,
        build=BuildIdentity(name=f"vllm=={target}", known=known),
        consumer=(finding,),
        producer=(produced,),
        recipe=(answer,),
    )


def test_words_need_their_proof() -> None:
    with pytest.raises(ValidationError, match="witness"):
        ConsumerFinding(arch="sm_120", top_k=512, vec=4, question="agreement", word="VULNERABLE")
    with pytest.raises(ValidationError, match="says why"):
        ConsumerFinding(arch="sm_120", top_k=512, vec=4, question="agreement", word="CANNOT TELL")
    with pytest.raises(ValidationError):
        ConsumerFinding(arch="sm_120", top_k=512, vec=4, question="agreement", word="SAFE")  # type: ignore[arg-type]


def test_the_worst_word_stands_for_several() -> None:
    for first in ORDER:
        for second in ORDER:
            assert worst([first, second]) == min(first, second, key=ORDER.index)
    assert worst([]) == "NOT PRESENT"


@pytest.mark.parametrize(
    ("word", "recipe", "fail_on", "outcome"),
    [
        ("VULNERABLE", "HOLDS", "vulnerable", "vulnerable"), ("VULNERABLE", "HOLDS", "recipe", "clean"), ("VULNERABLE",
        "VULNERABLE", "recipe", "vulnerable"),
        ("PROVED", "PROVED", "vulnerable", "clean"), ("CANNOT TELL", "CANNOT TELL", "vulnerable", "inconclusive"),
        ("NOT PRESENT", "NOT PRESENT", "vulnerable", "clean"),
        ("VULNERABLE", "VULNERABLE", "never", "clean"),
    ],
)  # fmt: skip
def test_the_outcome(word: str, recipe: str, fail_on: str, outcome: str) -> None:
    report = assemble([build("a", "PROVED", "PROVED"), build("b", word, recipe)], Recipe(), 1.0, fail_on=fail_on)  # type: ignore[arg-type]
    assert report.outcome == outcome


def test_a_build_that_could_not_be_opened_is_not_clean() -> None:
    lost = BuildAudit(target="y", build=BuildIdentity(name="y", known=False), unread=(Unread(what="y", why="HTTP 500"),))
    assert lost.kernel_word == "CANNOT TELL"
    assert assemble([lost], Recipe(), 1.0).outcome == "inconclusive"


def test_the_document_is_its_schema_and_comes_back() -> None:
    report = assemble([build(), build("c", "CANNOT TELL", "CANNOT TELL", known=False)], Recipe(), 2.5)
    text = json.dumps(report.document())
    assert AuditReport.model_validate_json(text) == report
    assert report.document()["schema"] == "dsv4-repro/audit/1"
    schema = AuditReport.model_json_schema()
    assert set(report.document()) == set(schema["properties"])


def test_kernel_and_recipe_are_two_columns_and_unknown_builds_are_called_so() -> None:
    report = assemble(
        [build("0.23.0", "VULNERABLE", "HOLDS"), build("/x/y.so", "VULNERABLE", "VULNERABLE", known=False)], Recipe(), 1.0
    )
    rows = summary_rows(report)
    assert (rows[0][1], rows[0][6]) == ("VULNERABLE", "HOLDS on sm_120")
    assert rows[1][0] == "/x/y.so (unknown build)"
    lines = report_lines(report, Recipe().lines(), details=True)
    assert any("length -1, max_seq_len 16384" in line for line in lines)
    assert all(isinstance(line, str) and "\n" not in line for line in lines)


@pytest.mark.parametrize(("target", "following"), [
    ("vllm==0.27.1", "dsv4-repro run drain --kernel vllm==0.27.1"), ("a b.whl", "dsv4-repro run drain --kernel 'a b.whl'"),
    ("4711", "dsv4-repro why 4711"), ("https://x/a.whl", ""),
])  # fmt: skip
def test_the_last_lines_are_verdict_what_it_rests_on_and_next_command(target: str, following: str) -> None:
    report = assemble([build(target, recipe="VULNERABLE")], Recipe(), 1.0)
    lines = report_lines(report, [], details=False)
    last = lines[lines.index("VULNERABLE, 1.0 s") :]
    assert last[1].startswith(f"{target}: a negative length wedges its kernel; this recipe ")
    assert [line.removeprefix("next: ").split("    #")[0] for line in last[2:]] == ([following] if following else [])
    assert "--recipe" in report_lines(assemble([build(target)], Recipe(), 1.0), [], details=False)[-1]
    assert report_lines(assemble([build("c", "PROVED")], Recipe(), 1.0), [], details=False)[-1].endswith(", 1.0 s")


def test_junit_is_well_formed_whatever_the_texts_hold() -> None:
    root = ElementTree.fromstring(junit_xml(assemble([build(), build("c", "CANNOT TELL")], Recipe(), 1.0)))
    suites = root.findall("testsuite")
    assert [suite.get("failures") for suite in suites] == ["2", "1"]
    assert [suite.get("errors") for suite in suites] == ["0", "1"]
    for suite in suites:
        assert int(suite.get("tests", "0")) == len(suite.findall("testcase"))


@pytest.mark.parametrize(("text", "expected"), [("all", None), ("sm_120", 120), ("SM90", 90), ("sm_90a", 90), ("100", 100)])
def test_architectures(text: str, expected: int | None) -> None:
    assert parse_arch(text) == expected


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["builtin:guard", "--arch", "sm_120"], 0), (["builtin:unguarded", "--arch", "sm_120"], 3), (["builtin:unguarded",
        "--arch", "sm_120", "--fail-on", "never"], 0),
        (["builtin:unguarded", "--fail-on", "sometimes"], 2), (["builtin:guard", "--arch", "volta"], 2),
        (["builtin:nothing"], 2), (["builtin:guard", "--recipe", "x=1"], 2),
        (["/does/not/exist.whl"], 2), (["999999999"], 2),
    ],
)  # fmt: skip
def test_the_exit_status(arguments: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", *arguments, "--no-relatives"]) == status
    capsys.readouterr()


def test_json_goes_to_standard_output_alone_and_files_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    status = main(
        ["audit", "builtin:unguarded", "--arch", "sm_120", "--json", "--out", str(out), "--junit", str(tmp_path / "j.xml")]
    )
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert status == 3
    assert document["outcome"] == "vulnerable"
    finding = next(item for item in document["builds"][0]["consumer"] if item["question"] == "agreement")
    assert finding["witness"]["length"] == -1
    assert finding["witness"]["replayed"] is True
    assert json.loads((out / "audit.json").read_text()) == document
    assert "VULNERABLE" in (out / "audit.txt").read_text()
    ElementTree.fromstring((tmp_path / "j.xml").read_text())
    ElementTree.fromstring((out / "junit.xml").read_text())


def test_of_several_targets_one_that_fails_does_not_lose_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["audit", "builtin:guard", "/does/not/exist.whl", "--arch", "sm_120", "--json", "--no-relatives"])
    document = json.loads(capsys.readouterr().out)
    assert status == 5
    assert document["outcome"] == "inconclusive"
    assert [item["consumer"] != [] for item in document["builds"]] == [True, False]
    assert "exist.whl" in document["builds"][1]["unread"][0]["why"]


def test_an_architecture_that_the_build_does_not_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from dsv4_repro.kernels.build import builtin_image

    path = tmp_path / "k.cubin"
    path.write_bytes(builtin_image("guard", 120, 512, 4).cubin)
    status = main(["audit", str(path), "--arch", "sm_90", "--no-relatives"])
    text = capsys.readouterr().out
    assert status == 5
    assert "the build has code for sm_120 only" in text


def test_on_a_terminal_prose_is_wrapped_and_tables_instructions_and_commands_are_not() -> None:
    table = "build    kernel      bounds      producer  max_seq_len  operator  this recipe  wedges at and more"
    command = "  mitigation on sm_120: capture (--compilation-config '{\"cudagraph_capture_sizes\":[2,4,6,8,10,12]}'): HOLDS"
    code = "    +0x500 LDG.E.STRONG.GPU.AND.SOMETHING.VERY.LONG R7,desc[UR14][R20.64] and so on to the end"
    prose = "    assuming: " + "the members of a group read the same length, " * 6
    lines = list(folded([table, command, code, prose]))
    assert lines[:3] == [table, command, code]
    assert len(lines) > 4
    assert all(len(line) <= 80 and line.startswith("    ") for line in lines[3:])
    assert " ".join(" ".join(lines[3:]).split()) == " ".join(prose.split())


def test_a_folder_that_cannot_be_made_is_no_fault_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["audit", "builtin:guard", "--arch", "sm_120", "--out", str(tmp_path / "file")]) == 5
    assert "cannot create the folder: File exists" in capsys.readouterr().err
