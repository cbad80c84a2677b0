"""Lines of vLLM's own log (and of the libraries that log into it) with a fixed text, whatever the version, file and line number.

The table ``EVENTS`` is the reader: a kind and a pattern each. Texts as of vLLM 0.19 to 0.33 (read in the releases' source),
torch's ProcessGroupNCCL aside, which ``nccl_watchdog`` reads. A message split over lines keeps its prefix on each, so patterns
never span lines.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .facts import LogEvent, StatsLine, VersionFact
from .refs import Section
from .stamps import Stamp, find_stamp

if TYPE_CHECKING:  # a watch of weeks needs the kinds of event alone
    from .casefile import CaseFile

__all__ = ["EVENTS", "line_process", "line_stamp", "read_engine_log"]

#: kind -> pattern; named groups become fields.
EVENTS: dict[str, re.Pattern[str]] = {
    kind: re.compile(pattern)
    for kind, pattern in {
        "shm-wait": r"No available (?:shared memory broadcast )?block found in (?P<seconds>\d+) seconds?",
        "rpc-timeout": r"RPC call to (?P<method>\w+) timed out|[Ww]atchdog timeout \(self\.watchdog_timeout",
        "fatal": r"EngineCore encountered a fatal error",
        "engine-dead": r"EngineDeadError|EngineCore encountered an issue\.",
        "engine-failed-start": r"EngineCore failed to start|Engine core initialization failed|WorkerProc failed to start",
        "worker-died": r"(?:Worker proc|RayWorkerProc) (?P<name>rank=\S+|\S+) died unexpectedly(?: \(exit code: (?P<code>-?\d+|"
        r"None)\))?",
        "engine-proc-died": r"Engine core proc(?:ess)? (?P<name>\S+) died unexpectedly(?: \(exit code: (?P<code>-?\d+|None)\))?",
        "actor-died": r"(?:Worker exit type: (?P<type>\w+)|The actor (?:died|is dead) (?:unexpectedly|because)|A worker died or "
        r"was killed"
        r"|ActorDiedError)(?P<rest>.{0,200})",
        "unit-killed": r"Main process exited, code=(?P<how>\w+), status=(?P<status>\S+)",
        "pod-oom": r"\bOOMKilled\b|killed by the OOM killer",
        "pod-exit": r"Exit Code:\s+(?P<code>\d+)",
        "shutdown": r"\[shutdown\] \w+: trigger received signal=(?P<signal>\w+)|Received (?:signal )?SIG(?:TERM|INT)\b"
        r"|Received KeyboardInterrupt|workers still running after (?:grace period|SIGTERM)|Shutting down(?: FastAPI| API|$| server)"
        r"|Gracefully shutting down|Application shutdown complete",
        "parent-exited": r"Parent process exited, terminating worker",
        "startup-complete": r"Application startup complete|Uvicorn running on|Started server process|Starting vLLM API server",
        "serving": r"Application startup complete",
        "load-start": r"Starting to load model|Loading model from scratch|Loading weights from|Filesystem type for checkpoints: "
        r"(?P<fs>[^.]+)\."
        r"(?: Checkpoint size: (?P<size>\d+(?:\.\d+)?) (?P<unit>[KMGT]iB))?",
        "load-progress": r"Loading [\w -]{0,40}(?:shards|weights|tensors)[^:\n]{0,"
        r"40}:\s+(?P<percent>\d+)%[^|\n]*\|(?:[^|\n]*\|)?\s*(?P<done>\d+)/(?P<total>\d+)",
        "load-done": r"Loading weights took (?P<seconds>\d+(?:\.\d+)?) seconds|Model loading took (?P<gib>\d+(?:\.\d+)?)",
        "compile-start": r"Start compiling function|Using cache directory: \S+ for vLLM's torch\.compile|Dynamo bytecode "
        r"transform time: (?P<seconds>\d+(?:\.\d+)?)",
        "compile-step": r"Compiling a graph for .{1,80}? takes (?P<seconds>\d+(?:\.\d+)?) s|Cache the graph (?:for|of)",
        "compile-done": r"torch\.compile (?:takes|took) (?P<seconds>\d+(?:\.\d+)?) s in total",
        "capture-progress": r"Capturing .{0,60}?(?:CUDA graphs?|cudagraphs?|graph shapes)[^:\n]{0,"
        r"40}:\s+(?P<percent>\d+)%[^|\n]*\|(?:[^|\n]*\|)?\s*(?P<done>\d+)/(?P<total>\d+)",
        "capture-done": r"Graph capturing finished in (?P<seconds>\d+(?:\.\d+)?)",
        "init-done": r"init engine \(profile, create kv cache, warmup model\) took (?P<seconds>\d+(?:\.\d+)?)",
        "jit": r"(?P<backend>\b\w{1,40}) (?:kernel )?JIT compilation during inference: (?P<name>[^ (]+)",
        "jit-start": r"JIT[- ]compiling\b|(?:Start(?:ing)?|Begin(?:ning)?) (?:JIT|to compile|compil\w+)|Loading JIT ops: "
        r"(?P<ops>\S+)|\bJIT ops?: building\b",
        "jit-done": r"Finished loading JIT ops: (?P<ops>\S+)|(?:JIT )?[Cc]ompilation (?:finished|done|completed)",
        "build-failed": r"ninja: build stopped|Error building extension|Ninja build failed|\bnvcc fatal\b|FAILED: .{0,120}\.(?:o|"
        r"so|cubin|cu)\b"
        r"|nvcc error\s*:|Error compiling objects for extension|(?:cicc|nvcc|ptxas|ninja|cc1plus)\S{0,60}(?: died due to signal|: "
        r"Killed| .{0,40}Killed signal)",
        "lock-wait": r"(?:[Ww]aiting for|[Ww]aiting on|[Aa]ttempting to acquire|[Ff]ailed to acquire) .{0,60}(?:file ?lock|lock "
        r"file|\.lock\b|lock )",
        "abort": r"Aborted request(?:\(s\)|s)?\b|Request \S+ (?:was )?aborted|[Cc]lient (?:has )?(?:disconnected|closed|cancelled)"
        r"|Abort(?:ing)? request\(?s?\)?\b|aborted by (?:the )?client",
        "http-499": r'HTTP/\d(?:\.\d)?"? 499\b',
        "http-completion-ok": r'"POST /v1/(?:chat/)?completions\S* HTTP/\d(?:\.\d)?" 200',
        "http-completion-error": r'"POST /v1/(?:chat/)?completions\S* HTTP/\d(?:\.\d)?" 5\d\d',
        "http-health-ok": r'"GET /(?:health|ping|v1/models)\S* HTTP/\d(?:\.\d)?" 200',
        "http-health-bad": r'"GET /(?:health|ping)\S* HTTP/\d(?:\.\d)?" 503',
        "cuda-error": r"CUDA error: (?P<text>[^\n]{1,120})|CUDA driver error: (?P<driver>[^\n]{1,120})|"
        r"(?P<code>CUDA_ERROR_[A-Z_]{3,60})"
        r"|(?P<runtime>cudaError(?!Exception|_t)[A-Z][A-Za-z]{3,60})",
        "coredump-exception": r"Detected an exception of type (?P<word>CUDBG_EXCEPTION_\w+)(?: \((?P<number>\d+)\))?",
        "launch-refused": r"total_ctas ?= ?(?P<ctas>\d+) ?> ?num_sms ?\* ?occupancy ?= ?(?P<slots>\d+)|would oversubscribe"
        r"|too many blocks in cooperative launch|[Cc]ooperative ?[Ll]aunch ?[Tt]oo ?[Ll]arge|too many resources requested "
        r"for launch",
        "nccl-warn": r"NCCL WARN (?P<text>[^\n]{1,200})|ncclRemoteError|ncclSystemError|ncclInternalError|ncclUnhandledCudaError",
        "grid-sync-timeout": r'Assertion failed: \S*barrier\S*, condition: .{0,40}"Grid sync timeout"|[Gg]rid '
        r"sync(?:hronization)? timeout",
        "deepep-timeout": r"DeepEP (?:(?P<what>[\w -]{1,60}?) )?timeout(?: check)?[,:]?(?: ?channel: ?(?P<channel>\d+))?",
        "kv-transfer": r"WAITING_FOR_REMOTE_KVS?|KV load failure|NIXL transfer failure|Releasing expired KV blocks|[Ww]aiting "
        r"for remote KV"
        r"|(?:lmcache|LMCache|mooncake|Mooncake|nixl|NIXL)[^\n]{0,120}(?:tim(?:ed|e) ?out|failed|lost|refused|not respond|"
        r"unreachable|no response)"
        r"|(?:[Ll]ost|[Nn]o) (?:connection|heartbeat) [^\n]{0,40}(?:lmcache|LMCache|KV (?:server|cache|transfer))",
        "preempt": r"[Pp]reempt(?:ed|ing) (?:request|sequence|by)\S* ?(?P<id>\S*)|is preempted by",
        "wrong-result": r"(?:top-?k|indices|rows?|result|output)s?[^\n]{0,60}(?:differ|mismatch|disagree|do not match|not "
        r"equal)[^\n]{0,40}"
        r"(?:reference|torch|expected|golden)|(?:wrong|incorrect) (?:top-?k )?(?:indices|results?|rows?|answers?)\b"
        r"|candidate (?:buffer )?overflow|histogram (?:ring )?(?:reuse|misalign\w*)"
        r"|rows? beyond (?:its|their) length|indices beyond",
        "fr-empty": r"Stack trace of the failed collective not found|FlightRecorder is disabled",
        "exception": r"^(?:[^\n]{0,120}\]\s)?(?:\w+\.)*(?P<name>[A-Z]\w+(?:Error|Exception)): (?P<text>[^\n]{0,160})",
    }.items()
}
EVENTS["exception"] = re.compile(EVENTS["exception"].pattern, re.MULTILINE)

_STATS = re.compile(
    r"(?:Engine (?P<engine>\w+): )?Avg prompt throughput: (?P<prompt>\d+(?:\.\d+)?) tokens/s, "
    r"Avg generation throughput: (?P<generation>\d+(?:\.\d+)?) tokens/s, (?P<rest>[^\n]*)"
)
_SGLANG = re.compile(
    r"(?:\bTP(?P<engine>\d+)\] ?)?(?P<kind>Decode|Prefill) batch[.,] (?P<rest>[^\n]*#running-req: (?P<running>\d+)[^\n]*)"
)
_SGLANG_RATE = re.compile(r"(?:gen|input) throughput \(token/s\): (\d+(?:\.\d+)?)")
_SGLANG_QUEUE = re.compile(r"#queue-req: (\d+)")
_SGLANG_USAGE = re.compile(r"token usage: (\d+(?:\.\d+)?)")
_RUNNING = re.compile(r"Running: (\d+) reqs")
_WAITING = re.compile(r"(?:Waiting|Pending): (\d+) reqs")
_DEFERRED = re.compile(r"Deferred: (\d+) reqs")
_PREEMPTIONS = re.compile(r"Preemptions: (\d+)")
_KV = re.compile(r"GPU KV cache usage: (\d+(?:\.\d+)?)%")
_PROCESS = re.compile(r"^\s*\((?P<name>[^()\n]{1,60}?) pid=(?P<pid>\d+)(?:, ip=[^)]*)?\)")
#: What is stated, words of which one must be there, and the pattern.
_VERSIONS: tuple[tuple[str, tuple[str, ...], re.Pattern[str]], ...] = tuple(
    (name, words, re.compile(pattern))
    for name, words, pattern in (
        ("vllm", ("V1 LLM engine",), r"Initializing a V1 LLM engine \(v(\d[\w.+-]*)\)"),
        ("vllm", ("V1 LLM engine",), r"Dumping input data for V1 LLM engine \(v(\d[\w.+-]*)\)"),
        ("vllm", ("ersion",), r"vLLM (?:API server )?[Vv]ersion[ \t]*:?[ \t]*v?(\d[\w.+-]*)"),
        ("vllm", ("vllm==", "vllm =="), r"(?m)^[ \t]*(?:Name: )?vllm[ \t]*==[ \t]*(\d[\w.+-]*)"),
        ("flashinfer", ("lash",), r"(?i:flashinfer)(?:[-_]python)?[ \t]*(?:==|version:?|:)[ \t]*v?(\d[\w.+-]*)"),
        ("nccl", ("nccl", "NCCL version"), r"(?:nccl==|NCCL version:? |nccl-cu\d\d==)v?(\d[\w.+-]*)"),
        ("torch", ("PyTorch version", "torch="), r"(?:PyTorch version|(?m:^torch)==?)[ \t]*:?[ \t]*(\d[\w.+-]*)"),
        (
            "tensor_parallel_size",
            ("tensor",),
            r"tensor_parallel_size[=:][ \t]*(\d+)|--tensor-parallel-size[= ](\d+)|'tensor_parallel_size': (\d+)",
        ),
        ("data_parallel_size", ("data",), r"data_parallel_size[=:][ \t]*(\d+)|--data-parallel-size[= ](\d+)"),
        ("pipeline_parallel_size", ("pipeline",), r"pipeline_parallel_size[=:][ \t]*(\d+)|--pipeline-parallel-size[= ](\d+)"),
        ("max_model_len", ("max",), r"max_seq_len=(\d+)|max_model_len[=:][ \t]*'?(\d+)|--max-model-len[= ](\d+)"),
        ("max_num_seqs", ("max",), r"max_num_seqs[=:][ \t]*'?(\d+)|--max-num-seqs[= ](\d+)"),
        ("num_speculative_tokens", ("num_spec",), r"num_spec(?:ulative)?_tokens[\"']?[=:][ \t]*(\d+)"),
        ("cudagraph_capture_sizes", ("cudagraph",), r"cudagraph_capture_sizes[\"']?[=:][ \t]*\[([\d, ]+)\]"),
        ("cudagraph_mode", ("cudagraph",), r"cudagraph_mode[\"']?[=:][ \t]*[\"']?<?(?:CUDAGraphMode\.)?([A-Z_]+)"),
        ("enforce_eager", ("enforce",), r"enforce_eager=(True|False)|(--enforce-eager)"),
        ("gpu", ("NVIDIA",), r"(?m)^[ \t]*GPU \d+: (NVIDIA [^\n(]{2,60})"),
    )
)


def line_stamp(section: Section, index: int) -> Stamp | None:
    """The time of a line: what the engine wrote, else what its carrier wrote."""
    return find_stamp(section.lines[index]) or section.stamps.get(index)


def line_process(line: str) -> tuple[str, int | None]:
    """``(EngineCore pid=4000)`` → name and pid."""
    match = _PROCESS.match(line)
    return (match.group("name"), int(match.group("pid"))) if match else ("", None)


def _note_clocks(case: CaseFile, section: Section, index: int, stamp: Stamp | None) -> None:
    case.note_time(section.source, stamp)
    outer = section.stamps.get(index)
    if outer is not None and outer.kind == "utc" and stamp is not None and stamp.kind in ("local", "yearless"):
        case.clock_pairs.append((section.source, outer, stamp))


#: Words of which one must be in a section for its pattern to be tried: a search for a literal is far cheaper than the pattern.
_GATES: dict[str, tuple[str, ...]] = {
    "shm-wait": ("block found in",), "rpc-timeout": ("RPC call to", "atchdog timeout"), "fatal": ("fatal error",),
    "engine-dead": ("EngineDead",
    "an issue."),
    "engine-failed-start": ("failed to start", "initialization failed"), "worker-died": ("died unexpectedly",),
    "engine-proc-died": ("died unexpectedly",), "actor-died": ("Worker exit type", "The actor", "A worker died", "ActorDied"),
    "unit-killed": ("Main process exited",), "pod-oom": ("OOMKilled", "OOM killer"), "pod-exit": ("Exit Code:",),
    "shutdown": ("[shutdown]", "Received", "Shutting", "shutting", "shutdown complete", "still running after"),
    "parent-exited": ("Parent process exited",), "startup-complete": ("startup complete", "Uvicorn running", "server process",
    "Starting vLLM"),
    "serving": ("startup complete",), "load-start": ("load model", "Loading", "Filesystem type"), "load-progress": ("Loading",),
    "load-done": ("took",), "compile-start": ("compil", "Dynamo"), "compile-step": ("a graph for", "Cache the graph"),
    "compile-done": ("torch.compile",), "capture-progress": ("Capturing",), "capture-done": ("Graph capturing",),
    "init-done": ("init engine",),
    "jit": ("during inference",), "jit-start": ("JIT", "compil"), "jit-done": ("Finished loading JIT", "ompilation"),
    "build-failed": ("ninja", "Ninja", "building extension", "nvcc", "FAILED: ", "cicc", "ptxas", "compiling objects", "cc1plus"),
    "lock-wait": ("lock",), "abort": ("bort", "lient"), "http-499": (" 499",), "http-completion-ok": ("POST /v1/",),
    "http-completion-error": ("POST /v1/",), "http-health-ok": ("GET /",), "http-health-bad": ("GET /",),
    "cuda-error": ("CUDA error", "CUDA driver error", "CUDA_ERROR_", "cudaError"), "coredump-exception": ("CUDBG_EXCEPTION",),
    "launch-refused": ("total_ctas", "oversubscribe", "ooperative", "too many resources"), "nccl-warn": ("NCCL WARN", "ncclRemote",
    "ncclSystem", "ncclInternal", "ncclUnhandled"),
    "grid-sync-timeout": ("rid sync",), "deepep-timeout": ("DeepEP",),
    "kv-transfer": ("REMOTE_KV", "KV load", "NIXL", "nixl", "expired KV", "remote KV", "mcache", "MCache", "ooncake", "KV server",
    "KV cache", "KV transfer"),
    "preempt": ("reempt",), "wrong-result": ("differ", "mismatch", "disagree", "not match", "not equal", "beyond", "wrong",
    "incorrect", "overflow", "histogram"),
    "fr-empty": ("failed collective not found", "FlightRecorder is disabled"), "exception": ("Error: ", "Exception: "),
}  # fmt: skip


def read_engine_log(section: Section, case: CaseFile) -> None:
    """Collect the known lines of one section."""
    text = section.text
    if "Avg prompt throughput" in text:
        _read_stats(section, case)
    if "#running-req" in text:
        _read_sglang(section, case)
    for kind, pattern in EVENTS.items():
        if not any(word in text for word in _GATES[kind]):
            continue
        for index, match in _chosen(section, kind, pattern):
            ref = section.ref(index, section.index_at(max(match.end() - 1, match.start())))
            stamp = line_stamp(section, index)
            _note_clocks(case, section, index, stamp)
            name, pid = line_process(section.lines[index])
            fields = {key: value.strip() for key, value in match.groupdict().items() if value is not None}
            if kind == "exception" and (fields["name"] == "EngineDeadError" or "RPC call" in match.group(0)):
                continue
            case.events.append(LogEvent(kind, ref, (section.order, index), stamp, name, pid, fields))
    for package, words, pattern in _VERSIONS:
        if not any(word in text for word in words):
            continue
        for match in pattern.finditer(text):
            value = next((group for group in match.groups() if group), "")
            _, ref = section.cite_match(match)
            case.versions.append(VersionFact(package, value, ref))
    _claim_log_lines(section)


#: How many events of a kind one part may hold (first half and last half); access-log lines carry little.
_MOST = 4_000
_FEW = {
    "http-completion-ok": 6,
    "http-completion-error": 20,
    "http-health-ok": 6,
    "http-health-bad": 6,
    "http-499": 40,
    "abort": 200,
    "exception": 400,
}


#: A comment in a program's source speaks of results and errors, and reports none.
_COMMENT = re.compile(r"\s*(?:#+|//+) ")


def _chosen(section: Section, kind: str, pattern: re.Pattern[str]) -> Iterator[tuple[int, re.Match[str]]]:
    """Matches with their line's index: one a line, all claimed, the middle of very many left out."""
    most = _FEW.get(kind, _MOST)
    head: list[tuple[int, re.Match[str]]] = []
    tail: deque[tuple[int, re.Match[str]]] = deque(maxlen=most // 2)
    last = -1
    for match in pattern.finditer(section.text):
        index = section.index_at(match.start())
        if index == last:
            continue
        last = index
        if _COMMENT.match(section.lines[index]):
            continue
        section.claim(index)
        if len(head) < most // 2:
            head.append((index, match))
        else:
            tail.append((index, match))
    yield from head
    yield from tail


_LOG_LINE = re.compile(
    r"^\s*(?:\([^()]{1,60}pid=\d+(?!\d)[^)]*\)\s*)?(?:\[rank\d+\]:\s*)?(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)[ :]|\[[IWEF]\d{4} |"
    r"Traceback \(|  File \")"
)


def _claim_log_lines(section: Section) -> None:
    """Ordinary log lines are understood as such even where nothing in them matters."""
    for index, line in enumerate(section.lines):
        if not section.claimed[index] and _LOG_LINE.match(line):
            section.claimed[index] = 1


def _read_stats(section: Section, case: CaseFile) -> None:
    for match in _STATS.finditer(section.text):
        rest = match.group("rest")
        running, waiting = _RUNNING.search(rest), _WAITING.search(rest)
        if running is None or waiting is None:
            continue
        index, ref = section.cite_match(match)
        stamp = line_stamp(section, index)
        _note_clocks(case, section, index, stamp)
        kv, deferred, preemptions = _KV.search(rest), _DEFERRED.search(rest), _PREEMPTIONS.search(rest)
        case.stats.append(
            StatsLine(
                match.group("engine") or "0",
                float(match.group("prompt")),
                float(match.group("generation")),
                int(running.group(1)),
                int(waiting.group(1)),
                ref,
                (section.order, index),
                stamp,
                float(kv.group(1)) if kv else None,
                int(deferred.group(1)) if deferred else None,
                int(preemptions.group(1)) if preemptions else None,
            )
        )


def _read_sglang(section: Section, case: CaseFile) -> None:
    """SGLang prints a line for its batches, and none when no batch comes round. A prefill line without a rate is flow too."""
    for match in _SGLANG.finditer(section.text):
        rest = match.group("rest")
        index, ref = section.cite_match(match)
        stamp = line_stamp(section, index)
        _note_clocks(case, section, index, stamp)
        rate, queue, usage = _SGLANG_RATE.search(rest), _SGLANG_QUEUE.search(rest), _SGLANG_USAGE.search(rest)
        value = float(rate.group(1)) if rate else 0.0
        prefill = match.group("kind") == "Prefill"
        case.stats.append(
            StatsLine(
                f"TP{match.group('engine') or 0}", (value or 1.0) if prefill else 0.0, 0.0 if prefill else value,
                int(match.group("running")), int(queue.group(1)) if queue else 0, ref, (section.order, index), stamp,
                float(usage.group(1)) * 100 if usage else None,
            )
        )  # fmt: skip
