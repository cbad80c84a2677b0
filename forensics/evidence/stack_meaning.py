"""What a thread is doing, from its frames: one word of ``WAITS``.

The Python frame is often the victim: under a jammed launch queue every host thread stops at its next launch, whatever that is.
So native frames decide first where they were taken, and ``collective`` from a Python frame alone stays a weak fact. Function and
file names as of vLLM 0.19 to 0.33, torch 2.9 to 2.14, Triton 3.x, FlashInfer 0.6, DeepGEMM.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .facts import Frame

__all__ = ["WAITS", "in_startup", "meaning_of"]

#: word -> what it means.
WAITS: dict[str, str] = {
    "cuda-event": "waits for a CUDA event, stream or device",
    "cuda-launch": "stands in a kernel or graph launch: the launch queue is full",
    "collective": "is in a collective (Python frame)",
    "collective-native": "is in a collective (native frame of the communication library)",
    "queue-get": "waits for work in an in-process queue",
    "worker-dequeue": "waits for the engine's next command",
    "engine-wait-reply": "waits for the workers' reply",
    "engine-idle": "waits for requests",
    "schedule": "schedules",
    "jit-compile": "compiles a kernel or graph",
    "jit-lock": "waits for the lock of a build",
    "weight-load": "loads weights",
    "kv-transfer": "is in a KV connector",
    "driver": "is inside the driver or a driver lock",
    "other": "something else",
}

_DEEP = 14
_LOCK = re.compile(r"(?:^|/)file_baton\.py$|filelock/|(?:^|/)_(?:unix|soft|api)\.py$|(?:^|/)fasteners/|(?:^|/)portalocker/")
_LOCK_FUNCTION = re.compile(r"^(?:wait|acquire|_acquire|__enter__|flock|fcntl|lockf|do_flock|_lock)$")
_JIT_FILE = re.compile(
    r"triton/compiler/|triton/backends/|torch/_inductor/|torch/_dynamo/(?:convert_frame|output_graph|symbolic_convert)|deep_gemm\S*/jit|"
    r"(?:^|/)jit/(?:compiler|core|cpp_ext|env)\.py|flashinfer/(?:\S*/)?jit/|torch/utils/(?:_?cpp_extension|file_baton)|tilelang/(?:jit|engine|cache)|"
    r"cutlass/(?:base_dsl|cutlass_dsl)|(?:^|/)tvm/|cute/_?compil|vllm/compilation/(?:backends|compiler_interface|piecewise_backend)"
)
_JIT_FUNCTION = re.compile(
    r"^(?:make_cubin|make_ptx|make_llir|make_ttgir|make_ttir|_do_compile|run_ninja|_run_ninja_build|_write_ninja_file_and_build_library|"
    r"build_and_load|_jit_compile|compile_fx|codegen_and_compile|nvrtcCompileProgram|_bench|do_bench|compile_to_\w+|compile_kernel\w*|"
    r"cute_compile|jit_compile\w*|aot_compile\w*)$|llvm::|ptxas|\bclang::"
)
_COLLECTIVE_NATIVE = re.compile(
    r"^nccl[A-Z]\w+|ncclGroupEnd|ProcessGroupNCCL|WorkNCCL|ncclLaunch|ProcessGroupGloo|gloo::|nvshmem\w*(?:barrier|wait)"
)
_COLLECTIVE_FILE = re.compile(
    r"torch/distributed/(?:distributed_c10d|c10d_logger)|device_communicators/(?:pynccl|custom_all_reduce|quick_all_reduce|symm_mem|"
    r"all2all|cuda_communicator|flashinfer_all_reduce)|flashinfer/comm/|deep_ep/"
)
_COLLECTIVE_FUNCTION = re.compile(
    r"^(?:all_gather\w*|all_reduce\w*|reduce_scatter\w*|broadcast\w*|barrier|all_to_all\w*|gather|scatter|send|recv|monitored_barrier)$"
)
_EVENT_NATIVE = re.compile(
    r"cu(?:da)?(?:Event|Stream|Ctx|Device)Synchronize|cuStreamWait|cuMemcpyDtoH|cuMemcpyHtoD|cudaMemcpy(?!Async)|cuEventQuery"
)
_LAUNCH_NATIVE = re.compile(r"cu(?:da)?(?:LaunchKernel|GraphLaunch|LaunchCooperative|LaunchHostFunc)|cudaLaunchKernel")
_EVENT_FILE = re.compile(
    r"torch/cuda/(?:streams|__init__)\.py$|torch/accelerator/__init__\.py$|torch/(?:_utils|_streambase|mtia/__init__)\.py$"
)
_SYNC_FUNCTION = re.compile(r"^(?:item|tolist|_to_list|cpu|nonzero|_get_valid_sampled_token_count|_local_scalar_dense)$")
#: Where the output's copy event is waited for: ``torch.Event`` is no Python code, so this is the innermost frame.
_OUTPUT_FILE = re.compile(r"v1/worker/(?:gpu_model_runner|gpu/async_utils)\.py$")
_DRIVER = re.compile(r"uvm_|nv_ioctl|nvidia_ioctl|libcuda\.so|libnvidia")
_WEIGHT_FUNCTION = re.compile(
    r"^(?:load_weights|\w*weights_iterator|_prepare_weights|download_weights\w*|load_file|safe_open|get_tensor|weight_loader|load_model_weights"
    r"|_load_w\w+|prefetch_\w+|snapshot_download)$"
)
_WEIGHT_FILE = re.compile(r"model_loader/|weight_utils\.py|safetensors/|runai_model_streamer|huggingface_hub/|fastsafetensors")
_KV_FILE = re.compile(r"kv_transfer/|kv_connector|/?lmcache/|nixl|mooncake|kv_offload|flexkv|hf3fs")
_STARTUP_FUNCTION = re.compile(
    r"^(?:load_model|init_device|init_worker|determine_available_memory|profile_run|_dummy_run|capture_model|_capture_cudagraphs|capture_graph\w*|"
    r"compile_or_warm_up_model|initialize_from_config|_initialize_kv_caches|kernel_warmup|warmup\w*|_warm\w*|initialize_cache|init_distributed_environment)$"
)


def in_startup(frames: Sequence[Frame]) -> bool:
    """Does the stack stand in a start-up phase (load, profile, compile, capture, warm-up)?"""
    return any(_STARTUP_FUNCTION.match(frame.function) for frame in frames)


def _bare(function: str) -> str:
    return function.split("(", 1)[0].split("<", 1)[0].strip().rsplit("::", 1)[-1]


def _label(frame: Frame) -> str:
    place = f" ({frame.file}:{frame.line})" if frame.line else f" ({frame.file})" if frame.file else ""
    return f"{frame.function}{place}"


def _names(frames: Sequence[Frame]) -> set[str]:
    return {_bare(frame.function) for frame in frames}


def meaning_of(frames: Sequence[Frame]) -> tuple[str, str]:
    """The word and the frame that decided it (``inside``). Frames innermost first."""
    if not frames:
        return "other", ""
    names = _names(frames)
    top = frames[:_DEEP]
    native = _native_meaning(top)
    if native is not None and native[0] in ("cuda-launch", "collective-native"):
        return native
    lock = _lock_frame(top)
    jit = next((f for f in frames if _JIT_FILE.search(f.file) or _JIT_FUNCTION.search(f.function)), None)
    weights = next(
        (f for f in frames if _WEIGHT_FUNCTION.match(_bare(f.function)) and (_WEIGHT_FILE.search(f.file) or not f.native)), None
    )
    if lock is not None and (jit is not None or weights is None):
        return "jit-lock", _label(lock)
    if jit is not None and (native is None or native[0] != "cuda-event"):
        return "jit-compile", _label(jit)
    if weights is not None and (native is None or native[0] != "cuda-event") and not _sync_frame(top):
        return "weight-load", _label(weights)
    sync = _sync_frame(top)
    if sync is not None:
        return "cuda-event", _label(sync)
    if native is not None:
        return native
    return _python_meaning(frames, names)


def _lock_frame(top: Sequence[Frame]) -> Frame | None:
    for frame in top[:6]:
        if _LOCK.search(frame.file) and _LOCK_FUNCTION.match(_bare(frame.function)):
            return frame
        if frame.native and _bare(frame.function) in ("flock", "__flock", "lockf"):
            return frame
    return None


def _native_meaning(top: Sequence[Frame]) -> tuple[str, str] | None:
    for frame in top:
        if _LAUNCH_NATIVE.search(frame.function):
            return "cuda-launch", _label(frame)
        if _EVENT_NATIVE.search(frame.function):
            return "cuda-event", _label(frame)
        if frame.native and _COLLECTIVE_NATIVE.search(frame.function):
            return "collective-native", _label(frame)
        if not frame.native and frame.function not in ("replay", "synchronize"):
            break
    for frame in top[:3]:
        if frame.native and (_DRIVER.search(frame.function) or _DRIVER.search(frame.file)):
            return "driver", _label(frame)
    return None


def _sync_frame(top: Sequence[Frame]) -> Frame | None:
    for frame in top[:6]:
        if _bare(frame.function) == "synchronize" and (_EVENT_FILE.search(frame.file) or frame.native):
            return frame
        if _EVENT_NATIVE.search(frame.function):
            return frame
    first = next((frame for frame in top if not frame.native), None)
    if first is not None and _SYNC_FUNCTION.match(_bare(first.function)):
        return first
    if first is not None and _bare(first.function) == "get_output" and _OUTPUT_FILE.search(first.file):
        return first
    return None


def _python_meaning(frames: Sequence[Frame], names: set[str]) -> tuple[str, str]:
    first_python = next((frame for frame in frames if not frame.native), frames[0])
    if "recv_requests" in names and any(name.startswith("event_loop") for name in names):
        # SGLang's ranks hand each other the new requests by a broadcast: this is where a rank waits between two steps.
        return "worker-dequeue", _label(first_python)
    for frame in frames[:8]:
        if (_COLLECTIVE_FILE.search(frame.file) and not frame.native) or (
            _COLLECTIVE_FUNCTION.match(_bare(frame.function)) and "distributed" in frame.file and "shm_broadcast" not in frame.file
        ):
            return "collective", _label(frame)
    if _bare(first_python.function) == "replay" and "graphs" in first_python.file:
        return "cuda-launch", _label(first_python)
    if "schedule" in names and any("sched/scheduler" in f.file or f.file.endswith("scheduler.py") for f in frames):
        return "schedule", _label(first_python)
    kv = next((f for f in frames[:10] if _KV_FILE.search(f.file)), None)
    if kv is not None:
        return "kv-transfer", _label(kv)
    if "worker_busy_loop" in names and names & {"dequeue", "acquire_read"} and "execute_method" not in names:
        return "worker-dequeue", _label(first_python)
    if names & {"get_response", "_wait_for_response", "wait_for_response"} or (
        names & {"result", "collective_rpc"}
        and any("executor" in f.file for f in frames)
        and names & {"dequeue", "recv", "poll", "wait", "get"}
    ):
        return "engine-wait-reply", _label(first_python)
    if "_process_input_queue" in names and names & {"get", "wait"}:
        return "engine-idle", _label(first_python)
    if names & {"async_output_busy_loop", "_async_output_busy_loop"} and names & {"get", "wait"}:
        return "queue-get", _label(first_python)
    return "other", _label(first_python)
