"""Words of a command line without the keys, tokens and passwords among them, for anything that is shown or written down. Pure.

A secret shows by the flag before it (also where argparse takes the beginning of a name, ``--api-k``), by the key of a JSON value,
or by its own form (``reports.redact_rules``). What stays is meant for a person; a bundle is redacted by its own rules again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ...forensics.collect.process_table import ProcessEntry

__all__ = ["LEFT_OUT", "shown_title", "shown_words"]

LEFT_OUT = "<left out>"
_FLAGS = ("api-key", "api-keys", "hf-token", "ssl-keyfile-password")
#: Shorter beginnings name other flags too.
_LEAST = 4
_JSON_VALUE = re.compile(
    r"""(["'])(?P<key>[\w.-]{2,80})\1(?P<between>\s{0,8}:\s{0,8})(["'])(?P<value>(?:\\.|(?!\4)[^\\]){1,4096})\4"""
)
_MOST_WORD = 65536


def _names_a_secret(flag: str) -> bool:
    from ...reports.redact_rules import is_secret_key

    name = flag.lstrip("-").replace("_", "-").lower()
    if any(name.startswith(known) or (len(name) >= _LEAST and known.startswith(name)) for known in _FLAGS):
        return True
    return is_secret_key(name.rpartition(".")[2])


def _without_forms(word: str) -> str:
    from ...reports.redact_rules import SECRET_FORMS, is_secret_key

    def value(match: re.Match[str]) -> str:
        if not is_secret_key(match["key"]):
            return match[0]
        quote, sign = match[1], match[4]
        return f"{quote}{match['key']}{quote}{match['between']}{sign}{LEFT_OUT}{sign}"

    text = _JSON_VALUE.sub(value, word[:_MOST_WORD])
    for rule in SECRET_FORMS:
        if rule.kind == "secrets":
            text = rule.pattern.sub(lambda match: match[0].replace(match["value"], LEFT_OUT), text)
    return text


def shown_words(words: Iterable[str]) -> tuple[str, ...]:
    """The words, each secret replaced by ``LEFT_OUT``; several values behind one flag become one."""
    found: list[str] = []
    hiding = False
    for word in words:
        if word.startswith("-") and not re.fullmatch(r"-\d[\d.]*", word):
            name, equals, _ = word.partition("=")
            hiding = _names_a_secret(name)
            found.append(name if hiding else _without_forms(word))
            if hiding and equals:
                found.append(LEFT_OUT)
        elif not hiding:
            found.append(_without_forms(word))
        elif found[-1] != LEFT_OUT:
            found.append(LEFT_OUT)
    return tuple(found)


def shown_title(entry: ProcessEntry, limit: int) -> str:
    """What a process calls itself, for a message: secrets first, then the cut (half a key is a key's half)."""
    return (" ".join(shown_words(entry.argv)) or entry.comm)[:limit]
