"""A hang as a run writes it down, a run directory full of private values, and a browser that tells on a page."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from dsv4_repro.clock import FakeClock
from dsv4_repro.forensics.corewriter import write_core
from dsv4_repro.forensics.device_state import CodeImage, CtaState, DeviceState, GridState, LaneState, WarpState
from dsv4_repro.forensics.operands import Memory, Register, operand
from dsv4_repro.forensics.records import ChainLink, Diagnosis, Evidence, LedgerGroup, UnreadItem, Verdict, Wait, Window
from dsv4_repro.forensics.waitloop import CodeView
from dsv4_repro.kernels.abi import ROW_STATE_SIZE, TopKParams
from dsv4_repro.kernels.build import builtin_image
from dsv4_repro.kernels.disasm import disassemble
from dsv4_repro.reports.document import FixText, ReportSource
from dsv4_repro.reports.stacks_fold import HostThread
from dsv4_repro.repro.run_records import KernelRecord, RunRecord
from dsv4_repro.repro.runstore import RunStore

KERNEL = "_ZN4vllm10persistent22persistent_topk_kernelILi512ELj4EEEvNS0_20PersistentTopKParamsE"
EVIL = (
    "<script>alert(1)</script>\"'`--></title></style><img src=x onerror=alert(2)> \x1b[31mred\x00 \u202egnp.exe & {{7*7}} ]]>"
    + "A" * 300
)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSV4_REPRO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


# ---------------------------------------------------------------------------------------------------------------------------------
# A diagnosis and what goes with it


def make_wait(**more: Any) -> Wait:
    values: dict[str, Any] = {
        "kernel": KERNEL,
        "grid": (16, 1, 1),
        "block": (12, 0, 0),
        "warp": 0,
        "pc_offset": 0x1CE0,
        "address": "0x7f2c5a005468",
        "value": 1,
        "target": 2,
        "comparison": ">=",
        "state_field": "arrival_counter",
        "group": 6,
        "role": "leader",
        "device": 0,
        "instructions": (
            (0x1CD0, "LDG.E.STRONG.GPU R4, desc[UR16][R4.64+0xc08]"),
            (0x1CE0, "CCTL.IVALL"),
            (0x1CF0, "YIELD"),
            (0x1D00, "ISETP.GE.AND P0, PT, R4, R9, PT"),
            (0x1D10, "@!P0 BRA 0x1cd0"),
        ),
    }
    return Wait(**{**values, **more})


def make_hang(**more: Any) -> Diagnosis:
    """The defining case, with every further key that a classifier adds."""
    chain = (
        ChainLink(link="drain", status="measured", text="16 requests drained to 3 live ones at step 38", evidence=("E1",)),
        ChainLink(link="mtp", status="computed", text="3 x 2 = 6 rows"),
        ChainLink(link="producer", status="inferred", text="the padded slot gets length -1"),
        ChainLink(link="barrier", status="measured", text="arrival_counter is 1, block 12 waits for 2", evidence=("E1", "E2")),
        ChainLink(link="host", status="not observed", text="what the host did is not in this evidence"),
    )
    verdict = Verdict.model_validate(
        {
            "class": "gpu-spin-barrier",
            "cause": "peer-left",
            "confidence": "high",
            "signature": "vllm-51593",
            "identity": "b7e2c1904fd3",
            "sentence": "One block waits for a peer that left.",
        }
    )
    ledger = tuple(
        LedgerGroup(group=number, spinning=(12,), exited=(13,), inferred="an exited block leaves no trace")
        if number == 6
        else LedgerGroup(group=number, exited=(2 * number, 2 * number + 1))
        for number in range(8)
    )
    values: dict[str, Any] = {
        "outcome": "hang",
        "ground": "gpu",
        "verdict": verdict,
        "waits": (make_wait(),),
        "ledger": ledger,
        "chain": chain,
        "evidence": (
            Evidence(id="E1", kind="host-stacks", path="evidence/hang-1/host_stacks.txt", sha256="ab" * 32),
            Evidence(id="E2", kind="gpu-core", path="evidence/hang-1/gpu.nvcudmp", sha256="cd" * 32),
        ),
        "window": Window(live_requests=3, rows=6, graph_rows=8, padded_requests=1, reached=True),
        "unread": (UnreadItem(what="kernel log", why="not permitted", remedy="run as root"),),
        "next": "dsv4-repro run drain --kernel vllm==0.33.0",
        "unwedge": {"attempted": True, "retired": True, "milliseconds": 0.731, "address": "0x7f2c5a005468", "why_not": ""},
        "timing": {"launch_to_hung_s": 1.442, "hung_to_diagnosis_s": 0.903},
        "trials": {
            "asked": 200,
            "hang": 200,
            "bounds": [{"side": "at least", "value": 0.985, "confidence": 0.95, "of": "hang per window"}],
        },
        "decisive": [
            {
                "rule": "device-judged",
                "text": "block 12 polls 1 and waits for 2",
                "lines": [
                    {
                        "source": "evidence/hang-1/engine.log",
                        "first": 3,
                        "last": 4,
                        "unit": "line",
                        "text": "(12,0,0)",
                        "place": "evidence/hang-1/engine.log:3-4",
                    }
                ],
            },
        ],
        "contradicting": [],
        "alternatives": [],
        "signatures": [
            {"name": "vllm-51593", "standing": "match", "sentence": "all conditions hold", "workaround": "capture size 6"}
        ],
        "inputs": [
            {
                "path": "engine.log",
                "heading": "",
                "status": "partly",
                "kinds": ["engine log"],
                "lines": 40211,
                "unrecognised": 39,
                "first_unrecognised": 812,
                "note": "",
                "size": 8123123,
                "sha256": "bb" * 32,
            },
            {"path": "core.bin", "heading": "", "status": "unread", "kinds": [], "lines": 0, "note": "nothing here reads it"},
        ],
    }
    return Diagnosis.model_validate({**values, **more})


RUN: dict[str, Any] = {
    "scenario": "drain",
    "ground": "gpu",
    "started": "2026-11-29T14:05:00.123Z",
    "seconds": 5.4,
    "environment": {"device": "NVIDIA H200", "sm": 90, "driver": "580.159.04"},
    "kernel": {"origin": "vllm==0.27.1", "function": KERNEL, "sha256": "00" * 32, "sm": 90},
    "command": ["dsv4-repro", "run", "drain", "--trials", "200"],
    "versions": {"dsv4-repro": "0.1.0", "z3-solver": "4.15.4.0"},
}


def make_source(diagnosis: Diagnosis | None = None, **more: Any) -> ReportSource:
    values: dict[str, Any] = {
        "diagnosis": diagnosis or make_hang(),
        "run": RUN,
        "title": "A draining batch wedges the top-k",
        "version": "0.1.0",
        "fixes": [FixText("producer", "clamp at 0", "vLLM #51538", "--producer clamped")],
    }
    return ReportSource(**{**values, **more})


def make_lines() -> list[dict[str, Any]]:
    """A run's timeline: steps, a hang, collectors, the experiment."""
    lines: list[dict[str, Any]] = []
    t = 0.0

    def emit(kind: str, **fields: Any) -> None:
        lines.append({"t": round(t, 4), "at": f"2026-11-29T14:05:{t:06.3f}Z", "kind": kind, **fields})

    emit("start", trials=1, window=[38])
    rolled = random.Random(1)
    tokens = 0
    for index in range(38):
        t += 0.02
        live = max(3, 16 - index // 3)
        tokens += live
        emit("step", step=index, live=live, state="done", ms=1.1, reasons=[])
        if index % 4 == 0:
            emit(
                "sample",
                generation_tokens=tokens,
                waiting=0,
                nvml={"utilisation": 70 + rolled.randrange(20), "memory_utilisation": 35, "power_w": 420.5},
            )
    t += 1.4
    emit("sample", generation_tokens=tokens, nvml={"utilisation": 100, "memory_utilisation": 0, "power_w": 123.0})
    emit("hung", step=38, live=3, state="hung", ms=1400.0, reasons=["no layer finished"])
    for collector, disturbance in (("row_states", "none"), ("host_stacks", "pauses"), ("core_dump", "may end the process")):
        emit("collecting", collector=collector, disturbance=disturbance, deadline_s=8.0)
        t += 0.2
        emit("capture", collector=collector, disturbance=disturbance, seconds=0.2, unread=[])
    emit("unwedge", attempted=True, retired=True, ms=0.731)
    emit("end", outcome="hang")
    return lines


def make_threads(ranks: int = 4) -> list[HostThread]:
    """Copy threads that wait alike on all ranks, main threads of which rank 2 stands elsewhere."""
    found = []
    for rank in range(ranks):
        copy = (
            "synchronize (torch/cuda/streams.py:224)",
            "async_output_busy_loop (vllm/executor.py:888)",
            "run (threading.py:1010)",
        )
        found.append(HostThread(copy, "WorkerAsyncOutputCopy", rank=rank, pid=4100 + rank, waits="waits for a CUDA event"))
        main = [
            "poll (zmq/poll.py:106)",
            "acquire_read (vllm/shm_broadcast.py:612)",
            "dequeue (vllm/shm_broadcast.py:676)",
            "worker_busy_loop (vllm/executor.py:1002)",
            "worker_main (vllm/executor.py:801)",
        ]
        if rank == 2:
            main[:2] = ["_launch (triton/driver.py:712)", "run (triton/jit.py:733)"]
        found.append(HostThread(tuple(main), "MainThread", rank=rank, pid=4100 + rank))
    return found


@pytest.fixture
def made() -> Any:
    """The makers above, for tests that vary them."""

    class Made:
        wait = staticmethod(make_wait)
        hang = staticmethod(make_hang)
        source = staticmethod(make_source)
        lines = staticmethod(make_lines)
        threads = staticmethod(make_threads)
        run = RUN
        kernel = KERNEL
        evil = EVIL

    return Made


# ---------------------------------------------------------------------------------------------------------------------------------
# A device state of a kernel written here, as a dump


@lru_cache(maxsize=4)
def hung_state(sm: int = 90) -> DeviceState:
    """Block 12 of the builtin top-k polls 1 and waits for 2; its peer is gone."""
    image = builtin_image("unguarded", sm)
    lines = disassemble(image.cubin, image.function)
    loop = CodeView(lines.lines).wait_loops()[0]
    barrier = next(line.offset for line in lines.lines if line.offset > loop.branch and line.base == "BAR")
    states, entry = 0x7FD6_7BE0_0000, 0x7F12_3400_0000
    registers: dict[str, int] = {}
    memory = operand(loop.address)
    assert isinstance(memory, Memory)
    (base,) = memory.bases
    words = states + 6 * ROW_STATE_SIZE + 3080 - memory.offset
    number = int(base.name.lstrip("UR"))
    registers[base.name], registers[f"{base.kind}{number + 1}"] = words & 0xFFFFFFFF, words >> 32
    compare, load = lines.at(loop.compare), lines.at(loop.load)
    assert compare is not None
    assert load is not None
    goal = operand(compare.operands[3])
    assert isinstance(goal, Register)
    registers[goal.name] = 2
    registers.setdefault(load.operands[0], 1)
    warps = []
    for warp in range(4):
        bank = tuple(registers.get(f"R{n}", 7000 + n) if warp == 0 else 7000 + n for n in range(48))
        uniform = tuple(registers.get(f"UR{n}", 9000 + n) for n in range(63))
        lanes = []
        for lane in range(32):
            pc = loop.load + 16 if (warp, lane) == (0, 0) else barrier - 16 if warp == 0 else barrier + 16
            lanes.append(LaneState(lane, (32 * warp + lane, 0, 0), pc, bank, 8, entry + pc))
        active = 1 if warp == 0 else (1 << 32) - 1
        warps.append(WarpState(warp, (1 << 32) - 1, active, lanes[0].pc_offset, tuple(lanes), uniform, lanes[0].virtual_pc))
    params = TopKParams(0x7F00_1000, 0x7F00_2000, 0x7F00_3000, states, 8, 16384, 512, 8192, 2, 16384)
    cta = CtaState((12, 0, 0), 3, tuple(warps), (0, 0, 0))
    grid = GridState(
        0,
        5,
        image.function,
        (16, 1, 1),
        (1024, 1, 1),
        (cta,),
        (1, 1, 1),
        params.pack(),
        CodeImage(image.cubin, image.function, entry, sm),
    )
    return DeviceState("test", "measured", (grid,), {0: ("NVIDIA H200", sm, 132)})


@pytest.fixture
def core(tmp_path: Path) -> Callable[..., Path]:
    """Writes a dump of the hung state; keyword arguments change the state."""

    def write(name: str = "gpu.nvcudmp", options: Any = None, **changes: Any) -> Path:
        return write_core(tmp_path / name, dataclasses.replace(hung_state(), **changes), options)

    return write


# ---------------------------------------------------------------------------------------------------------------------------------
# A run directory with something to hide

#: What must not be found anywhere in a bundle.
SECRETS = (
    "hf_QmFzZTY0VG9rZW5BQkNERUZH",
    "sup3rs3cret-key",
    "second-secret-key",
    "pa55word",
    "gpu-node-07",
    "gpu-node-08",
    "alice",
    "Bob Smith",
    "10.11.12.13",
    "fe80::3eec:efff:fe12:3456",
    "3c:ec:ef:12:34:56",
    "the patient is called",
    "forty two is the answer",
    "acme-corp",
    "eyJhbGciOiJIUzI1NiJ9",
    "MIIEpAIBAAKCAQEA",
)
#: What must survive.
NEEDED = (
    KERNEL,
    "0x7f2c5a005468",
    "+0x1ce0",
    "cudnn 9.10.2.21",
    "No available shared memory broadcast block found in 60 seconds",
    "14:05:01",
    "std::vector<c10::Half>",
    "total_num_scheduled_tokens=6",
)
ENGINE_LOG = f"""\
(EngineCore pid=4000) INFO 11-29 14:05:00 [core.py:93] Initializing a V1 LLM engine (v0.27.1) with config: model='deepseek-ai/DeepSeek-V4'
(APIServer pid=3990) INFO 11-29 14:05:00 [utils.py:233] non-default args: {{'api_key': ['sup3rs3cret-key', 'second-secret-key'], 'max_num_seqs': 16}}
(EngineCore pid=4000) INFO 11-29 14:05:01 [parallel_state.py:1] distributed_init_method=tcp://10.11.12.13:29500 on node gpu-node-07
INFO 11-29 14:05:01 [logger.py:40] Received request chatcmpl-7f: prompt: 'the patient is called "Bob Smith", it\\'s urgent', params: SamplingParams(n=1), prompt_token_ids: [9707, 11, 847], lora_request: None.
INFO 11-29 14:05:02 Generated response chatcmpl-7f: output: 'forty two is the answer', output_token_ids: [52, 17], finish_reason: stop
gpu-node-07:4101:4180 [0] NCCL INFO Bootstrap: Using eth0:10.11.12.13<0>
gpu-node-08:4102:4181 [1] NCCL INFO Bootstrap: Using eth0:10.11.12.14<0>
Nov 29 14:05:03 gpu-node-07 vllm[4101]: HF_TOKEN=hf_QmFzZTY0VG9rZW5BQkNERUZH
(EngineCore pid=4000) INFO 11-29 14:06:03 [shm_broadcast.py:681] No available shared memory broadcast block found in 60 seconds. This typically happens when some processes are hanging
(EngineCore pid=4000) ERROR 11-29 14:10:03 [dump_input.py:79] Dumping scheduler output for model execution: SchedulerOutput(scheduled_new_reqs=[], num_scheduled_tokens={{'cmpl-1': 2, 'cmpl-2': 2, 'cmpl-3': 2}}, total_num_scheduled_tokens=6, scheduled_spec_decode_tokens={{'cmpl-1': [-1]}})
link/ether 3c:ec:ef:12:34:56 inet6 fe80::3eec:efff:fe12:3456/64 mail alice@acme-corp.com psql://alice:pa55word@db.acme-corp.com/x
curl -H 'Authorization: Bearer eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc' cudnn 9.10.2.21 kernel {KERNEL} at +0x1ce0 polls 0x7f2c5a005468
-----BEGIN RSA PRIVATE KEY-----
MIIEpAIBAAKCAQEA
-----END RSA PRIVATE KEY-----
#3 0x00007f2c in std::vector<c10::Half>::push_back () from /home/alice/venv/lib/libtorch.so
"""  # noqa: E501
STACKS = """\
Process 4101: /home/alice/venv/bin/python -c from multiprocessing.spawn import spawn_main --api-key sup3rs3cret-key
Python v3.12.3 (/home/alice/venv/bin/python3.12)

Thread 4101 (idle): "MainThread"
    poll (zmq/sugar/poll.py:106)
    dequeue (vllm/distributed/device_communicators/shm_broadcast.py:676)
    worker_busy_loop (vllm/v1/executor/multiproc_executor.py:1002)
Thread 4180 (idle): "WorkerAsyncOutputCopy"
    synchronize (torch/cuda/streams.py:224)
    async_output_busy_loop (/home/alice/venv/lib/python3.12/site-packages/vllm/v1/executor/multiproc_executor.py:888)
"""


def write_run(folder: Path, *, dump: bool = True, log: str = ENGINE_LOG, diagnosis: Diagnosis | None = None) -> Path:
    """A finished run in ``folder``: engine log, stacks, a GPU sample, a dump, a timeline, its diagnosis."""
    with RunStore.create("drain", out=folder, clock=FakeClock()) as store:
        for line in make_lines():
            store.emit(line["kind"], **{key: value for key, value in line.items() if key not in ("t", "at", "kind")})
        place = store.evidence_subfolder("hang-1")
        (place / "engine.log").write_text(log)
        (place / "host_stacks.txt").write_text(STACKS)
        (place / "gpu.json").write_text(
            json.dumps({"nvml": {"utilisation": 100}, "hostname": "gpu-node-07", "user": "alice", "prompt": "Bob Smith"})
        )
        (place / "row_states.bin").write_bytes(b"\0" * 24704)
        (place / "strange.bin").write_bytes(b"\x00\x01\x02\x03alice\xff" * 500)
        kinds = [
            ("engine-log", "engine.log"),
            ("host-stacks", "host_stacks.txt"),
            ("gpu-sample", "gpu.json"),
            ("row-states", "row_states.bin"),
        ]
        if dump:
            write_core(place / "gpu.nvcudmp", hung_state())
            kinds.append(("gpu-core", "gpu.nvcudmp"))
        entries = [store.add_evidence(kind, place / name) for kind, name in kinds]
        record = RunRecord(
            scenario="drain",
            ground="gpu",
            state="finished",
            started="2026-11-29T14:05:00.123Z",
            ended="2026-11-29T14:10:00.000Z",
            command=(
                "dsv4-repro",
                "run",
                "drain",
                "--out",
                "/home/alice/runs/x",
                "--url",
                "http://gpu-node-07:8000",
                "--api-key",
                "sup3rs3cret-key",
            ),
            versions={"dsv4-repro": "0.1.0", "z3-solver": "4.15.4.0"},
            environment={
                "device": "NVIDIA H200",
                "sm": 90,
                "driver": "580.159.04",
                "hostname": "gpu-node-07",
                "hf_token": "sup3rs3cret-key",
            },
            plan={"prompt": [200, 1800], "requests": 16},
            kernel=KernelRecord(origin="builtin", function=KERNEL, sha256="00" * 32, sm=90),
            outcome="hang",
            exit_status=3,
        )
        store.write_run(record)
        evidence = tuple(
            Evidence(id=e.id, kind=e.kind, path=e.path, sha256=e.sha256, origin=e.origin, when=e.when) for e in entries
        )
        links = (ChainLink(link="barrier", status="measured", text="seen on gpu-node-07", evidence=(evidence[0].id,)),)
        made = diagnosis or make_hang(evidence=evidence, chain=links)
        store.write_diagnosis(made.document())
    return folder


@pytest.fixture
def private_run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


@pytest.fixture
def secrets() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(what must be gone, what must stay)."""
    return SECRETS, NEEDED


@pytest.fixture
def new_run(tmp_path: Path) -> Callable[..., Path]:
    def build(name: str = "run", **more: Any) -> Path:
        return write_run(tmp_path / name, **more)

    return build


# ---------------------------------------------------------------------------------------------------------------------------------
# A browser

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (found := shutil.which(name))), None
)
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-sync",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--remote-debugging-port=0",
)


@dataclass
class Seen:
    """What a page did. ``requests``: URLs besides its own and ``data:``; ``complaints``: errors and warnings of the console."""

    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)
    picture: bytes = b""


class Browser:
    """Headless Chromium over its debugging port: ``look`` opens a file and says what happened."""

    def __init__(self, profile: Path) -> None:
        self.process = subprocess.Popen(
            [str(CHROMIUM), *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "HOME": str(profile)},
        )
        assert self.process.stderr is not None
        self.address = ""
        for line in self.process.stderr:
            found = re.search(r"ws://\S+", line)
            if found:
                self.address = found.group()
                break

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def look(
        self,
        page: Path,
        *,
        width: int = 1400,
        scheme: str = "light",
        media: str = "",
        ask: tuple[str, ...] = (),
        shot: bool = False,
    ) -> Seen:
        return asyncio.run(self._look(page, width, scheme, media, ask, shot))

    async def _look(self, page: Path, width: int, scheme: str, media: str, ask: tuple[str, ...], shot: bool) -> Seen:
        import aiohttp

        seen = Seen()
        url = page.as_uri()
        async with aiohttp.ClientSession() as session, session.ws_connect(self.address, max_msg_size=1 << 28) as socket:
            number = 0
            loaded = asyncio.Event()

            def event(message: dict[str, Any]) -> None:
                method, params = message.get("method"), message.get("params", {})
                if method == "Network.requestWillBeSent":
                    wanted = params["request"]["url"]
                    if wanted.split("#")[0] != url and not wanted.startswith("data:"):
                        seen.requests.append(wanted)
                elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                    seen.complaints.append(params["entry"]["text"])
                elif method == "Runtime.exceptionThrown":
                    seen.complaints.append(str(params["exceptionDetails"].get("text")))
                elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                    seen.complaints.append(str(params["args"]))
                elif method == "Page.loadEventFired":
                    loaded.set()

            async def call(method: str, target: str | None = None, **params: Any) -> dict[str, Any]:
                nonlocal number
                number += 1
                mine = number
                await socket.send_json(
                    {"id": mine, "method": method, "params": params, **({"sessionId": target} if target else {})}
                )
                while True:
                    message = json.loads((await socket.receive(timeout=30)).data)
                    if message.get("id") == mine:
                        answer: dict[str, Any] = message.get("result", message)
                        return answer
                    event(message)

            created = await call("Target.createTarget", url="about:blank")
            attached = await call("Target.attachToTarget", targetId=created["targetId"], flatten=True)
            tab = attached["sessionId"]
            for domain in ("Page", "Log", "Runtime", "Network"):
                await call(f"{domain}.enable", tab)
            await call("Emulation.setDeviceMetricsOverride", tab, width=width, height=900, deviceScaleFactor=1, mobile=width < 700)
            await call("Emulation.setEmulatedMedia", tab, media=media, features=[{"name": "prefers-color-scheme", "value": scheme}])
            await call("Page.navigate", tab, url=url)
            while not loaded.is_set():
                event(json.loads((await socket.receive(timeout=30)).data))
            settled = await call(
                "Runtime.evaluate", tab, expression="new Promise(done => setTimeout(done, 150))", awaitPromise=True
            )
            assert "exceptionDetails" not in settled
            for expression in ask:
                answer = await call("Runtime.evaluate", tab, expression=expression, returnByValue=True)
                seen.answers.append(answer["result"].get("value"))
            if shot:
                taken = await call("Page.captureScreenshot", tab, format="png")
                seen.picture = base64.b64decode(taken["data"])
            await call("Target.closeTarget", targetId=created["targetId"])
        return seen


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on PATH: apt-get install chromium")
    opened = Browser(tmp_path_factory.mktemp("browser"))
    if not opened.address:
        opened.close()
        pytest.skip("Chromium does not start here")
    yield opened
    opened.close()
