"""The house rules of docs/whats-here.md, held by machine."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kernels", "forensics", "scenarios", "reports", "repro")
#: Who may import whom: arrows go down only. ``errors`` and ``clock`` in the root may be imported by all.
ARROWS: dict[str, frozenset[str]] = {
    "kernels": frozenset(),
    "forensics": frozenset({"kernels"}),
    "scenarios": frozenset({"kernels", "forensics"}),
    "reports": frozenset({"forensics"}),
    "repro": frozenset({"kernels", "forensics", "scenarios", "reports"}),
}
#: Not modules of ours: the agent is a distribution of its own, the scripts run inside a person's debugger.
ELSEWHERE = (ROOT / "repro" / "agent", ROOT / "forensics" / "scripts")
#: Longer than 600 lines, with the reason.
LONG: dict[str, str] = {}
#: Uses of a clock that is not ``clock``, with the reason.
OWN_TIME = {"kernels/release_cache.py": "compares the age of files on the disk with the disk's own times"}
#: Processes started outside the collectors, with the reason.
OWN_PROCESSES = {"forensics/evidence/archive.py": "pipes a compressed stream through its decompressor"}


def _ours(path: Path) -> bool:
    return not any(path.is_relative_to(folder) for folder in ELSEWHERE)


def _sources(package: str) -> list[Path]:
    return sorted(path for path in (ROOT / package).rglob("*.py") if _ours(path))


def _modules() -> list[Path]:
    return [ROOT / "errors.py", ROOT / "clock.py", *(path for package in PACKAGES for path in _sources(package))]


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    """(module inside the package that is imported, line), resolved from relative imports; TYPE_CHECKING ones too."""
    own = path.relative_to(ROOT).with_suffix("").parts
    package = own[:-1]
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - (node.level - 1)]
            target = [*base, *(node.module.split(".") if node.module else [])]
            if node.module:
                yield ".".join(target), node.lineno
            else:
                yield from ((".".join([*target, alias.name]), node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "dsv4_repro":
            yield "absolute:" + node.module, node.lineno
        elif isinstance(node, ast.Import):
            yield from (("absolute:" + alias.name, node.lineno) for alias in node.names if alias.name.split(".")[0] == "dsv4_repro")


def test_arrows_go_down_only() -> None:
    broken = []
    for package in PACKAGES:
        for path in _sources(package):
            for target, line in _imports(path):
                top = target.split(".")[0]
                if top != package and top not in ARROWS[package] and top not in {"errors", "clock", "", "__version__"}:
                    broken.append(f"{path.relative_to(ROOT)}:{line} imports {target}")
    assert broken == []


def test_imports_inside_are_relative() -> None:
    absolute = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in _modules()
        for target, line in _imports(path)
        if target.startswith("absolute:")
    ]
    assert absolute == []


def test_there_is_no_circle_of_modules_at_import_time() -> None:
    """Only imports outside functions and TYPE_CHECKING count: those run when a module is imported."""
    graph: dict[str, set[str]] = {}
    names = {_name(path) for path in _modules()}
    for path in _modules():
        tree = _tree(path)
        hidden = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            or (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING")
        ]
        lines = {number for node in hidden for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
        graph[_name(path)] = {target for target, line in _imports(path) if line not in lines and target in names}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail, name])
        if name not in done:
            for target in graph[name]:
                visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_no_test_imports_what_a_normal_install_lacks() -> None:
    """``dsv4_repro.tests`` and ``dsv4_repro.benchmarks`` are there only where the source tree itself is on the path."""
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in _at_run_time(_tree(path)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            if any(re.match(r"dsv4_repro\.(tests|benchmarks)\b", name) for name in names):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found


def _at_run_time(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports outside ``if TYPE_CHECKING:``."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            pending += node.orelse
        else:
            pending += ast.iter_child_nodes(node)


def test_the_package_list_is_the_folders() -> None:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = document["tool"]["setuptools"]["packages"]
    found = {"dsv4_repro"} | {
        ".".join(["dsv4_repro", *path.parent.relative_to(ROOT).parts])
        for package in PACKAGES
        for path in (ROOT / package).rglob("__init__.py")
        if _ours(path)
    }
    assert sorted(listed) == sorted(found)
    assert len(listed) == len(set(listed))


def test_every_data_file_of_the_packages_is_declared() -> None:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    data = document["tool"]["setuptools"]["package-data"]
    declared = {
        path
        for package, patterns in data.items()
        for pattern in patterns
        for path in (ROOT.joinpath(*package.split(".")[1:])).glob(pattern)
    }
    loose = [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file()
        and path.suffix not in {".py", ".pyc", ".md"}
        and path not in declared
        and ELSEWHERE[0] not in path.parents
    ]
    assert loose == []


def test_the_root_holds_no_other_modules() -> None:
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "errors.py", "clock.py"}


def test_no_module_is_called_utils_and_none_is_too_long() -> None:
    """60 to 400 lines is the aim; beyond 600 a module needs a reason in LONG."""
    names = [path.name for path in _modules()]
    assert not {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"} & set(names)
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in _modules()}
    too_long = {name: length for name, length in lengths.items() if length > 600 and name not in LONG}
    assert too_long == {}


def _public_modules() -> list[Path]:
    return [path for path in _modules() if path.name not in {"__init__.py", "__main__.py"}]


@pytest.mark.parametrize("path", _public_modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_all_names_what_a_module_defines(path: Path) -> None:
    tree = _tree(path)
    exported = next(
        (
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign)
            and any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)
        ),
        None,
    )
    if exported is None:
        made = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
        assert not made, "no __all__ (only a module of nothing but constants may have none)"
        return
    defined: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    assert set(exported) <= defined
    assert len(set(exported)) == len(exported)


@pytest.mark.parametrize("path", _modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_bare_silence_and_no_unfinished_marks(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"\b(TODO|FIXME|XXX|HACK)\b", text)
    assert not re.search(r"#\s*type:\s*ignore(?!\[)", text), "say which error is ignored"
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or (isinstance(node.type, ast.Name) and node.type.id in {"Exception", "BaseException"})
            silent = all(isinstance(item, ast.Pass) for item in node.body)
            assert not (broad and silent), f"line {node.lineno}: everything is caught and nothing said"


@pytest.mark.parametrize("path", _modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if path.name == "__init__.py" and not text.strip():
        return
    assert ast.get_docstring(_tree(path))


def _clock_uses(path: Path) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{node.lineno} time.{node.attr}"
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in {"time", "_time"}
        and node.attr in {"sleep", "monotonic", "time"}
    ]


def test_time_is_a_parameter() -> None:
    """Only ``clock`` sleeps and reads the clock."""
    watched = [path for path in _modules() if path.name != "clock.py" and str(path.relative_to(ROOT)) not in OWN_TIME]
    assert [use for path in watched for use in _clock_uses(path)] == []


def _process_imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules = [node.module or ""]
        else:
            continue
        found += [
            f"{path.relative_to(ROOT)}:{node.lineno} {name}" for name in modules if name in {"subprocess", "pynvml", "psutil"}
        ]
    return found


def test_only_the_edge_starts_processes() -> None:
    """``forensics`` apart from its collectors judges what it is given; so do ``reports`` and ``scenarios``."""
    edge = (ROOT / "forensics" / "collect",)
    broken = []
    for package in ("forensics", "reports", "scenarios"):
        for path in _sources(package):
            if any(path.is_relative_to(folder) for folder in edge) or str(path.relative_to(ROOT)) in OWN_PROCESSES:
                continue
            broken += _process_imports(path)
    assert broken == []


def _paths_in_map() -> list[str]:
    text = (ROOT / "docs" / "whats-here.md").read_text(encoding="utf-8")
    return sorted({name for name in re.findall(r"`([\w./*-]+/[\w./*-]*|[\w-]+\.\w+)`", text) if not name.startswith(("http", "/"))})


@pytest.mark.parametrize("name", _paths_in_map())
def test_every_path_in_the_map_exists(name: str) -> None:
    assert list(ROOT.glob(name.rstrip("/"))), f"docs/whats-here.md names {name}"


def test_the_map_names_every_package() -> None:
    text = (ROOT / "docs" / "whats-here.md").read_text(encoding="utf-8")
    for package in PACKAGES:
        assert f"`{package}/" in text


def test_the_documented_exit_statuses_are_those_of_the_program() -> None:
    from dsv4_repro.repro import exits

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = {int(status) for status in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    assert table == {*exits.STATUS.values(), exits.NOT_AS_EXPECTED, exits.USAGE, exits.OUR_FAULT, exits.INTERRUPTED}


def test_the_readme_names_every_verb() -> None:
    from dsv4_repro.repro.cli import build

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z]+)(?: [^`]*)?`", text))
    assert set(build().commands) - named == set()


def test_a_normal_install_is_what_is_tested_or_the_clone_itself() -> None:
    """The package under test is either installed or this clone by a link; never some third copy."""
    package = importlib.import_module("dsv4_repro")
    spec = importlib.util.find_spec("dsv4_repro.repro.__main__")
    assert spec is not None
    assert spec.origin is not None
    assert Path(package.__path__[0]).resolve() == Path(spec.origin).resolve().parents[1]


def test_exceptions_are_still_needed() -> None:
    for name in [*LONG, *OWN_TIME, *OWN_PROCESSES]:
        assert (ROOT / name).is_file(), f"{name} is gone: so is its exception"


def _tracked() -> list[Path]:
    """The files that git tracks; in an unpacked source distribution all that is there but what tools leave behind."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        return [path for name in listed.decode().split("\0") if name and (path := ROOT / name).is_file()]
    skipped = {".lint", ".build", ".venv", "runs", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", "__pycache__"}
    return [path for path in ROOT.rglob("*") if path.is_file() and not skipped & set(path.relative_to(ROOT).parts)]


def test_tracked_files_are_small() -> None:
    """15 MiB in all; nothing that is built."""
    tracked = _tracked()
    assert tracked
    assert sum(path.stat().st_size for path in tracked) < 15 << 20
    assert [str(path) for path in tracked if path.suffix in {".pyc", ".so", ".o", ".whl"}] == []
