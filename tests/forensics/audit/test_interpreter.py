"""The interpreter for a release's Python: what it computes, what it refuses, and that nothing of the release can reach the
machine."""

from __future__ import annotations

from typing import Any

import pytest

from dsv4_repro.forensics.audit.interpreter import Interpreter
from dsv4_repro.forensics.audit.recipe import Recipe
from dsv4_repro.forensics.audit.release_source import ReleaseSource
from dsv4_repro.forensics.audit.tensors import Tensor
from dsv4_repro.forensics.audit.values import CannotDecideError, InterpretedError, StepBudgetError, Unknown
from dsv4_repro.forensics.audit.vllm_standin import release_runtime


def interpreter(text: str, **more: str) -> Interpreter:
    members = {"m.py": text, **{name.replace("__", "/") + ".py": body for name, body in more.items()}}
    return release_runtime(ReleaseSource({name: body.encode() for name, body in members.items()}), Recipe(), 120, 188).interpreter


def call(text: str, *args: Any, name: str = "f", **more: str) -> Any:
    found = interpreter(text, **more)
    return found.call(found.name_of_module("m", name), list(args), {})


@pytest.mark.parametrize(
    ("text", "args", "expected"),
    [
        ("def f(a, b=2, *c, d=4, **e): return (a, b, c, d)", (1,), (1, 2, (), 4)),
        ("def f(n):\n t = 0\n for i in range(n):\n  if i == 3: continue\n  if i == 6: break\n  t += i\n return t", (10,), 12),
        ("def f(n):\n while n > 10: n = n // 2\n else: n = -n\n return n", (100,), -6),
        ("X = 3\ndef f(): return [x * X for x in range(4) if x % 2]", (), [3, 9]),
        ("def f(a): return 1 < a < 5 and 'yes' or 'no'", (3,), "yes"),
        ("def f(): return (lambda x: x + 1)(2)", (), 3),
        ("def f(a):\n if (b := a * 2) > 5: return b\n return None", (3,), 6),
        ("class A:\n x = 5\n def g(self): return self.x + self.y\ndef f():\n a = A()\n a.y = 2\n return a.g()", (), 7),
        ("class A:\n def g(self): return 1\nclass B(A):\n def g(self): return super().g() + 1\ndef f(): return B().g()", (), 2),
        ("from dataclasses import dataclass\n@dataclass\nclass P:\n a: int\n b: int = 7\ndef f(): return P(1).b + P(1, 2).b",
        (), 9),
        ("class A:\n @property\n def p(self): return 4\n @staticmethod\n def s(x): return x\ndef f(): return A().p + A.s(1)",
        (), 5),
        ("def f(a, b):\n (x, y), z = (a, b), 3\n return x + y + z", (1, 2), 6),
        ("import math\ndef f(): return math.ceil(2.1)", (), 3),
        ("def f(d): return d.get('a', 0) + len(d)", ({"a": 5},), 6),
        ("def f():\n try:\n  raise ValueError('no')\n except ValueError:\n  return 1\n finally:\n  pass", (), 1),
        ("from other import g\ndef f(): return g() + 1", (), 42),
    ],
)  # fmt: skip
def test_python_means_what_it_means(text: str, args: tuple[Any, ...], expected: Any) -> None:
    assert call(text, *args, other="def g(): return 41") == expected


def test_an_unknown_value_spreads_and_a_branch_on_it_says_where() -> None:
    assert isinstance(call("from nowhere import thing\ndef f(): return thing.a.b(3) + 1"), Unknown)
    with pytest.raises(CannotDecideError, match=r"nowhere.*m\.py:3"):
        call("from nowhere import thing\ndef f():\n if thing.ready: return 1\n return 2")


def test_a_known_operand_still_decides() -> None:
    text = "from nowhere import thing\ndef f(): return (thing or True) and not (thing and False)"
    assert call(text) is True


def test_unknown_code_spoils_the_tensors_that_it_is_given() -> None:
    text = "import torch\nfrom nowhere import g\ndef f():\n t = torch.zeros(3, dtype=torch.int32)\n u = t[:2]\n g(t)\n return u"
    assert call(text).tolist() == [None, None]


def test_the_release_s_own_error_is_not_ours() -> None:
    with pytest.raises(InterpretedError, match="AssertionError"):
        call("def f():\n assert 1 > 2, 'never'")
    with pytest.raises(InterpretedError, match="KeyError"):
        call("def f(): return {}['x']")


@pytest.mark.parametrize(
    "text",
    [
        "import os\ndef f(): return os.system('true')",
        "def f(): return ().__class__.__bases__[0].__subclasses__()",
        "def f(): return open('/etc/passwd').read()",
        "def f(): return __import__('os').getpid()",
        "def f(): return eval('1+1')",
        "def f(): return exec('x = 1')",
        "def f(t): return t.array.__class__",
        "import torch\ndef f(): return torch.zeros(2).base.__init__.__globals__",
        "def f(): return getattr(f, '__globals__')",
        "def f(): return f.__code__.co_consts",
        "def f(): return (lambda: 0).__globals__",
        "import torch\ndef f(): return torch.zeros.call",
    ],
)  # fmt: skip
def test_nothing_of_the_machine_is_reachable(text: str) -> None:
    """Escapes of Python sandboxes give an unknown value or a refusal, never an object of this process."""
    try:
        found = call(text, *([0] if "def f(t)" in text else []))
    except (CannotDecideError, InterpretedError):
        return
    assert isinstance(found, Unknown), found


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n while True: pass",
        "def f(): return f()",
        "def f(): return [0] * 10**12",
        "def f(): return 'x' * 10**12",
        "def f(): return 2 ** 10**9",
        "def f(): return 1 << 10**9",
        "import torch\ndef f(): return torch.zeros((1 << 20, 1 << 20))",
        "def f():\n a = []\n while True: a.append(a)",
        "import torch\ndef f(): return torch.arange(10**12)",
        "def f(): return sum(range(10**12))",
        "def f(): return list(range(10**12))",
        "from vllm.triton_utils import triton, tl\n@triton.jit\ndef k(): pass\ndef f(): k[(10**9,)]()",
    ],
)  # fmt: skip
def test_bounds_hold(text: str) -> None:
    with pytest.raises((StepBudgetError, CannotDecideError, InterpretedError)):
        call(text)


