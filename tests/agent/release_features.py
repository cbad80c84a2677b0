"""Which of the agent's hook targets a release's sources have, from the syntax trees alone."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from dsv4_repro_agent.targets import BUILDER, DISPATCH_V2, RUNNER_V1, RUNNER_V2, TARGETS, TOPK_MODULES

__all__ = ["PATTERNS", "features", "path_of"]


def path_of(module: str) -> str:
    return module.replace(".", "/") + ".py"


PATTERNS = (
    *sorted({path_of(target.module) for target in TARGETS}),
    *(path_of(name) for name in TOPK_MODULES),
    "vllm/v1/worker/gpu/dp_utils.py",
    "vllm/v1/worker/gpu/cudagraph_utils.py",
    "vllm/forward_context.py",
    "vllm/config/compilation.py",
    "vllm/plugins/__init__.py",
)


def _member(tree: ast.Module, owner: str, name: str) -> ast.AST | None:
    bodies = (
        [tree.body] if not owner else [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner]
    )
    for body in bodies:
        for node in body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return node
    return None


def _parameters(node: ast.FunctionDef) -> set[str]:
    return {argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}


def _fields(tree: ast.Module, name: str) -> set[str]:
    return {
        item.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == name
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }


def _first_of_returned_tuples(node: ast.AST) -> list[list[str]]:
    return [
        [ast.unparse(item) for item in each.value.elts]
        for each in ast.walk(node)
        if isinstance(each, ast.Return) and isinstance(each.value, ast.Tuple)
    ]


def features(members: Mapping[str, bytes]) -> dict[str, str]:
    """Feature to ``""`` if it is there, else what is missing. The run-time side of the same table is ``hooks.Hooks``."""
    trees = {name: ast.parse(raw) for name, raw in members.items()}
    found: dict[str, str] = {}
    for target in TARGETS:
        tree = trees.get(path_of(target.module))
        if tree is None:
            found[target.feature] = "no such module"
            continue
        if target.name == DISPATCH_V2:
            imported = any(
                isinstance(node, ast.ImportFrom) and any(alias.name == target.name and not alias.asname for alias in node.names)
                for node in tree.body
            )
            tree = trees.get("vllm/v1/worker/gpu/dp_utils.py") if imported else None
        node = _member(tree, target.owner, target.name) if tree is not None else None
        if not isinstance(node, ast.FunctionDef):
            found[target.feature] = "no such function"
            continue
        missing = sorted(set(target.needs) - _parameters(node))
        found[target.feature] = f"no parameter {', '.join(missing)}" if missing else ""
        returned = _first_of_returned_tuples(node)
        if target.feature == "v1 batch" and not any(one[0].endswith("cudagraph_mode") and "desc" in one[1] for one in returned):
            found[target.feature] = "another result"
        if target.feature == "v2 batch" and not (returned and all(one[0] == "batch_desc" for one in returned)):
            found[target.feature] = "another result"
        if target.feature == "decode lengths" and not (returned and all(one[0] == "seq_lens" for one in returned)):
            found[target.feature] = "another result"
    descriptor = _fields(trees["vllm/v1/worker/gpu/cudagraph_utils.py"], "BatchExecutionDescriptor")
    if not {"cg_mode", "num_tokens", "num_reqs"} <= descriptor:
        found["v2 batch"] = "another descriptor"
    if not {"num_tokens", "num_reqs"} <= _fields(trees["vllm/forward_context.py"], "BatchDescriptor"):
        found["v1 batch"] = "another descriptor"
    modes = next(
        node for node in trees["vllm/config/compilation.py"].body if isinstance(node, ast.ClassDef) and node.name == "CUDAGraphMode"
    )
    named = {
        target.id for node in modes.body if isinstance(node, ast.Assign) for target in node.targets if isinstance(target, ast.Name)
    }
    found["graph modes"] = "" if {"NONE", "PIECEWISE", "FULL"} <= named else "other names"
    for runner in (RUNNER_V1, RUNNER_V2):
        there = _member(trees[path_of(runner)], "GPUModelRunner", "capture_model")
        found[f"capture in {runner.rpartition('.')[0].rpartition('.')[2]}"] = "" if there is not None else "no such function"
    called = any(
        isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.ops._C.persistent_topk" and len(node.args) == 6
        for name in TOPK_MODULES
        for node in ast.walk(trees.get(path_of(name), ast.Module([], [])))
    )
    found["row states"] = "" if called else "the op is not called with six arguments by its name"
    native = _member(trees[path_of(BUILDER)], "DeepseekV32IndexerMetadataBuilder", "_prepare_decode_tensors")
    text = ast.unparse(native) if native is not None else ""
    found["clamp"] = "" if "clamp" in text else "absent"
    plugins = ast.unparse(trees["vllm/plugins/__init__.py"])
    found["plugin group"] = "" if "vllm.general_plugins" in plugins else "another group"
    return found
