"""The hooks themselves: each wraps one function of vLLM, calls it unchanged, and looks at what went in and came out.

A failure on our side never reaches vLLM: it is said once and that hook's work stops. What vLLM's own function raises goes through.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .guard import Guard
from .recorder import Recorder
from .ring import Step
from .said import Said
from .sidestream import Launch
from .targets import BUILDER, DISPATCH_V2, OUTPUT_V2, RUNNER_V1, RUNNER_V2, TARGETS, TOPK_MODULES, Target

__all__ = ["Hooks"]

_MARK = "_dsv4_repro_agent"
_STEP = "_dsv4_repro_step"
MAX_LAUNCHES = 256


class Hooks:
    """``launches``: what the op was given, newest last, at most 256, one for each (workspace, lengths, rows)."""

    def __init__(self, said: Said, recorder: Recorder, guard: Guard, *, row_states: bool) -> None:
        self._said = said
        self._recorder = recorder
        self._guard = guard
        self._row_states = row_states
        self._op_wrapped = False
        self.launches: dict[tuple[int, int, int], Launch] = {}

    def modules(self) -> dict[str, Callable[[ModuleType], None]]:
        """What to do after which import."""
        wanted: dict[str, Callable[[ModuleType], None]] = dict.fromkeys(
            (RUNNER_V1, RUNNER_V2, OUTPUT_V2, BUILDER), self._said_if_not(self.after_import)
        )
        if self._row_states:
            wanted.update(dict.fromkeys(TOPK_MODULES, self._said_if_not(self._after_topk)))
        return wanted

    def _said_if_not(self, work: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        """As ``work``, but what it raises is said, and the import that it follows goes on."""

        def after(module: ModuleType) -> None:
            try:
                work(module)
            except Exception as error:  # ours: an import of vLLM must not fail because of it
                self._said.feature(f"hooks in {module.__name__}", False, f"steps aside: {type(error).__name__}: {error}")

        return after

    # -- finding -------------------------------------------------------------------------------------------------------------

    def after_import(self, module: ModuleType) -> None:
        """Hook whatever the table names in this module."""
        makers: dict[str, Callable[[Any], Any]] = {
            "v1 step": lambda inner: self._step(inner, 1), "v2 step": lambda inner: self._step(inner, 2),
            "v1 sample": self._sample, "v2 sample": self._sample, "v1 batch": self._batch_v1, "v2 batch": self._batch_v2,
            "v1 output": self._output, "v2 output": self._output, "decode lengths": self._decode,
        }  # fmt: skip
        for target in TARGETS:
            if target.module == module.__name__:
                self._install(module, target, makers[target.feature])
        if module.__name__ in (RUNNER_V1, RUNNER_V2):
            owner = getattr(module, "GPUModelRunner", None)
            if owner is not None and callable(getattr(owner, "capture_model", None)):
                owner.capture_model = self._capture(owner.capture_model)

    def _install(self, module: ModuleType, target: Target, make: Callable[[Any], Any]) -> None:
        owner: Any = getattr(module, target.owner, None) if target.owner else module
        inner = getattr(owner, target.name, None)
        place = ".".join(part for part in (target.module, target.owner, target.name) if part)
        if inner is None or not callable(inner):
            self._said.feature(target.feature, False, f"{place} is not there")
            return
        if getattr(inner, _MARK, None) is not None:
            return
        try:
            parameters = set(inspect.signature(inner).parameters)
        except (TypeError, ValueError):
            parameters = set()
        missing = [name for name in target.needs if name not in parameters]
        if missing:
            self._said.feature(target.feature, False, f"{place} has no parameter {', '.join(missing)}")
            return
        if target.feature == "decode lengths":
            self._guard.examine(inner)
        wrapped = make(inner)
        setattr(wrapped, _MARK, True)
        setattr(owner, target.name, wrapped)
        self._said.feature(target.feature, True, place)

    # -- the model runner ----------------------------------------------------------------------------------------------------

    def _step(self, inner: Any, kind: int) -> Any:
        recorder = self._recorder

        @functools.wraps(inner)
        def execute_model(runner: Any, *args: Any, **kwargs: Any) -> Any:
            step: Step | None = None
            try:
                output = args[0] if args else kwargs.get("scheduler_output")
                dummy = bool(kwargs.get("dummy_run")) or (kind == 2 and len(args) > 2 and bool(args[2]))
                if not dummy and int(getattr(output, "total_num_scheduled_tokens", 0) or 0) > 0:
                    step = recorder.begin(runner, kind)
            except Exception as error:  # ours, not vLLM's: said once, and the step goes on without us
                recorder.step_aside("step", error)
            result = inner(runner, *args, **kwargs)
            if step is not None:
                try:
                    recorder.launched(step)
                    _tag(result, step)
                except Exception as error:  # as above
                    recorder.step_aside("launch", error)
            return result

        return execute_model

    def _sample(self, inner: Any) -> Any:
        recorder = self._recorder

        @functools.wraps(inner)
        def sample_tokens(*args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            step = recorder.current
            if step is not None:
                self._quietly("sample", _tag, result, step)
            return result

        return sample_tokens

    def _quietly(self, where: str, work: Callable[..., None], *args: Any) -> None:
        """Do our own work; a failure of it is said once and never reaches vLLM."""
        try:
            work(*args)
        except Exception as error:  # ours, not vLLM's: said once
            self._recorder.step_aside(where, error)

    def _capture(self, inner: Any) -> Any:
        recorder = self._recorder
        if getattr(inner, _MARK, False):
            return inner

        @functools.wraps(inner)
        def capture_model(*args: Any, **kwargs: Any) -> Any:
            recorder.capturing = True
            try:
                return inner(*args, **kwargs)
            finally:
                recorder.capturing = False

        setattr(capture_model, _MARK, True)
        return capture_model

    def _batch_v1(self, inner: Any) -> Any:
        return self._batch(inner, lambda result: (result[0], result[1]))

    def _batch_v2(self, inner: Any) -> Any:
        assert inner.__name__ == DISPATCH_V2
        return self._batch(inner, lambda result: (result[0].cg_mode, result[0]))

    def _batch(self, inner: Any, found: Callable[[Any], tuple[Any, Any]]) -> Any:
        """``found``: from what the function returned to the graph mode and the padded descriptor."""
        recorder = self._recorder
        read = _reader(inner, "num_reqs", "num_tokens")

        @functools.wraps(inner)
        def batch(*args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            if recorder.current is not None:
                try:
                    requests, tokens = read(args, kwargs)
                    mode, padded = found(result)
                    recorder.batch(
                        requests=requests,
                        tokens=tokens,
                        mode=mode,
                        padded_requests=padded.num_reqs,
                        padded_tokens=padded.num_tokens,
                    )
                except Exception as error:  # ours: said once
                    recorder.step_aside("batch", error)
            return result

        return batch

    def _output(self, inner: Any) -> Any:
        recorder = self._recorder

        @functools.wraps(inner)
        def get_output(output: Any, *args: Any, **kwargs: Any) -> Any:
            step: Step | None = getattr(output, _STEP, None)
            if step is not None:
                self._quietly("wait", recorder.waiting, step)
            result = inner(output, *args, **kwargs)
            if step is not None:
                self._quietly("output", recorder.returned, step)
            return result

        return get_output

    # -- the producer and the op ---------------------------------------------------------------------------------------------

    def _decode(self, inner: Any) -> Any:
        recorder, guard = self._recorder, self._guard
        read = _reader(inner, "seq_lens", "decode_lens_cpu", "next_n", "use_native")

        @functools.wraps(inner)
        def prepare(*args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            guarded = False
            shared, lengths, next_n, native = read(args, kwargs)
            try:
                guarded = guard.apply(result, shared)
            except Exception as error:  # ours: said once
                guard.step_aside(error)
            try:
                if recorder.current is not None:
                    recorder.decode(lengths, next_n=next_n, native=native, guarded=guarded)
            except Exception as error:  # ours: said once
                recorder.step_aside("decode lengths", error)
            if self._row_states and not self._op_wrapped:
                self.wrap_op()
            return result

        return prepare

    def _after_topk(self, module: ModuleType) -> None:
        self.wrap_op()

    def wrap_op(self) -> None:
        """Learn what ``torch.ops._C.persistent_topk`` is given; again later if it is not loaded yet."""
        import torch

        namespace = torch.ops._C
        try:
            inner = namespace.persistent_topk
        except AttributeError:
            self._said.feature("row states", False, "torch.ops._C.persistent_topk is not loaded (yet)")
            return
        self._op_wrapped = True
        if not isinstance(inner, _Op):
            namespace.persistent_topk = _Op(inner, self._learn, self._said)
        self._said.feature("row states", True, "torch.ops._C.persistent_topk")

    def _learn(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        import torch

        names = ("logits", "lengths", "output", "workspace", "k", "max_seq_len")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        logits, lengths, workspace = given["logits"], given["lengths"], given["workspace"]
        key = (workspace.data_ptr(), lengths.data_ptr(), int(logits.shape[0]))
        known = self.launches.get(key)
        if known is not None and known.captured:
            return
        captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if known is not None and not captured:
            return
        self.launches[key] = Launch(
            workspace=key[0],
            workspace_size=workspace.numel() * workspace.element_size(),
            lengths=key[1],
            rows=min(key[2], lengths.numel()),
            width=int(logits.shape[-1]),
            top_k=int(given["k"]),
            max_seq_len=int(given["max_seq_len"]),
            captured=bool(captured),
        )
        while len(self.launches) > MAX_LAUNCHES:
            self.launches.pop(next(iter(self.launches)))


def _reader(inner: Any, *names: str) -> Callable[[tuple[Any, ...], dict[str, Any]], list[Any]]:
    """Reads the arguments of these names out of a call of ``inner``; None: not given. Binding the whole signature took longer than
    everything else that a hook does."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    order = [name for name, parameter in inspect.signature(inner).parameters.items() if parameter.kind in kinds]
    places = [(name, order.index(name) if name in order else len(order)) for name in names]

    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        return [kwargs[name] if name in kwargs else args[at] if at < min(len(args), len(order)) else None for name, at in places]

    return read


class _Op:
    """Stands where the op stood: calls it unchanged, and is it for everything else (``.default``, ``_schema``)."""

    def __init__(self, inner: Any, learn: Callable[[tuple[Any, ...], dict[str, Any]], None], said: Said) -> None:
        self._dsv4_inner = inner
        self._dsv4_said = said
        self._dsv4_learn: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = learn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._dsv4_learn is not None:
            try:
                self._dsv4_learn(args, kwargs)
            except Exception as error:  # the op's arguments are not as expected: no row states, and the op runs all the same
                self._dsv4_learn = None
                self._dsv4_said.feature("row states", False, f"steps aside: {type(error).__name__}: {error}")
        return self._dsv4_inner(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dsv4_inner, name)


def _tag(result: Any, step: Step) -> None:
    """Remember the step on vLLM's own asynchronous output; other results (None, plain outputs) are left as they are."""
    if result is not None and hasattr(type(result), "get_output") and hasattr(result, "__dict__"):
        result.__dict__[_STEP] = step
