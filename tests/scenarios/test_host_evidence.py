"""What the host alone can say of each relative: logs, metrics, stacks and utilisation, no device. Never a confident wrong sibling.

Each relative leaves what a server would: the spin barriers all leave one and the same stand-still, with the frames of whichever
operation was launched next. Where the host cannot tell, the answer is a weaker parent or unknown, and the same for all of them.
"""

from __future__ import annotations

from itertools import permutations

import pytest

from dsv4_repro.forensics.classify import Classification, classify
from dsv4_repro.forensics.evidence.gather import read_text
from dsv4_repro.forensics.records import CLASSES

_STATS = (
    "(APIServer pid=1) INFO 03-01 10:{at} [loggers.py:271] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation "
    "throughput: {rate} tokens/s, Running: {running} reqs, Waiting: 0 reqs, GPU KV cache usage: 4.1%, Prefix cache hit rate: 0.0%\n"
)
_BROADCAST = (
    "(EngineCore pid=40) INFO 03-01 10:0{minute}:20 [shm_broadcast.py:802] No available shared memory broadcast block found in 60 "
    "seconds. This typically happens when some processes are hanging or doing some time-consuming work (e.g. compilation, "
    "weight/kv cache quantization).\n"
)
_DEAD = (
    "(EngineCore pid=40) ERROR 03-01 10:06:19 [core.py:1177] EngineCore encountered a fatal error.\n"
    "(EngineCore pid=40) ERROR 03-01 10:06:19 [core.py:1177] TimeoutError: RPC call to sample_tokens timed out.\n"
    "(APIServer pid=1) ERROR 03-01 10:06:19 [async_llm.py:691] vllm.v1.engine.exceptions.EngineDeadError: EngineCore "
    "encountered an issue. See stack trace (above) for the root cause.\n"
)
_SMI = (
    "=== nvidia-smi --query-gpu=timestamp,index,pstate,utilization.gpu,utilization.memory,clocks.sm,power.draw --format=csv ===\n"
    "timestamp, index, pstate, utilization.gpu [%], utilization.memory [%], clocks.current.sm [MHz], power.draw [W]\n"
    "2027/03/01 10:02:40.100, 0, P1, 100 %, 0 %, 2617 MHz, 121.07 W\n"
    "2027/03/01 10:03:40.100, 0, P1, 100 %, 0 %, 2617 MHz, 121.11 W\n"
)


def _stacks(*frames: str) -> str:
    """py-spy of a worker: its main thread's innermost frames, and the thread that copies outputs."""
    inner = "".join(f"    {frame}\n" for frame in frames)
    return (
        "=== py-spy dump --pid 41, taken twice 30 s apart, identical ===\nProcess 41: VLLM::Worker_TP0\nPython v3.12.11 "
        f'(/usr/bin/python3.12)\n\nThread 41 (idle): "MainThread"\n{inner}'
        "    worker_busy_loop (vllm/v1/executor/multiproc_executor.py:986)\n    run (multiprocessing/process.py:108)\n"
        'Thread 48 (active): "WorkerAsyncOutputCopy"\n    synchronize (torch/cuda/streams.py:254)\n'
        "    get_output (vllm/v1/worker/gpu/async_utils.py:50)\n    run (threading.py:1012)\n"
    )


def _hang(*frames: str) -> str:
    log = _STATS.format(at="00:10", rate=412.6, running=5) + _STATS.format(at="00:20", rate="0.0", running=3)
    return (
        "=== engine log ===\n"
        + log
        + "".join(_BROADCAST.format(minute=minute) for minute in (1, 2, 3))
        + _DEAD
        + _SMI
        + _stacks(*frames)
    )