@pytest.mark.parametrize("text", ["def f(:", "\x00", "def f():\n" + " " * 3 + "x = " + "(" * 5000, "a" * (5 << 20)])
def test_files_that_are_no_python_are_refused(text: str) -> None:
    with pytest.raises(CannotDecideError):
        call(text)


def test_in_place_operations_are_seen_through_every_view() -> None:
    text = """
import torch
def f():
    buffer = torch.zeros((8,), dtype=torch.int32)
    view = buffer[2:6].view(2, 2)
    view[:] = torch.arange(4, dtype=torch.int32).view(2, 2) - 2
    view //= 4
    view.clamp_(min=-1)
    buffer[7:].fill_(9)
    return buffer
"""
    assert call(text).tolist() == [0, 0, -1, -1, 0, 0, 0, 9]


def test_uninitialised_memory_is_unknown_until_it_is_written() -> None:
    text = "import torch\ndef f():\n t = torch.empty(3, dtype=torch.int32)\n t[1] = 5\n return t"
    assert call(text).tolist() == [None, 5, None]


def test_a_triton_kernel_runs_program_by_program() -> None:
    text = """
import torch
from vllm.triton_utils import tl, triton
@triton.jit
def helper(x):
    return tl.maximum(x, 0)
@triton.jit
def k(src, dst, n, BLOCK: tl.constexpr):
    off = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + off, helper(tl.load(src + off, mask=off < n, other=-7)) + tl.where(off < n, 1, 100), mask=off < n + 1)
def f():
    src = torch.arange(6, dtype=torch.int32) - 3
    dst = torch.zeros(8, dtype=torch.int32)
    k[(2,)](src, dst[1:], 5, BLOCK=4)
    return dst
"""
    assert call(text).tolist() == [0, 1, 1, 1, 1, 2, 100, 0]


def test_a_triton_access_outside_its_buffer_is_the_release_s_fault() -> None:
    text = """
import torch
from vllm.triton_utils import tl, triton
@triton.jit
def k(dst):
    tl.store(dst + 5, 1)
def f():
    k[(1,)](torch.zeros(3, dtype=torch.int32))
"""
    with pytest.raises(InterpretedError, match="outside its buffer"):
        call(text)


def test_compiled_operators_are_recorded_not_run() -> None:
    text = "import torch\ndef f():\n t = torch.zeros(2)\n return torch.ops._C.persistent_topk(t, 5, name=1)"
    runtime = release_runtime(ReleaseSource({"m.py": text.encode()}), Recipe(), 120, 188)
    result = runtime.interpreter.call(runtime.interpreter.name_of_module("m", "f"), [], {})
    assert isinstance(result, Unknown)
    (made,) = runtime.recorder.calls
    assert (made.library, made.name, made.args[1], made.kwargs, made.place) == ("_C", "persistent_topk", 5, {"name": 1}, "m.py:4")


@pytest.mark.parametrize(("sm", "expected"), [(75, [False, False]), (90, [True, False]), (120, [True, True]), (121, [True, True])])
def test_the_platform_is_the_architecture_in_question(sm: int, expected: list[bool]) -> None:
    text = (
        "from vllm.platforms import current_platform as p\ndef f(): return [p.has_device_capability(90), "
        "p.is_device_capability_family(120)]"
    )
    runtime = release_runtime(ReleaseSource({"m.py": text.encode()}), Recipe(), sm, 188)
    assert runtime.interpreter.call(runtime.interpreter.name_of_module("m", "f"), [], {}) == expected


def test_the_configuration_answers_with_the_release_s_own_defaults_and_nothing_made_up() -> None:
    text = (
        "from vllm.config import get_current_vllm_config as c\ndef f():\n k = c().kernel_config\n return [k.backend, k.later, "
        "c().scheduler_config.max_num_seqs]"
    )
    config = "class KernelConfig:\n    backend: str = 'auto'\n    later: int | None = None\n"
    members = {"m.py": text.encode(), "vllm/config/kernel.py": config.encode()}
    runtime = release_runtime(ReleaseSource(members), Recipe(max_num_seqs=9), 120, 188)
    found = runtime.interpreter.call(runtime.interpreter.name_of_module("m", "f"), [], {})
    assert found[0] == "auto"
    assert isinstance(found[1], Unknown)  # None is resolved when the server starts: not known here
    assert found[2] == 9


def test_int32_wraps_as_on_the_device() -> None:
    text = "import torch\ndef f():\n t = torch.full((1,), 2147483647, dtype=torch.int32)\n return t + 1"
    found = call(text)
    assert isinstance(found, Tensor)
    assert found.tolist() == [-(1 << 31)]
