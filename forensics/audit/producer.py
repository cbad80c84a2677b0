"""The producer layer: what a release's own metadata code makes of a padded decode batch.

The builder is interpreted on the batch (``interpreter``): its constructor under the recipe's configuration, then ``build``; then
each of its
expansion paths by itself (native, uniform, variable-length). Where that cannot be done (code that this interpreter does not
know), the
expansion statement alone is judged from its syntax tree: it is found by its shape and run over the same tensors. Which of the two
it was is said.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from .interpreter import Interpreter
from .recipe import Recipe
from .release_source import ReleaseSource
from .tensors import Tensor, from_numpy
from .values import Bound, CannotDecideError, ClassValue, Function, Instance, InterpretedError, Namespace, Scope, Unknown
from .verdicts import ProducerFinding, Word
from .vllm_standin import Batch, ReleaseRuntime, common_metadata, release_runtime

__all__ = ["BuiltMetadata", "build_metadata", "examine_producer"]

#: The batch of vLLM #51593: three live requests in a graph of four slots, two query tokens each.
PADDED_BATCH = Batch((3059, 3060, 3060, 0), (2, 2, 2, 0), 8)
#: A batch of uniform queries, three tokens each, with a request slot of length 0 (a dummy or data-parallel shape).
UNIFORM_BATCH = Batch((3059, 3060, 3060, 0), (3, 3, 3, 3), 12)
#: The same slots with a padding slot that has no query.
VARIABLE_BATCH = Batch((3059, 3060, 3060, 0), (3, 3, 3, 0), 12)


@dataclass
class BuiltMetadata:
    """The builder's product for one batch, with the runtime it was built in."""

    runtime: ReleaseRuntime
    metadata: Instance
    lengths: Tensor
    place: str
    #: max_seq_len of the batch, as the caller of the top-k may pass it on.
    batch_max: Any


def _kv_cache_spec(recipe: Recipe) -> Namespace:
    fields = {
        "compress_ratio": recipe.compress, "tokens_per_state": recipe.compress, "block_size": 256,
        "storage_block_size": 256 // recipe.compress or 1,
        "num_states": 256 // recipe.compress or 1, "model_version": "deepseek_v4" if recipe.compress > 1 else "deepseek_v32",
        "num_kv_heads": 1,
        "head_size": 128,
    }  # fmt: skip
    return Namespace("kv_cache_spec", fields, kinds=("MLAAttentionSpec", "AttentionSpec", "KVCacheSpec"))


def _builder(runtime: ReleaseRuntime, source: ReleaseSource, recipe: Recipe) -> tuple[Instance, str]:
    located = source.builder()
    if located is None:
        raise CannotDecideError("no indexer metadata builder was found in the release's Python")
    interpreter = runtime.interpreter
    cls = interpreter.name_of_module(located.module, located.name)
    if not isinstance(cls, ClassValue):
        raise CannotDecideError(f"{located.name} is not a class", located.place)
    arguments: dict[str, Any] = {
        "kv_cache_spec": _kv_cache_spec(recipe), "layer_names": ["indexer"], "vllm_config": runtime.config,
        "device": Namespace("device", {"index": 0, "type": "cuda"}),
    }  # fmt: skip
    init = interpreter.member(cls, "__init__")
    if isinstance(init, Function) and "block_table_width" in init.parameters:
        arguments["block_table_width"] = 4
    built = interpreter.call(cls, [], arguments)
    if not isinstance(built, Instance):
        raise CannotDecideError("the builder did not build", located.place)
    return built, located.place


def _table_width(builder: Instance) -> int:
    """Block-table columns that fit the builder's own buffer."""
    buffer = builder.attrs.get("expanded_block_table_buffer")
    return buffer.shape[1] if isinstance(buffer, Tensor) and buffer.array.ndim == 2 else 4


