"""A standalone reproducer of one launch: a single Python file for cuda-python alone, or for torch and vLLM's own op.

For the kernel written here the file carries its source (Apache-2.0) and compiles it with NVRTC; for a release it calls the op of
the vLLM that is installed where it runs. Either exits 3 when the launch hangs, having released itself, 0 when it completes, 5 when
something is missing, and says what it needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ... import __version__
from ...kernels.build import VARIANTS, parse_builtin, source_path
from ..atomic import write_atomic

if TYPE_CHECKING:
    from .minimise import Minimised

__all__ = ["reproducer_text", "write_reproducer"]

_TEMPLATES = Path(__file__).parent / "templates"


def reproducer_text(done: Minimised) -> str:
    """The file's text. Placeholders are constants of ours, numbers and quoted strings; nothing of a run goes in unquoted."""
    parsed = parse_builtin(done.cell.kernel)
    values = {
        "VERSION": repr(__version__),
        "IDENTITY": repr(done.identity),
        "LENGTHS": repr(list(done.case.lengths)),
        "WIDTH": repr(done.case.width),
        "TOP_K": repr(done.case.top_k),
        "MAX_SEQ_LEN": repr(done.case.promised),
        "CHUNK": repr(int(done.launch["chunk_size"])),
        "CTAS_PER_GROUP": repr(int(done.launch["ctas_per_group"])),
        "GROUPS": repr(int(done.launch["groups"])),
        "DYNAMIC_SMEM": repr(int(done.launch["dynamic_smem"])),
        "VEC": repr(int(done.launch["vec"])),
        "SEEN": repr(_seen(done)),
    }
    if parsed is None:
        template = "reproducer_op.txt"
        values["KERNEL"] = repr(done.cell.kernel if "==" in done.cell.kernel else "vllm")
    else:
        template = "reproducer_driver.txt"
        variant, settings = parsed
        defines = [f"-DDSV4_{name}" for name in VARIANTS[variant].defines]
        defines += [f"-DDSV4_{name.upper()}={value}" for name, value in sorted(settings.items())]
        values["DEFINES"] = repr(defines)
        values["SOURCE"] = _raw(source_path("persistent_topk.cu").read_text(encoding="utf-8"))
    text = (_TEMPLATES / template).read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def _seen(done: Minimised) -> str:
    how = "proved by interpreting its machine code on a CPU" if done.cell.ground == "cpu" else "seen on the device"
    return f"{how} ({done.launch['device']}, sm_{done.launch['sm']}), {done.confirm} of {done.confirm}"


def _raw(source: str) -> str:
    """The source as a raw string literal that reads as it is written."""
    assert "'''" not in source
    assert not source.endswith("\\")
    return "r'''\n" + source.rstrip() + "\n'''"


def write_reproducer(path: Path, done: Minimised) -> Path:
    """Write the file. RunStoreError for a full disk and the like."""
    text = reproducer_text(done)
    compile(text, str(path), "exec")  # a file that does not parse is never handed out
    write_atomic(path, text.encode(), mode=0o644)
    return path
