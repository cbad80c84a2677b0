"""Take private values out of texts and documents; each is replaced by a pseudonym that is the same everywhere in one bundle.

Two passes: ``learn`` collects host and user names from the places where they stand, over all texts; ``text`` replaces everything,
learned names also where nothing around them gives them away. A pseudonym is a keyed hash of the value; the key is made for one
bundle and thrown away, so ranks and hosts still correlate inside it, and nobody can try candidates against it. What was replaced
where is counted in ``Tally`` by file and line; values are never written.

Pseudonyms keep the form of what they stand for (an address stays an address of a range reserved for documentation, a name a name),
so that the readers of logs and stacks see the same facts as before.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .redact_prompts import Replace, hide_locals, hide_prompts
from .redact_rules import (
    HOST_CONTEXTS,
    KEEPABLE,
    KINDS,
    PROTECTED,
    SECRET_FORMS,
    USER_CONTEXTS,
    Rule,
    address_is_private_text,
    is_public_host,
    is_secret_key,
    looks_like_version,
)
from .redact_text import QUOTED, Lines, harmless, literal_end, shaped, span_sub

__all__ = ["KeepError", "Redactor", "Tally", "looks_numeric", "parse_keep", "protected_words"]

_IPV4 = re.compile(r"(?<![\w.])(?<!\d-)(?:25[0-5]|2[0-4]\d|1?\d?\d)(?:\.(?:25[0-5]|2[0-4]\d|1?\d?\d)){3}(?![\w]|\.\d)")
_IPV6 = re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![\w:])")
_IPV6_START = re.compile(r"^(?:[23][0-9a-f]{3}|fe[89ab][0-9a-f]|f[cd][0-9a-f]{2}):", re.IGNORECASE)
_MAC = re.compile(r"(?<![0-9A-Fa-f:.-])[0-9A-Fa-f]{2}([:-])(?:[0-9A-Fa-f]{2}\1){4}[0-9A-Fa-f]{2}(?![0-9A-Fa-f:-])")
_SERIAL = re.compile(r"(?i)\b(?:Serial Number|chassis serial number|board serial)\s*:\s*(?P<value>[A-Za-z0-9-]{6,40})")
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]{0,2000}(?:\x07|\x1b\\)?|[@-Z\\-_])")
_KEY_VALUE = re.compile(
    r"(?<![\w.])[\"']?(?P<key>[A-Za-z_][\w.-]{2,60})[\"']?\s{0,4}[:=]\s{0,4}"
    r"(?:\[\s*)?(?:[\"'](?P<quoted>[^\"'\n]{3,4096})[\"']|(?P<bare>[^\s\"'\[\](){},;<>]{6,4096}))"
)
_LIST_KEY = re.compile(r"(?<![\w.])[\"']?(?P<key>[A-Za-z_][\w.-]{2,60})[\"']?\s{0,4}[:=]\s{0,4}(?=[\[(])")
_API_KEYS = re.compile(r"(?<![\w-])(?P<flag>--api-keys?)(?P<rest>(?:[ \t\x00]+(?!-)[^\s\x00\"'\\,]+)+)")
_MOST_NAMES = 4000
_MOST_LINES = 40


@functools.cache
def protected_words() -> frozenset[str]:
    """Words that are replaced nowhere but where something marks them as a name: those that the log reader's patterns know."""
    from ..forensics.evidence.engine_log import EVENTS

    known = {word for pattern in EVENTS.values() for word in re.findall(r"[a-z]{3,}", pattern.pattern.lower())}
    return PROTECTED | known


class KeepError(ValueError):
    """A ``--keep`` that names no kind."""


def parse_keep(words: Iterable[str]) -> tuple[frozenset[str], frozenset[str]]:
    """(kinds that stay, literal texts that stay): ``hosts``, or ``text:gpu-07``. KeepError for anything else, and for secrets."""
    kinds: set[str] = set()
    texts: set[str] = set()
    for word in words:
        if word.startswith("text:") and len(word) > 5:
            texts.add(word[5:].lower())
        elif word in KEEPABLE:
            kinds.add(word)
        elif word in KINDS:
            raise KeepError(f"{word} never stay")
        else:
            raise KeepError(f"{word[:60]!r} is no kind of value: {', '.join(KEEPABLE)}, or text:VALUE")
    return frozenset(kinds), frozenset(texts)