def build_metadata(
    source: ReleaseSource,
    recipe: Recipe,
    batch: Batch,
    sm: int,
    num_sms: int,
    row_stride: int | None = None,
) -> BuiltMetadata:
    """``build`` on ``batch``, as the server calls it. CannotDecideError or InterpretedError where that cannot be done."""
    runtime = release_runtime(source, recipe, sm, num_sms, row_stride)
    builder, place = _builder(runtime, source, recipe)
    interpreter = runtime.interpreter
    metadata = interpreter.call(
        interpreter.attribute(builder, "build"), [0, common_metadata(batch, recipe.max_model_len, _table_width(builder))], {}
    )
    if not isinstance(metadata, Instance):
        raise CannotDecideError("build returned nothing known", place)
    decode = metadata.attrs.get("decode")
    if not isinstance(decode, Instance):
        raise CannotDecideError("build made no decode metadata of a decode batch", place)
    lengths = decode.attrs.get("seq_lens")
    if not isinstance(lengths, Tensor):
        raise CannotDecideError("the decode metadata holds no lengths", place)
    return BuiltMetadata(runtime, metadata, lengths, place, metadata.attrs.get("max_seq_len"))


def _expanded(source: ReleaseSource, recipe: Recipe, batch: Batch, sm: int, num_sms: int, native: bool) -> tuple[Tensor, str]:
    """One expansion path of the builder by itself: its own method, called with the arguments that it names."""
    runtime = release_runtime(source, recipe, sm, num_sms)
    builder, place = _builder(runtime, source, recipe)
    interpreter = runtime.interpreter
    method = interpreter.attribute(builder, "_prepare_decode_tensors")
    if not isinstance(method, Bound):
        raise CannotDecideError("the builder has no expansion method of its own", place)
    slots = len(batch.seq_lens)

    def ints(values: tuple[int, ...]) -> Tensor:
        return from_numpy(np.array(values, np.int32))

    known: dict[str, Any] = {
        "seq_lens": ints(batch.seq_lens), "block_table": from_numpy(np.zeros((slots, _table_width(builder)), np.int32)),
        "decode_lens": ints(batch.query_lens),
        "decode_lens_cpu": ints(batch.query_lens), "query_start_loc": ints(batch.query_start_loc[:-1]), "num_decodes": slots,
        "num_decode_tokens": batch.tokens, "use_native": native, "next_n": max(batch.query_lens),
        "max_decode_len": max(batch.query_lens),
        "batch_size": slots,
    }  # fmt: skip
    names = method.function.parameters[1:]
    missing = [name for name in names if name not in known]
    if missing:
        raise CannotDecideError(f"the expansion method takes {', '.join(missing)}, which is not known here", place)
    result = interpreter.call(method, [], {name: known[name] for name in names})
    lengths = result[0] if isinstance(result, tuple) and result else result
    if not isinstance(lengths, Tensor):
        raise CannotDecideError("the expansion method gave no lengths", place)
    return lengths, _place_of(method.function)


def _place_of(function: Function) -> str:
    return f"{function.scope.module.path}:{function.node.lineno}"


def examine_producer(source: ReleaseSource, recipe: Recipe, sm: int, num_sms: int) -> list[ProducerFinding]:
    """One finding for each expansion path: native, uniform, variable-length; lengths in tokens, before compression."""
    cases = (
        ("native", PADDED_BATCH, True, _with_depth(recipe, 1)), ("uniform", UNIFORM_BATCH, False, _with_depth(recipe, 2)),
        ("variable", VARIABLE_BATCH, False, _with_depth(recipe, 2)),
    )  # fmt: skip
    findings: list[ProducerFinding] = []
    for name, batch, native, shaped in cases:
        try:
            lengths, place = _expanded(source, shaped, batch, sm, num_sms, native)
            findings.append(_judged(name, batch, lengths, place, "interpreted"))
        except InterpretedError as error:
            findings.append(
                ProducerFinding(path=name, word="CANNOT TELL", how="interpreted", why=f"the release's code raised {error}")
            )
        except CannotDecideError as error:
            findings.append(_whole_path(source, shaped, name, batch, sm, num_sms, str(error)))
    return findings


def _whole_path(source: ReleaseSource, recipe: Recipe, name: str, batch: Batch, sm: int, num_sms: int, why: str) -> ProducerFinding:
    """Where the builder has no expansion of its own: the lengths that reach the top-k, through ``build`` and the dispatch."""
    from .dispatch import run_dispatch

    plain = replace(recipe, compress=1)
    try:
        built = build_metadata(source, plain, batch, sm, num_sms)
        call = run_dispatch(source, plain, built, batch.tokens)
    except (CannotDecideError, InterpretedError):
        return _from_syntax(source, recipe, name, batch, sm, num_sms, why)
    if len(call.lengths) != batch.tokens or None in call.lengths:
        return _from_syntax(source, recipe, name, batch, sm, num_sms, why)
    return _judged(name, batch, from_numpy(np.array(call.lengths, np.int32)), call.place, "interpreted")


