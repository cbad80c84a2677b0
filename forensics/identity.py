"""A hang's stable identity: the same for the same defect in the same code, whatever run, driver, address or architecture.

It is a short hash over the kernel's base name, what the wait loop compares (not how it is compiled), the relation of counter and
target to the group, which members are missing, and the class. Demangling here is only as deep as a base name needs.
"""

from __future__ import annotations

import hashlib
import json
import re

__all__ = ["base_name", "hang_identity", "readable_name"]

_ITANIUM = re.compile(r"^_+Z")


def base_name(kernel: str) -> str:
    """The kernel's own name, without namespaces, template arguments, parameters and return type; from mangled or readable text."""
    parts = _nested(kernel)
    if parts:
        return parts[-1]
    text = _without_brackets(kernel.strip())
    text = text.split("::")[-1].strip().split(" ")[-1] if text else ""
    return text.lstrip("*&") or kernel.strip()


def readable_name(kernel: str) -> str:
    """Namespaces and name, as people write them, without template arguments and signature; from mangled or readable text."""
    parts = _nested(kernel)
    if parts:
        return "::".join(parts)
    words = _without_brackets(kernel.strip()).split()
    return words[-1].lstrip("*&") if words else ""


def _nested(kernel: str) -> list[str]:
    """Identifiers of an Itanium-mangled name (``_ZN1a1bI…``: a, b); empty if it is not one."""
    found = _ITANIUM.match(kernel)
    if not found:
        return []
    at = found.end()
    nested = kernel[at : at + 1] == "N"
    at += nested
    while kernel[at : at + 1] in ("K", "V", "L", "r"):
        at += 1
    parts: list[str] = []
    while at < len(kernel):
        number = re.compile(r"\d{1,4}").match(kernel, at)
        if number is None:
            break
        length = int(number[0])
        name = kernel[number.end() : number.end() + length]
        if len(name) < length or length == 0:
            break
        parts.append(name)
        at = number.end() + length
        if not nested:
            break
    return [part for part in parts if not part.startswith("_GLOBAL__N")] if parts else []


def _without_brackets(text: str) -> str:
    """Text without ``<…>`` and ``(…)`` at any depth, so that a demangled signature leaves return type and name."""
    kept: list[str] = []
    depth = 0
    text = text.replace("(anonymous namespace)", "")
    for letter in text:
        if letter in "<(":
            depth += 1
        elif letter in ">)":
            depth = max(depth - 1, 0)
        elif depth == 0:
            kept.append(letter)
    return "".join(kept).strip()


def hang_identity(
    kernel: str,
    *,
    class_: str,
    cause: str | None,
    field: str | None,
    comparison: str | None,
    bits: int | None,
    scope: str,
    phase: str,
    missing: str,
) -> str:
    """Twelve hex digits. ``phase``: how value and target relate to the group; ``missing``: pattern of the members' fates."""
    words = [base_name(kernel), class_, cause, field, comparison, bits, scope, phase, missing]
    return hashlib.sha256(json.dumps(words, separators=(",", ":")).encode()).hexdigest()[:12]
