"""docs/licences.md names what an installation brings, with the licence that its metadata states."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
#: A family is recognised by these words, in a metadata field or classifier and in our table.
FAMILIES = {
    "Apache": r"apache",
    "MIT": r"\bmit\b",
    "BSD": r"bsd",
    "MPL": r"mpl|mozilla",
    "PSF": r"psf|python software foundation",
    "ISC": r"\bisc\b",
    "public domain": r"public.domain",
    "NVIDIA": r"nvidia",
}


def _key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _table() -> dict[str, str]:
    text = (ROOT / "docs" / "licences.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    return {_key(row[0]): row[-1] for row in rows if row[0] not in {"distribution", "---"}}


def _closure(names: list[str]) -> dict[str, importlib.metadata.Distribution]:
    """Installed distributions that these bring on this Python."""
    found: dict[str, importlib.metadata.Distribution] = {}
    queue = list(names)
    while queue:
        name = queue.pop()
        if _key(name) in found:
            continue
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found[_key(name)] = distribution
        for text in distribution.requires or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                queue.append(requirement.name)
    return found


def _declared() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [*project["dependencies"], *project["optional-dependencies"]["test"], *project["optional-dependencies"]["stacks"]]
    return [Requirement(text).name for text in texts]


def _families(text: str) -> set[str]:
    return {family for family, pattern in FAMILIES.items() if re.search(pattern, text, re.IGNORECASE)}


def _stated(distribution: importlib.metadata.Distribution) -> str:
    metadata = distribution.metadata
    fields = [*(metadata.get_all("License-Expression") or []), *(text[:400] for text in metadata.get_all("License") or [])]
    fields += [line for line in metadata.get_all("Classifier") or [] if line.startswith("License")]
    return " ".join(fields)


@pytest.mark.parametrize("name", sorted(_closure(_declared())))
def test_every_installed_dependency_is_listed_with_its_licence(name: str) -> None:
    table = _table()
    assert name in table, f"{name} is not in docs/licences.md"
    stated = _families(_stated(_closure([name])[name]))
    assert stated, f"the metadata of {name} states no licence that is known here"
    assert _families(table[name]) & stated, f"{name}: the table says {table[name]}, its metadata {sorted(stated)}"


def test_every_declared_dependency_is_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [text for texts in project["optional-dependencies"].values() for text in texts]
    table = _table()
    assert [name for text in [*project["dependencies"], *extras] if (name := _key(Requirement(text).name)) not in table] == []


def test_nothing_pins_nvidias_wheels_against_those_of_torch() -> None:
    """13.0 and later must do: an upper bound or an exact pin could exclude the version that torch pins."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    nvidia = [Requirement(text) for text in project["dependencies"] if text.startswith(("nvidia-cuda", "cuda-"))]
    assert nvidia
    for requirement in nvidia:
        assert {clause.operator for clause in requirement.specifier} == {">="}
        assert requirement.specifier.contains("13.0.0") or requirement.specifier.contains("13.0.48")


def test_the_base_install_needs_no_framework() -> None:
    names = set(_closure([Requirement(text).name for text in _base()]))
    assert not {"torch", "vllm", "ray", "matplotlib"} & names


def _base() -> list[str]:
    dependencies: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    return dependencies