_WAITS = ("poll (zmq/sugar/poll.py:106)", "dequeue (vllm/distributed/device_communicators/shm_broadcast.py:861)")
_SERVES = "=== engine log ===\n" + "".join(_STATS.format(at=f"0{minute}:10", rate=380.2, running=5) for minute in range(4))
_FAULT = (
    _STATS.format(at="00:10", rate=412.6, running=5)
    + "(EngineCore pid=40) ERROR 03-01 10:00:31 [core.py:1177] torch.AcceleratorError: CUDA error: an illegal "
    "memory access was encountered\n"
)
_REFUSED = (
    "=== engine log ===\n(EngineCore pid=40) ERROR 03-01 10:00:31 [core.py:1177] RuntimeError: persistent_topk: the grid would be "
    "oversubscribed: CTAs of a group cannot all be resident\n"
)
#: Relative -> (host evidence, what it really is: class, cause). Hangs in the top-k leave the waiting frames, or those of what
#: was launched next.
HOST: dict[str, tuple[str, str, str | None]] = {
    "drain": (_hang(*_WAITS), "gpu-spin-barrier", "peer-left"),
    "oversubscribe": (_hang(*_WAITS), "gpu-spin-barrier", "not-co-resident"),
    "oversubscribe-refused": (_REFUSED, "launch-refused", "oversubscribed"),
    "init-race": (_hang(*_WAITS), "gpu-spin-barrier", "init-race"),
    "reset-race": (
        _hang("top_k_mask_logits (flashinfer/sampling.py:1480)", "forward_cuda (vllm/v1/sample/ops/topk_topp_sampler.py:120)"),
        "gpu-spin-barrier",
        "reset-race",
    ),
    "missing-fence": (_hang(*_WAITS), "gpu-spin-barrier", "missing-fence"),
    "victim": (
        _hang(
            "trtllm_batch_decode_sparse_mla_dsv4 (flashinfer/mla.py:900)",
            "forward (vllm/models/deepseek_v4/nvidia/flashinfer_sparse.py:380)",
        ),
        "gpu-spin-barrier",
        "peer-left",
    ),
    "crossrank": (
        _hang("all_reduce (torch/distributed/distributed_c10d.py:2800)", "all_reduce (vllm/distributed/parallel_state.py:500)"),
        "gpu-crossrank-spin",
        "peer-behind",
    ),
    "histogram-ring": (_SERVES, "wrong-result", "histogram-ring"),
    "overflow": (_SERVES, "wrong-result", "overflow"),
    "cooperative": (_SERVES, "wrong-result", "padding"),
    "sentinel": (_FAULT, "gpu-fault", "illegal-access"),
}


def host(name: str) -> Classification:
    return classify(read_text("case.txt", HOST[name][0]))


def parents(class_: str) -> set[str]:
    """The class and its weaker parents."""
    found = {class_}
    parent: str | None = class_
    while parent is not None and parent != "unknown":
        parent = CLASSES[parent][2]
        found.add(parent or "unknown")
    return found


@pytest.mark.parametrize("pair", sorted(permutations(HOST, 2)), ids="-not-".join)
def test_the_host_alone_never_names_a_sibling_with_confidence(pair: tuple[str, str]) -> None:
    """What ``pair[0]`` leaves on the host is not called ``pair[1]``, unless the two are one class and one cause."""
    own, other = pair
    found = host(own)
    if found.confidence == "low" or HOST[own][1:] == HOST[other][1:]:
        return
    assert (found.class_, found.cause) != HOST[other][1:], found


@pytest.mark.parametrize("name", sorted(HOST))
def test_the_host_alone_says_the_class_or_a_weaker_one(name: str) -> None:
    found = host(name)
    _, class_, cause = HOST[name]
    if class_ == "wrong-result":
        assert found.class_ in ("not-hung", "unknown")  # a server that answers wrongly looks healthy
        return
    assert found.class_ in parents(class_) or found.confidence == "low", found
    assert found.cause in (None, cause), found


def test_the_same_stand_still_gets_the_same_answer() -> None:
    """From the host the spin barriers cannot be told apart, and the answer does not pretend that they can."""
    answers = {(host(name).class_, host(name).cause) for name in ("drain", "oversubscribe", "init-race", "missing-fence")}
    assert len(answers) == 1
    (answer,) = answers
    assert answer[1] is None


def test_what_the_host_can_tell() -> None:
    """A fault is in the log; of a hang only that a kernel does not retire, of wrong answers nothing."""
    assert (host("sentinel").class_, host("sentinel").cause, host("sentinel").confidence) == ("gpu-fault", "illegal-access", "high")
    assert host("reset-race").class_ == host("victim").class_ == "gpu-kernel-stuck"
    assert host("reset-race").confidence == "low"
