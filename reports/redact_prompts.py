"""Prompts and completions out of logs, requests and stack dumps: which texts and token ids are of a request, and what stays.

A text becomes its pseudonym and its length, a token id becomes 0; the number of ids, and negative ones (which are padding marks),
stay, because a verdict may rest on them.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from .redact_rules import TEXT_KEY, TOKEN_KEY
from .redact_text import QUOTED, Lines, literal_end

__all__ = ["Replace", "hide_locals", "hide_prompts"]

#: (rule, value, line) -> what stands for the value; counts it.
Replace = Callable[[str, str, int], str]

_NUMBERS = re.compile(r"(?<![\w'\".-])\d+(?![\w'\"])")
#: A text without any of these holds no prompt.
_ANNOUNCE = ("prompt", "token_ids", "input_ids", "output", "content", "completion", "text", "messages", "spec_decode")
#: Marks of a line that is one of a request or a reply.
_BODY = (
    '"role"',
    "'role'",
    '"choices"',
    "'choices'",
    "CompletionOutput",
    "/v1/completions",
    "/v1/chat",
    "Received request",
    "prompt",
)
_LOCAL = re.compile(r"(?m)^\s{8,}\w+: .*$")


def hide_prompts(text: str, lines: Lines, replace: Replace, count_ids: Callable[[int], None]) -> str:
    """Texts and token ids behind a key that announces them, where the line is one of a request or a reply.

    ``count_ids``: told the line of every list of token ids that was replaced.
    """
    if not any(word in text for word in _ANNOUNCE):
        return text
    out: list[str] = []
    at = 0
    keys = sorted(
        [(m.start(), m, True) for m in TEXT_KEY.finditer(text)] + [(m.start(), m, False) for m in TOKEN_KEY.finditer(text)],
        key=lambda i: i[0],
    )
    for _, match, is_text in keys:
        begin = match.end()
        if begin < at:
            continue
        if is_text and match.group("key") in ("text", "content", "input", "output", "outputs", "completion", "completions"):
            line = text[text.rfind("\n", 0, begin) + 1 : begin + 400].partition("\n")[0] if len(text) > 400 else text
            if match.group("key") in ("text", "content", "input") and not any(word in line for word in _BODY):
                continue
            if match.group("key").startswith(("output", "completion")) and text[begin] not in "\"'[":
                continue
        end = literal_end(text, begin)
        line_number = lines.at(match.start())
        body = text[begin:end]
        made = _texts(body, line_number, replace) if is_text else _token_ids(body, line_number, count_ids)
        out += [text[at:begin], made]
        at = end
    out.append(text[at:])
    return "".join(out)


def _texts(body: str, line: int, replace: Replace) -> str:
    """Every quoted text of a literal, except keys and roles, becomes its pseudonym; its length is kept as a number."""

    def one(match: re.Match[str]) -> str:
        whole = match.group()
        quote = whole[0]
        inside = whole[1:-1] if len(whole) > 1 and whole.endswith(quote) else whole[1:]
        rest = body[match.end() : match.end() + 3].lstrip()
        if (
            not inside
            or rest.startswith(":")
            or inside in ("role", "system", "user", "assistant", "tool", "content", "text", "type")
        ):
            return whole
        if inside.startswith("[text-"):
            return whole
        made = replace("prompt or completion", inside, line)
        return f"{quote}[{made}, {len(inside)} characters]{quote if len(whole) > 1 and whole.endswith(quote) else ''}"

    return QUOTED.sub(one, body)


def _token_ids(body: str, line: int, count_ids: Callable[[int], None]) -> str:
    """Token ids become 0, their number and the negative ones (which are padding marks) stay."""
    replaced, count = _NUMBERS.subn("0", body)
    if count and replaced != body:
        count_ids(line)
    return replaced


def hide_locals(text: str, lines: Lines, replace: Replace) -> str:
    """Values of local variables in a stack dump that was taken with them: quoted texts of some length go."""

    def one(match: re.Match[str]) -> str:
        def quoted(inner: re.Match[str]) -> str:
            inside = inner.group()[1:-1]
            if len(inside) < 24 or inside.startswith("[text-"):
                return inner.group()
            made = replace("local variable", inside, lines.of(match))
            return f"{inner.group()[0]}[{made}, {len(inside)} characters]{inner.group()[0]}"

        return QUOTED.sub(quoted, match.group())

    return _LOCAL.sub(one, text)
