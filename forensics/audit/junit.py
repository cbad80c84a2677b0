"""The audit as JUnit XML: a suite a build, a case a finding; VULNERABLE is a failure, CANNOT TELL an error."""

from __future__ import annotations

from xml.etree import ElementTree

from .verdicts import AuditReport, BuildAudit

__all__ = ["junit_xml"]

_FORBIDDEN = {code: None for code in range(32) if code not in (9, 10, 13)} | {0xFFFE: None, 0xFFFF: None}


def _clean(text: str) -> str:
    """Without the characters that XML 1.0 does not have, and without half surrogates."""
    return text.translate(_FORBIDDEN).encode("utf-8", "replace").decode()


def _cases(build: BuildAudit) -> list[tuple[str, str, str, str]]:
    """(class, name, word, text)."""
    found: list[tuple[str, str, str, str]] = []
    for item in build.consumer:
        text = item.why or item.condition
        if item.witness is not None:
            text = (
                f"length {item.witness.length}, max_seq_len {item.witness.max_seq_len}, stride {item.witness.stride}. "
                f"{item.witness.replay}. {text}"
            )
        found.append(("consumer", f"{item.question} {item.arch} <{item.top_k},{item.vec}>", item.word, text))
    found += [("producer", item.path, item.word, f"{list(item.lengths)} {item.why}") for item in build.producer]
    found += [("recipe", item.arch, item.word, f"wedges at {list(item.wedges_at)}. {item.why}") for item in build.recipe]
    found += [("relative", f"{item.name} {item.number} {item.arch}".strip(), item.word, item.why) for item in build.relatives]
    return found


def junit_xml(report: AuditReport) -> str:
    """The document as text."""
    root = ElementTree.Element("testsuites", name="dsv4-repro audit", time=f"{report.seconds:.2f}")
    for build in report.builds:
        cases = _cases(build)
        suite = ElementTree.SubElement(
            root, "testsuite", name=_clean(build.build.name if build.build.known else f"{build.target} (unknown build)"),
            tests=str(len(cases)),
            failures=str(sum(word == "VULNERABLE" for _, _, word, _ in cases)), errors=str(sum(word == "CANNOT TELL" for _, _,
            word, _ in cases)),
            time=f"{build.seconds:.2f}",
        )  # fmt: skip
        for kind, name, word, text in cases:
            case = ElementTree.SubElement(suite, "testcase", classname=f"audit.{kind}", name=_clean(name), time="0")
            if word in ("VULNERABLE", "CANNOT TELL"):
                outcome = ElementTree.SubElement(
                    case, "failure" if word == "VULNERABLE" else "error", message=_clean(f"{word}: {text}"[:500])
                )
                outcome.text = _clean(text)
            else:
                ElementTree.SubElement(case, "system-out").text = _clean(f"{word}: {text}")
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"
