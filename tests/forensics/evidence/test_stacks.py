"""Host stacks in every form, and what a thread is doing."""

from __future__ import annotations

import json

import pytest

from dsv4_repro.forensics.evidence.facts import Frame, ThreadSample
from dsv4_repro.forensics.evidence.gather import read_text
from dsv4_repro.forensics.evidence.stack_meaning import WAITS, in_startup, meaning_of


def threads(text: str, name: str = "part.txt") -> list[ThreadSample]:
    return read_text(name, text).threads


def test_py_spy_text_with_native_frames_locals_and_children() -> None:
    text = """Process 4101: VLLM::Worker_TP3
Python v3.12.11 (/usr/bin/python3.12)
Parent Process 4000: VLLM::EngineCore

Thread 0x7F11AA (active+gil): "MainThread"
    cuLaunchKernelEx (libcuda.so.580.95)
    launch (vllm/v1/worker/gpu_model_runner.py:12)
        Arguments:
            self: <GPUModelRunner at 0x7f>
        Locals:
            x: 3
    execute_model (vllm/v1/worker/gpu_worker.py:400)
Thread 4188 (idle)
    wait (threading.py:355)
"""
    first, second = threads(text)
    assert (first.pid, first.rank, first.role, first.tool) == (4101, 3, "worker", "py-spy")
    assert (first.active, first.gil, first.thread) == (True, True, "MainThread")
    assert [f.function for f in first.frames] == ["cuLaunchKernelEx", "launch", "execute_model"]
    assert [f.native for f in first.frames] == [True, False, False]
    assert first.waits == "cuda-launch"
    assert (second.thread, second.tid, second.active) == ("", "4188", False)


def test_py_spy_json() -> None:
    document = [
        {
            "pid": 77, "thread_id": 1, "thread_name": "MainThread", "os_thread_id": 77, "active": False, "owns_gil": False,
            "frames": [
                {"name": "synchronize", "filename": "/x/torch/cuda/streams.py", "short_filename": "torch/cuda/streams.py",
                 "line": 231},
                {"name": "get_output", "filename": "/x/vllm/v1/worker/gpu_model_runner.py", "short_filename": None, "line": 1},
            ],
            "process_info": {"pid": 77, "command_line": "VLLM::EngineCore", "parent": None},
        }
    ]  # fmt: skip
    (thread,) = threads(json.dumps(document, indent=2))
    assert (thread.pid, thread.role, thread.waits, thread.frames[0].line) == (77, "engine", "cuda-event", 231)


def test_pystack_is_turned_round() -> None:
    text = """Traceback for thread 601 (VLLM::Worker) [] (most recent call last):
    (Python) File "/usr/lib/python3.12/threading.py", line 1012, in run
        self._target()
    (Python) File "/x/vllm/v1/executor/multiproc_executor.py", line 760, in async_output_busy_loop
        output = self.async_output_queue.get()
    (Python) File "/usr/lib/python3.12/queue.py", line 171, in get
        self.not_empty.wait()
    (C) File "???", line 0, in __futex_abstimed_wait_common (/usr/lib/libc.so.6)
"""
    (thread,) = threads(text)
    assert thread.frames[-1].function == "run"
    assert thread.frames[1].function == "get"
    assert thread.tool == "pystack"


def test_gdb_threads_and_a_bare_backtrace() -> None:
    text = """Thread 2 (Thread 0x7f11 (LWP 4188) "WorkerAsyncOut"):
#0  0x00007f01 in __futex_abstimed_wait_common () from /lib/x86_64-linux-gnu/libc.so.6
#1  0x00007f02 in cuEventSynchronize () from /lib/x86_64-linux-gnu/libcuda.so.1

Thread 1 (Thread 0x7f10 (LWP 4101) "VLLM::Worker_TP"):
#0  0x00007f03 in sched_yield () at ../sysdeps/unix/syscall.S:120
#1  0x00007f04 in cuLaunchKernel () from /lib/x86_64-linux-gnu/libcuda.so.1
"""
    first, second = threads(text)
    assert (first.tid, first.thread, first.waits) == ("4188", "WorkerAsyncOut", "cuda-event")
    assert (second.tid, second.waits, second.frames[0].line) == ("4101", "cuda-launch", 120)


