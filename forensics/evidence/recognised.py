"""Input in which nothing was recognised: it is named, with what it is instead and what would have been recognised.

And input that is no evidence though words of it look so: a program's source holds the messages that it can print.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Sequence

from ..records import UnreadItem
from .casefile import CaseFile, InputPart

__all__ = ["WHAT_IS_RECOGNISED", "is_python_source", "name_unrecognised", "nothing_recognised"]

WHAT_IS_RECOGNISED = (
    "what is recognised: a GPU core dump, cuda-gdb output, py-spy or faulthandler stacks, a vLLM log, nvidia-smi, dmesg, /metrics, "
    "NCCL RAS, watchdog or flight recorder, ps and /proc, a run directory; each also packed"
)


_STATEMENT = re.compile(rb"^(?:import|from|def|class|async def) \w", re.MULTILINE)
_MOST_SOURCE = 2 << 20


def is_python_source(text: bytes) -> bool:
    """Whether all of a text is a Python module that imports or defines something; no log and no stack is."""
    if len(text) > _MOST_SOURCE or not _STATEMENT.search(text):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return any(isinstance(node, kinds) for node in tree.body)


def name_unrecognised(case: CaseFile, name: str, parts: Sequence[InputPart], *, folder: bool, reported: bool) -> None:
    """List one given file or folder as unread if no reader found anything in its ``parts``. ``reported``: it is listed already."""
    if any(part.kinds for part in parts) or (reported and not folder):
        return
    case.unread.append(UnreadItem(what=name, why=_folder(parts) if folder else _file(parts), remedy=WHAT_IS_RECOGNISED))


def _folder(parts: Sequence[InputPart]) -> str:
    files = len({part.path for part in parts})
    return f"nothing in its {files} file(s) was recognised" if files else "there is no file in it that could be read"


def _file(parts: Sequence[InputPart]) -> str:
    if _empty(parts):
        return "it is empty"
    lines, unknown = sum(part.lines for part in parts), sum(part.unrecognised for part in parts)
    if not lines:
        notes = "; ".join(dict.fromkeys(part.note for part in parts if part.note))[:300]
        return f"nothing in it was recognised: {notes}" if notes else "nothing in it was recognised"
    if any(part.status == "partly" for part in parts):
        return f"nothing in the {lines} lines that were looked at was recognised"
    if unknown < lines:
        return f"{unknown} of its {lines} lines were not recognised, and the others tell nothing"
    return f"nothing in its {lines} line(s) was recognised"


def _empty(parts: Sequence[InputPart]) -> bool:
    return bool(parts) and all(part.note == "empty" and not part.lines for part in parts)


def nothing_recognised(case: CaseFile) -> str:
    """The sentence for a case in which no reader found anything, "" if one did."""
    if any(part.kinds for part in case.parts):
        return ""
    names = list(dict.fromkeys(part.path for part in case.parts))
    if not names:
        return "There was no file to read."
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    if _empty(case.parts):
        return f"Nothing to judge: {shown}: empty."
    return f"Nothing in {shown} was recognised as evidence."