@dataclass(slots=True)
class Tally:
    """What was replaced: by kind, rule and file; ``lines`` are of the text as it was, the first ones only."""

    counts: dict[tuple[str, str, str], int] = field(default_factory=dict)
    lines: dict[tuple[str, str, str], list[int]] = field(default_factory=dict)
    pseudonyms: dict[str, set[str]] = field(default_factory=dict)

    def add(self, kind: str, rule: str, place: str, line: int, pseudonym: str) -> None:
        key = (kind, rule, place)
        self.counts[key] = self.counts.get(key, 0) + 1
        seen = self.lines.setdefault(key, [])
        if line and len(seen) < _MOST_LINES and (not seen or seen[-1] != line):
            seen.append(line)
        if pseudonym:
            self.pseudonyms.setdefault(kind, set()).add(pseudonym)

    def document(self) -> list[dict[str, Any]]:
        """One entry a kind: number of replacements and of different values, and where. Holds no replaced value."""
        found = []
        for kind, words in KINDS.items():
            rows = sorted((key, count) for key, count in self.counts.items() if key[0] == kind)
            if rows:
                found.append({
                    "kind": kind, "what": words, "replaced": sum(count for _, count in rows),
                    "different_values": len(self.pseudonyms.get(kind, ())),
                    "places": [
                        {"file": key[2], "rule": key[1], "count": count, "lines": self.lines.get(key, [])} for key, count in rows
                    ],
                })  # fmt: skip
        return found