def test_faulthandler() -> None:
    text = """Current thread 0x00007f01 [MainThread] (most recent call first):
  File "/x/vllm/distributed/device_communicators/shm_broadcast.py", line 600 in acquire_read
  File "/x/vllm/v1/executor/multiproc_executor.py", line 780 in worker_busy_loop
"""
    (thread,) = threads(text)
    assert (thread.thread, thread.waits) == ("MainThread", "worker-dequeue")


def test_samples_of_one_process_are_numbered_over_files() -> None:
    dump = 'Process 5: VLLM::EngineCore\n\nThread 5 (active): "MainThread"\n    schedule (vllm/v1/core/sched/scheduler.py:{})\n'
    case = read_text("x", f"=== one ===\n{dump.format(1)}\n=== two ===\n{dump.format(2)}")
    assert [t.sample for t in case.threads] == [0, 1]


PY = [
    ("cuda-event", ["synchronize torch/cuda/streams.py", "get_output vllm/v1/worker/gpu/async_utils.py"]),
    ("cuda-event", ["_to_list vllm/v1/worker/gpu_model_runner.py", "_bookkeeping_sync vllm/v1/worker/gpu_model_runner.py"]),
    ("cuda-event", ["synchronize torch/accelerator/__init__.py", "execute_model vllm/v1/worker/gpu_worker.py"]),
    ("cuda-event", ["_get_valid_sampled_token_count "
                    "vllm/v1/worker/gpu_model_runner.py", "sample_tokens vllm/v1/worker/gpu_worker.py"]),
    ("cuda-launch", ["replay torch/cuda/graphs.py", "__call__ vllm/compilation/cuda_graph.py"]),
    ("collective", ["all_gather_into_tensor torch/distributed/distributed_c10d.py", "gather vllm/distributed/parallel_state.py"]),
    ("collective", ["all_reduce vllm/distributed/device_communicators/pynccl.py", "forward model.py"]),
    ("queue-get", ["wait threading.py", "get queue.py", "async_output_busy_loop vllm/v1/executor/multiproc_executor.py"]),
    ("worker-dequeue", ["poll zmq/sugar/poll.py", "dequeue vllm/x/shm_broadcast.py", "worker_busy_loop "
        "vllm/v1/executor/multiproc_executor.py"]),
    (
        "engine-wait-reply",
        ["recv vllm/distributed/device_communicators/shm_broadcast.py", "get_response vllm/v1/executor/multiproc_executor.py"],
    ),
    ("engine-idle", ["get queue.py", "_process_input_queue vllm/v1/engine/core.py", "run_busy_loop vllm/v1/engine/core.py"]),
    ("schedule", ["schedule vllm/v1/core/sched/scheduler.py", "step vllm/v1/engine/core.py"]),
    ("jit-compile", ["make_cubin triton/backends/nvidia/compiler.py", "compile triton/compiler/compiler.py"]),
    ("jit-compile", ["communicate subprocess.py", "run_ninja flashinfer/jit/cpp_ext.py", "build_and_load flashinfer/jit/core.py"]),
    ("jit-compile", ["compile_fx torch/_inductor/compile_fx.py", "compile vllm/compilation/backends.py"]),
    ("jit-lock", ["wait torch/utils/file_baton.py", "_jit_compile torch/utils/cpp_extension.py"]),
    ("jit-lock", ["acquire filelock/_api.py", "build_and_load flashinfer/jit/core.py"]),
    ("weight-load", ["safetensors_weights_iterator vllm/model_executor/model_loader/weight_utils.py", "load_weights m.py"]),
    ("weight-load", ["acquire filelock/_api.py", "snapshot_download huggingface_hub/_snapshot_download.py", "load_weights m.py"]),
    ("kv-transfer", ["recv zmq/sugar/socket.py", "get_finished vllm/distributed/kv_transfer/kv_connector/v1/lmcache_connector.py"]),
    ("other", ["fill_next_token_bitmask xgrammar/matcher.py", "step vllm/v1/engine/core.py"]),
]  # fmt: skip


