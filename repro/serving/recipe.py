"""From a drain plan and a model to the command line and the environment of ``vllm serve``, with a list of all that was chosen.

The default is the recipe of vLLM #51593; ``dummy`` is a tiny model with random weights that reaches the same defect on one card
(``dummy_model``). What the user writes after ``--`` wins, by the flag's name. Writing the agent, the model and the folders into the
run's directory is all that touches the disk; no process is started.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import ServerError, UsageError
from ...forensics.collect.core_trigger import DumpSettings
from ...forensics.device_state import Unread
from ...scenarios.drain import DrainPlan
from ..atomic import make_folder
from .dummy_model import DUMMY_LAYERS, INDEX_TOPK, write_dummy_model
from .engine_flags import EngineFacts, EngineFlags, facts_of, parse_flags, plan_with
from .prepared_env import prepare_environment
from .records import Change

__all__ = [
    "DUMMY",
    "DUMMY_PLAN",
    "LaunchSpec",
    "ServeOptions",
    "build_launch",
    "free_port",
    "port_taken",
    "recipe_flags",
    "resolve",
]

#: The word after ``--model`` for the model with random weights.
DUMMY = "dummy"
DUMMY_NAME = "tiny-dsv32"
#: What the drain plan is for the dummy model where nothing else is said: 16384 candidates in a row, no compression.
DUMMY_PLAN: Mapping[str, int] = {"max_model_len": 16384, "compress": 1, "top_k": INDEX_TOPK}
#: FlashInfer's sampler is compiled at start and is not in the wheel; the rest keeps a start without network from waiting for one.
DUMMY_ENV = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
_CUDA_HOME = Path("/usr/local/cuda")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What was asked. ``folder``: the run's directory. ``flags``: the words after ``--``. ``port`` None: a free one.

    ``python``: the server's interpreter; None is our own. ``dump``: prepare for a GPU core dump (taking one needs consent).
    """

    folder: Path
    plan: DrainPlan
    model: str = DUMMY
    tp: int = 1
    port: int | None = None
    python: str | None = None
    bare: bool = False
    guard: bool = False
    rescue: bool = False
    dump: bool = True
    flags: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


@dataclass(frozen=True)
class LaunchSpec:
    """A server that can be started. ``model``: its name in requests. ``shown``: ``argv`` without secrets. ``plan``: as it will run.

    ``headers``: what every request has to carry. ``unread``: evidence that cannot be had of a server started so.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    changes: tuple[Change, ...]
    port: int
    log_path: Path
    agent_folder: Path | None
    base_url: str
    model: str
    folder: Path
    plan: DrainPlan
    facts: EngineFacts
    shown: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[Unread, ...] = ()
    host: str = "127.0.0.1"
    dumps: DumpSettings | None = None


def _flag(name: str, *values: str) -> tuple[str, tuple[str, ...]]:
    return name.removeprefix("no-"), (f"--{name}", *values)


def recipe_flags(plan: DrainPlan, model: str, *, tp: int = 1, bare: bool = False) -> EngineFlags:
    """The flags of the recipe for this plan, before what the user adds. ``bare``: without what is only there to be seen."""
    compilation: dict[str, object] = {}
    if model == DUMMY:
        # Mode 0: no torch.compile, so a start takes a minute; FULL decode graphs are what the defect needs.
        compilation = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    if plan.capture_sizes is not None:
        compilation["cudagraph_capture_sizes"] = list(plan.capture_sizes)
    speculation = json.dumps({"method": "mtp", "num_speculative_tokens": plan.mtp}, separators=(",", ":"))
    shared = [
        _flag("tensor-parallel-size", str(tp)),
        # In one process there is no worker to look at, and no message queue that names the victim.
        *([_flag("distributed-executor-backend", "mp")] if tp == 1 and (model == DUMMY or not bare) else []),
        _flag("max-model-len", str(plan.max_model_len)),
        _flag("max-num-seqs", str(plan.max_num_seqs)),
        *([_flag("compilation-config", json.dumps(compilation, separators=(",", ":")))] if compilation else []),
        *([_flag("speculative-config", speculation)] if plan.mtp else []),
    ]
    if model == DUMMY:
        own = [
            _flag("served-model-name", DUMMY_NAME),
            _flag("load-format", "dummy"),
            _flag("max-num-batched-tokens", "2048"),
            _flag("no-enable-prefix-caching"),
            _flag("gpu-memory-utilization", "0.2"),
        ]
    else:
        own = [
            _flag("attention-backend", "FLASHINFER_MLA_SPARSE_DSV4"),
            _flag("moe-backend", "flashinfer_cutlass"),
            _flag("max-num-batched-tokens", "8192"),
            _flag("kv-cache-dtype", "fp8"),
            _flag("block-size", "256"),
            _flag("gpu-memory-utilization", "0.9"),
            _flag("tokenizer-mode", "deepseek_v4"),
        ]
    return EngineFlags((*shared, *own))


def resolve(
    plan: DrainPlan, model: str, *, tp: int = 1, words: tuple[str, ...] = (), bare: bool = False
) -> tuple[EngineFlags, EngineFacts, DrainPlan]:
    """(all flags, what they say, the plan as such a server runs it): the recipe with the user's ``words`` over it. UsageError."""
    flags = parse_flags(words).over(recipe_flags(plan, model, tp=tp, bare=bare))
    facts = facts_of(flags)
    return flags, facts, plan_with(plan, facts)