class Redactor:
    """One bundle's redaction. ``salt``: the key of the pseudonyms, at least 16 bytes. ``hosts``, ``users``: names known otherwise
    (this machine's own). ``keep``: kinds and texts that stay. ``hide``: further texts to replace everywhere.
    """

    def __init__(
        self,
        salt: bytes,
        *,
        keep_kinds: frozenset[str] = frozenset(),
        keep_texts: frozenset[str] = frozenset(),
        hosts: Sequence[str] = (),
        users: Sequence[str] = (),
        hide: Sequence[str] = (),
    ) -> None:
        if len(salt) < 16:
            raise ValueError("a salt of fewer than 16 bytes")
        self._salt = salt
        self._keep = keep_kinds
        self._keep_texts = keep_texts
        self.tally = Tally()
        self._made: dict[tuple[str, str], str] = {}
        self._taken: set[str] = set()
        self._names: dict[str, str] = {}
        self._pattern: re.Pattern[str] | None = None
        self._sealed = False
        for kind, names in (("hosts", hosts), ("users", users)):
            for name in names:
                self._know(kind, name, sure=True)
        self._hide = tuple(text for text in hide if len(text) >= 2)

    # -- names ---------------------------------------------------------------------------------------------------------------------

    def _know(self, kind: str, name: str, *, sure: bool = False) -> None:
        """Remember a name for the second pass, if it is distinctive enough to be replaced wherever it stands."""
        lowered = name.lower().strip(".-_")
        if kind in self._keep or not self.is_name(lowered) or lowered in protected_words() or len(self._names) >= _MOST_NAMES:
            return
        plain = re.fullmatch(r"[a-z]+", lowered) is not None
        if sure or kind == "users" or not plain:
            self._names.setdefault(lowered, kind)
        if kind == "hosts" and "." in lowered and not address_is_private_text(lowered):
            label = lowered.partition(".")[0]
            if self.is_name(label) and re.search(r"[\d-]", label):
                self._names.setdefault(label, kind)

    def is_name(self, lowered: str) -> bool:
        """Whether a word can be somebody's name: no word of the trade, no public host, no number or version."""
        return (
            2 < len(lowered) <= 253
            and lowered not in PROTECTED
            and lowered not in self._keep_texts
            and not is_public_host(lowered)
            and not lowered.isdigit()
            and re.fullmatch(r"v?\d[\d.]*(?:[a-z]+\d*)?", lowered) is None
        )

    def learn(self, text: str) -> None:
        """First pass over one text: collect host and user names."""
        lowered = text.lower()
        for rule in (*HOST_CONTEXTS, *USER_CONTEXTS):
            if rule.kind in self._keep or (rule.gate and not any(word in lowered for word in rule.gate)):
                continue
            for found in rule.pattern.finditer(text):
                name = found.group("value")
                if not (rule.kind == "hosts" and re.fullmatch(r"[\d.]+", name)):
                    self._know(rule.kind, name)

    def seal(self) -> None:
        """End of the first pass."""
        self._sealed = True
        names = sorted(self._names, key=lambda name: (-len(name), name))
        if names:
            self._pattern = re.compile(
                r"(?<![A-Za-z0-9])(?:" + "|".join(map(re.escape, names)) + r")(?![A-Za-z0-9])", re.IGNORECASE
            )

    # -- pseudonyms ----------------------------------------------------------------------------------------------------------------

    def pseudonym(self, kind: str, value: str) -> str:
        """What stands for a value; the same for the same value (names without regard to case)."""
        canonical = value.lower() if kind in ("hosts", "users", "macs", "ips") else value
        if kind == "hosts" and "." in canonical and address_is_private_text(canonical) is None:
            label, _, domain = canonical.partition(".")
            return f"{self._issue('hosts', label)}.{self._issue('domains', domain)}"
        return self._issue(kind, canonical)

    def _issue(self, kind: str, canonical: str) -> str:
        made = self._made.get((kind, canonical))
        if made is None:
            attempt = 0
            while made is None or made in self._taken:
                mac = hmac.new(self._salt, f"{kind}\0{attempt}\0{canonical}".encode("utf-8", "surrogatepass"), hashlib.sha256)
                made = shaped(kind, canonical, mac.digest())
                attempt += 1
            self._made[kind, canonical] = made
            self._taken.add(made)
        return made

    def keeps(self, kind: str) -> bool:
        """Whether values of a kind stay on request."""
        return kind in self._keep

    def replace(self, kind: str, rule: str, value: str, place: str, line: int) -> str:
        """The pseudonym of a value, counted; the value itself if it may stay or is a pseudonym already."""
        if value.lower() in self._keep_texts or value in self._taken or any(part in self._taken for part in value.split(".", 1)):
            return value
        made = self.pseudonym(kind, value)
        self.tally.add(kind, rule, place, line, made)
        return made

    # -- second pass ---------------------------------------------------------------------------------------------------------------

    def text(self, text: str, place: str, first_line: int = 1) -> str:
        """The text without private values; terminal escapes are taken out too, so that none can split a value."""
        if not self._sealed:
            self.seal()
        if "\x1b" in text:
            text = _ANSI.sub("", text).replace("\x1b", "")
        lines = Lines(text, first_line)
        lowered = text.lower()
        if "prompts" not in self._keep:
            text = hide_prompts(
                text, lines, self._prompt(place), lambda line: self.tally.add("prompts", "token ids", place, line, "")
            )
        for rule in SECRET_FORMS:
            if not rule.gate or any(word in lowered for word in rule.gate):
                text = self._by_rule(rule, text, place, lines)
        text = self._by_key(text, place, lines)
        for literal in self._hide:
            text = re.sub(
                re.escape(literal),
                lambda m: self.replace("hidden", "--hide", m.group(), place, lines.of(m)),
                text,
                flags=re.IGNORECASE,
            )
        if "macs" not in self._keep:
            text = _MAC.sub(lambda m: self._mac(m, place, lines), text)
            if "erial" in text:
                text = span_sub(_SERIAL, text, lambda value, m: self.replace("macs", "serial number", value, place, lines.of(m)))
        for kind, rules in (("users", USER_CONTEXTS), ("hosts", HOST_CONTEXTS)):
            if kind not in self._keep:
                for rule in rules:
                    if not rule.gate or any(word in lowered for word in rule.gate):
                        text = self._by_rule(rule, text, place, lines)
        if self._pattern is not None:
            text = self._pattern.sub(lambda m: self._name(m, place, lines), text)
        if "ips" not in self._keep:
            text = _IPV4.sub(lambda m: self._ipv4(m, place, lines), text)
            if ":" in text:
                text = _IPV6.sub(lambda m: self._ipv6(m, place, lines), text)
        return text

    def _by_rule(self, rule: Rule, text: str, place: str, lines: Lines) -> str:
        def value_of(value: str, match: re.Match[str]) -> str:
            if rule.kind == "secrets":
                if harmless(value):
                    return value
                return self.replace("secrets", rule.name, value, place, lines.of(match)) + "\n" * value.count("\n")
            lowered = value.lower()
            if rule.kind == "hosts" and (re.fullmatch(r"[\d.]+", value) or looks_numeric(value)):
                return value
            if not self.is_name(lowered):
                return value
            return self.replace(rule.kind, rule.name, value, place, lines.of(match))

        return span_sub(rule.pattern, text, value_of)

    def _by_key(self, text: str, place: str, lines: Lines) -> str:
        """``api_key='…'``, ``"token": "…"``, ``Authorization: …``."""
        if not any(
            word in text.lower()
            for word in ("key", "token", "pass", "secret", "auth", "cookie", "credential", "pwd", "hook", "conn")
        ):
            return text

        def one(match: re.Match[str]) -> str:
            if not is_secret_key(match.group("key")):
                return match.group()
            group = "quoted" if match.group("quoted") is not None else "bare"
            value = match.group(group)
            if harmless(value) or value in self._taken or (group == "bare" and len(value) < 8):
                return match.group()
            made = self.replace("secrets", "key of a setting", value, place, lines.of(match))
            start, end = match.start(group) - match.start(), match.end(group) - match.start()
            whole = match.group()
            return whole[:start] + made + whole[end:]

        return _KEY_VALUE.sub(one, self._secret_lists(text, place, lines))

    def _secret_lists(self, text: str, place: str, lines: Lines) -> str:
        """``'api_key': ['one', 'two']`` and ``--api-key one two``: every member goes."""

        def each(words: re.Match[str]) -> str:
            line = lines.of(words)
            rest = re.sub(
                r"[^\s\x00]+",
                lambda word: (
                    word.group() if harmless(word.group()) else self.replace("secrets", "argument", word.group(), place, line)
                ),
                words.group("rest"),
            )
            return words.group("flag") + rest

        text = _API_KEYS.sub(each, text)
        out: list[str] = []
        at = 0
        for match in _LIST_KEY.finditer(text):
            begin = match.end()
            if begin < at or not is_secret_key(match.group("key")):
                continue
            end = literal_end(text, begin)
            line = lines.of(match)

            def quoted(inner: re.Match[str], line: int = line) -> str:
                value = inner.group()[1:-1]
                if harmless(value) or not value:
                    return inner.group()
                quote = inner.group()[0]
                return quote + self.replace("secrets", "key of a setting", value, place, line) + quote

            out += [text[at:begin], QUOTED.sub(quoted, text[begin:end])]
            at = end
        out.append(text[at:])
        return "".join(out)

    def _name(self, match: re.Match[str], place: str, lines: Lines) -> str:
        kind = self._names.get(match.group().lower(), "hosts")
        return self.replace(kind, "name seen elsewhere", match.group(), place, lines.of(match))

    def _ipv4(self, match: re.Match[str], place: str, lines: Lines) -> str:
        value = match.group()
        if address_is_private_text(value) is None or looks_like_version(match.string, match.start(), match.end()):
            return value
        return self.replace("ips", "IPv4 address", value, place, lines.of(match))

    def _ipv6(self, match: re.Match[str], place: str, lines: Lines) -> str:
        value = match.group()
        full = value.count(":") == 7 and "::" not in value and all(len(part) > 2 for part in value.split(":")[:1])
        if not (full or _IPV6_START.match(value)) or address_is_private_text(value) is None:
            return value
        return self.replace("ips", "IPv6 address", value, place, lines.of(match))

    def _mac(self, match: re.Match[str], place: str, lines: Lines) -> str:
        value = match.group().replace("-", ":").lower()
        if value in ("00:00:00:00:00:00", "ff:ff:ff:ff:ff:ff"):
            return match.group()
        made = self.replace("macs", "hardware address", value, place, lines.of(match))
        return made.replace(":", match.group(1))

    # -- prompts -------------------------------------------------------------------------------------------------------------------

    def _prompt(self, place: str) -> Replace:
        return lambda rule, value, line: self.replace("prompts", rule, value, place, line)

    def locals_of_stacks(self, text: str, place: str, first_line: int = 1) -> str:
        """Values of local variables in a stack dump that was taken with them: quoted texts of some length go."""
        if "prompts" in self._keep:
            return text
        return hide_locals(text, Lines(text, first_line), self._prompt(place))


def looks_numeric(value: str) -> bool:
    """Numbers, addresses and versions are no host names."""
    return re.fullmatch(r"[\d._:-]+", value) is not None