@pytest.mark.parametrize(("word", "frames"), PY)
def test_python_frames_mean(word: str, frames: list[str]) -> None:
    stack = [Frame(function, file, line=1) for function, file in (frame.split(" ", 1) for frame in frames)]
    assert meaning_of(stack)[0] == word


def test_a_jammed_launch_outranks_the_python_frame_above_it() -> None:
    stack = [Frame("sched_yield", "libc.so.6", None, True), Frame("cuLaunchKernelEx", "libcuda.so.1", None, True),
             Frame("all_reduce", "vllm/distributed/device_communicators/pynccl.py", 1)]  # fmt: skip
    assert meaning_of(stack)[0] == "cuda-launch"


def test_a_running_triton_kernel_is_no_compile() -> None:
    stack = [Frame("run", "triton/runtime/jit.py", 600), Frame("forward", "vllm/model_executor/layers/fused_moe/fused_moe.py", 1)]
    assert meaning_of(stack)[0] == "other"
    eval_frame = [Frame("forward", "m.py", 1), Frame("_fn", "torch/_dynamo/eval_frame.py", 1)]
    assert meaning_of(eval_frame)[0] == "other"


def test_words_are_documented_and_startup_is_seen() -> None:
    assert {word for word, _ in PY} <= set(WAITS)
    assert in_startup([Frame("profile_run", "x.py", 1)])
    assert not in_startup([Frame("execute_model", "x.py", 1)])
    assert meaning_of([]) == ("other", "")


def test_qualified_names_of_a_recent_py_spy_are_known_by_the_functions_own_names() -> None:
    """py-spy 0.4.3 on Python 3.12, a worker of vLLM 0.23.0 whose GPU spins (our own recording, shortened)."""
    case = read_text(
        "host_stacks-rank0-pid-2585-look1.txt",
        "Process 2585: VLLM::Worker\n"
        "Python v3.12.3 (/usr/bin/python3.12)\n\n"
        'Thread 2585 (active): "MainThread"\n'
        "    GPUModelRunner._get_valid_sampled_token_count (vllm/v1/worker/gpu_model_runner.py:4773)\n"
        "    GPUModelRunner._update_states.<locals>.correct_spec_decode_token_counts (vllm/v1/worker/gpu_model_runner.py:1464)\n"
        "    GPUModelRunner.execute_model (vllm/v1/worker/gpu_model_runner.py:4364)\n"
        "    Hooks._step.<locals>.execute_model (dsv4_repro_agent/hooks.py:115)\n"
        "    WorkerProc.worker_busy_loop (vllm/v1/executor/multiproc_executor.py:982)\n"
        'Thread 2829 (active): "WorkerAsyncOutputCopy"\n'
        "    AsyncGPUModelRunnerOutput.get_output (vllm/v1/worker/gpu_model_runner.py:288)\n"
        "    WorkerProc.enqueue_output (vllm/v1/executor/multiproc_executor.py:932)\n"
        "    WorkerProc.async_output_busy_loop (vllm/v1/executor/multiproc_executor.py:967)\n",
    )
    main, copy = case.threads
    assert (main.waits, copy.waits) == ("cuda-event", "cuda-event")
    assert [frame.function for frame in main.frames[:2]] == ["_get_valid_sampled_token_count", "correct_spec_decode_token_counts"]
    assert main.role == "worker"