def port_taken(port: int, host: str = "127.0.0.1") -> bool:
    """Whether somebody listens there (or the system does not let us have it)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host if host not in ("localhost", "") else "127.0.0.1", port))
        except OSError:
            return True
    return False


def free_port() -> int:
    """A port of the loopback interface that nobody has now. The server takes it seconds later, and fails if it is gone by then."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _port(options: ServeOptions, facts: EngineFacts) -> int:
    asked = facts.port if facts.port is not None else options.port
    if asked is None:
        return free_port()
    if not 1 <= asked <= 65535:
        raise UsageError(f"--port {asked}: a port is 1 to 65535")
    if port_taken(asked, facts.host if facts.host.count(".") == 3 else "127.0.0.1"):
        raise ServerError(
            f"port {asked} is taken: another program listens on it (a server of an earlier run?)",
            help_text="Leave --port out for a free one, look with: dsv4-repro doctor, or take that server: --url http://127.0.0.1:"
            f"{asked}",
        )
    return asked


def _model(options: ServeOptions) -> tuple[str, dict[str, str]]:
    """(what stands after ``serve``, the environment that it needs); a dummy is written into the run's directory."""
    if options.model != DUMMY:
        local = Path(options.model).expanduser()
        return (str(local.absolute()) if os.path.exists(local) else options.model), {}
    layers = options.plan.layers if options.plan.layers is not None else DUMMY_LAYERS
    folder = write_dummy_model(options.folder / "model", layers=layers)
    env = dict(DUMMY_ENV)
    if "CUDA_HOME" not in options.environ and (_CUDA_HOME / "bin" / "nvcc").exists():
        env["CUDA_HOME"] = str(_CUDA_HOME)  # DeepGEMM compiles its kernels with nvcc at first use
    return str(folder), env


def build_launch(options: ServeOptions) -> LaunchSpec:
    """The command and the environment. Raises UsageError (flags, port number, model), ServerError (the port is taken)."""
    flags, facts, plan = resolve(options.plan, options.model, tp=options.tp, words=options.flags, bare=options.bare)
    if not options.model or options.model.startswith("-"):
        raise UsageError(f"--model {options.model!r}: a path, a name, or dummy")
    port = _port(options, facts)
    host = facts.host
    own = parse_flags(options.flags)
    place = EngineFlags((_flag("host", host), _flag("port", str(port))))
    flags = place.over(flags)
    make_folder(options.folder / "server")
    number = len(list((options.folder / "server").glob("vllm*.log"))) + 1  # a run may start several, one after another
    ending = "" if number == 1 else f"-{number}"
    target, model_env = _model(options)
    prepared = prepare_environment(
        options.environ,
        options.folder.absolute(),
        bare=options.bare,
        guard=options.guard,
        rescue=options.rescue,
        dump=options.dump,
        model_env=model_env,
        agent_name=f"agent{ending}",
    )
    python = options.python or sys.executable
    head = (python, "-m", "vllm.entrypoints.cli.main", "serve", target)
    reachable = "127.0.0.1" if host in ("0.0.0.0", "::", "localhost", "") else host
    base = f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
    key = facts.api_key or options.environ.get("VLLM_API_KEY")
    return LaunchSpec(
        argv=(*head, *flags.words()),
        shown=(*head, *flags.shown()),
        env=prepared.env,
        changes=(*_flag_changes(own, options), *prepared.changes),
        port=port,
        log_path=options.folder.absolute() / "server" / f"vllm{ending}.log",
        agent_folder=prepared.agent_folder,
        base_url=base,
        model=facts.served_name or target,
        folder=options.folder,
        plan=plan,
        facts=facts,
        headers={"Authorization": f"Bearer {key}"} if key else {},
        unread=prepared.unread,
        host=reachable,
        dumps=prepared.dumps,
    )


def _flag_changes(own: EngineFlags, options: ServeOptions) -> tuple[Change, ...]:
    """Engine flags: those of the recipe are in the command; named here is what is ours beside it and what the user put over it."""
    changes = []
    given = dict(own.items).get("distributed-executor-backend")
    if options.tp == 1 and options.model != DUMMY and not options.bare and given is None:
        changes.append(
            Change("--distributed-executor-backend", "mp", "a worker process to look at; alone, the engine would be one")
        )
    over = [words for name, words in zip((name for name, _ in own.items), _shown_items(own), strict=True) if name]
    changes += [Change(words[0].partition("=")[0], " ".join(words), "given after --") for words in over]
    return tuple(changes)


def _shown_items(flags: EngineFlags) -> list[tuple[str, ...]]:
    return [EngineFlags((item,)).shown() for item in flags.items]