def _with_depth(recipe: Recipe, mtp: int) -> Recipe:
    return replace(recipe, mtp=mtp, method="mtp")


def _judged(name: str, batch: Batch, lengths: Tensor, place: str, how: Literal["interpreted", "syntax"]) -> ProducerFinding:
    flat = _flatten(lengths.tolist())
    padding = [slot for slot, length in enumerate(batch.seq_lens) if length == 0]
    of_padding = (
        flat[padding[0] * (len(flat) // len(batch.seq_lens)) :]
        if padding and lengths.array.ndim == 2
        else flat[sum(batch.query_lens[: padding[0]]) :]
    )
    if any(item is None for item in flat):
        word: Word = "CANNOT TELL"
    else:
        word = "VULNERABLE" if any(item < 0 for item in flat) else "HOLDS"
    return ProducerFinding(
        path=name, word=word, lengths=tuple(flat), padding=tuple(of_padding), where=place, how=how, input=_described(batch)
    )


def _flatten(value: Any) -> list[Any]:
    return [item for part in value for item in _flatten(part)] if isinstance(value, list) else [value]


def _described(batch: Batch) -> str:
    return f"seq_lens {list(batch.seq_lens)}, query_start_loc {list(batch.query_start_loc)}, {batch.tokens} rows"


def _from_syntax(
    source: ReleaseSource, recipe: Recipe, name: str, batch: Batch, sm: int, num_sms: int, why: str
) -> ProducerFinding:
    """The native expansion judged from its statement alone: ``L - n + 1 + offsets`` over the batch's lengths."""
    located = source.builder()
    if located is None:
        gap = source.unreadable(b"decode_lens_buffer", b"offsets_buffer")
        if gap:
            return ProducerFinding(path=name, word="CANNOT TELL", how="syntax", why=gap)
        return ProducerFinding(
            path=name, word="NOT PRESENT", how="syntax", why="no indexer metadata builder in the release's Python"
        )
    if name != "native":
        return ProducerFinding(path=name, word="CANNOT TELL", how="syntax", why=why, where=located.place)
    path = located.place.rpartition(":")[0]
    tree = source.tree(path)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.expr) and _is_expansion(node):
            runtime = release_runtime(source, recipe, sm, num_sms)
            try:
                value = _evaluate_expansion(runtime.interpreter, located.module, node, batch)
            except (CannotDecideError, InterpretedError) as error:
                return ProducerFinding(path=name, word="CANNOT TELL", how="syntax", why=str(error), where=f"{path}:{node.lineno}")
            if isinstance(value, Tensor):
                return _judged(name, batch, value, f"{path}:{node.lineno}", "syntax")
    return ProducerFinding(path=name, word="CANNOT TELL", how="syntax", why=why, where=located.place)


def _is_expansion(node: ast.expr) -> bool:
    """``(… .unsqueeze(1) - n + 1 + offsets …)``, with or without something around it, and nothing larger inside a statement."""
    text = ast.unparse(node)
    return (
        isinstance(node, ast.BinOp | ast.Call)
        and ".unsqueeze(1)" in text
        and "offsets" in text
        and " - " in text
        and "=" not in text.replace("min=0", "")
    )


def _evaluate_expansion(interpreter: Interpreter, module: str, node: ast.expr, batch: Batch) -> Any:
    source = interpreter.module(module)
    if source is None:
        raise CannotDecideError(f"module {module} is missing")
    depth = max(batch.query_lens)
    names: dict[str, Any] = {}
    for item in ast.walk(node):
        if isinstance(item, ast.Name) and item.id != "self":
            names[item.id] = from_numpy(np.array(batch.seq_lens, np.int32)) if "seq_lens" in item.id else depth
    offsets = from_numpy(np.arange(depth, dtype=np.int32))
    lengths = from_numpy(np.array(batch.seq_lens, np.int32))
    owner = Namespace("self", missing=lambda name: offsets if "offsets" in name else Unknown(f"self.{name}"))
    names["self"] = owner
    names.setdefault("decode_metadata", Namespace("decode_metadata", {"seq_lens": lengths, "offsets": offsets}))
    if isinstance(names.get("decode_metadata"), int):
        names["decode_metadata"] = Namespace("decode_metadata", {"seq_lens": lengths, "offsets": offsets})
    return interpreter.evaluate(node, Scope(source, names))
