"""The process that captures and judges one hang for ``watch`` (``hang_process`` starts it): ``python -m … < LINE``.

Standard input: one line, the hang; later perhaps another, that the server moves again; its end means that the watch is gone, and
this process ends too. Standard output: one JSON object a line: ``run`` (the directory, once it is there), ``say`` (a sentence for
the operator), and last ``done`` (verdict; ``error`` and ``help`` where the evidence could not be kept).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...clock import SYSTEM, Clock
from ...errors import EvidenceError, ReproError
from .hang_document import HangVerdict, decode_hang
from .watch_loop import Hang

if TYPE_CHECKING:
    from ...forensics.records import Diagnosis
    from ..runstore import RunStore
    from .hang_run import Keep

__all__ = ["capture_and_judge", "main"]

CAPTURE_S = 40.0
#: A watch's samples of ten minutes are a few MiB.
_MOST_LINE = 64 << 20
_ORPHAN_S = 15.0
_SENTENCE = 3000


def capture_and_judge(say: Callable[[str], None], clock: Clock = SYSTEM) -> Keep:
    """Evidence and verdict by the server ground's own code. Without --attach nothing that needs ptrace."""

    def keep(hang: Hang, store: RunStore, attach: bool) -> Diagnosis | None:
        from ...forensics.records import Evidence
        from .server_capture import capture_server
        from .server_verdict import diagnose_server

        left: list[subprocess.Popen[bytes]] = []
        captures = capture_server(
            hang.target, store.evidence_folder, store.emit, snapshot=hang.snapshot, budget_s=CAPTURE_S, attach=attach,
            allow_dump=False, stacks=attach, moved=hang.moved, left=left, clock=clock,
        )  # fmt: skip
        for debugger in left:
            # Ending a debugger that is attached can end the server; that is the operator's to decide.
            store.emit("capture", what="debugger left", pid=debugger.pid)
            why = f"cuda-gdb (pid {debugger.pid}) did not come back and is left alone, attached"
            say(f"{why}; ending it can end the server")
        for capture in captures:
            for artefact in capture.artefacts:
                store.add_evidence(artefact.kind, artefact.path, artefact.origin, collector=capture.collector)
        evidence = tuple(
            Evidence(id=item.id, kind=item.kind, path=item.path, sha256=item.sha256, origin=item.origin, when=item.when)
            for item in store.evidence
        )
        return diagnose_server(
            captures, hang.snapshot, hang.assessment, store.evidence_folder, target=hang.target, evidence=evidence
        )

    return keep


def _verdict(diagnosis: Diagnosis) -> dict[str, str | None]:
    found = diagnosis.verdict
    sentence = (found.sentence or "")[:_SENTENCE]
    return HangVerdict(diagnosis.outcome, found.class_, found.cause, found.confidence, found.signature, sentence).words()


def answer_for(hang: Hang, more: dict[str, Any], tell: Callable[..., None], clock: Clock = SYSTEM) -> dict[str, Any]:
    """Do it all; the ``done`` object. A disk that is full costs the evidence, not the verdict on the samples."""
    from .hang_run import diagnosis_of_samples, keep_hang

    keep = capture_and_judge(lambda text: tell(say=text), clock)
    try:
        _, diagnosis = keep_hang(
            hang, Path(str(more["root"])), keep, attach=bool(more["attach"]), command=["dsv4-repro", "watch"], clock=clock,
            created=lambda path: tell(run=str(path)),
        )  # fmt: skip
    except ReproError as error:
        known = diagnosis_of_samples(hang, clock=clock)
        return {"verdict": _verdict(known), "error": str(error), "help": error.help_text}
    return {"verdict": _verdict(diagnosis)}


class _Watch:
    """The other end of standard input."""

    def __init__(self, fd: int) -> None:
        self._stream = os.fdopen(fd, "rb")
        self._moved = ""
        self._done = False

    def hang(self) -> tuple[Hang, dict[str, Any]]:
        """EvidenceError if there is none."""
        line = self._stream.readline(_MOST_LINE)
        if not line.endswith(b"\n"):
            raise EvidenceError("standard input holds no whole line")
        hang, more = decode_hang(line)
        threading.Thread(target=self._listen, name="dsv4-repro-watch-ended", daemon=True).start()
        return replace(hang, moved=lambda: self._moved), more

    def _listen(self) -> None:
        for line in self._stream:
            try:
                self._moved = str(json.loads(line)["moved"])
            except (ValueError, LookupError, TypeError):
                continue
        if self._done:
            return
        # Nobody waits for the answer any more: end in order, and at the latest soon.
        os.kill(os.getpid(), signal.SIGTERM)
        SYSTEM.sleep(_ORPHAN_S)
        os._exit(1)

    def done(self) -> None:
        self._done = True


def main() -> int:
    """0 with an answer; 130 where it was asked to end; 70 a defect, its name last on standard error."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    # What a library prints must not become part of the answer.
    with os.fdopen(os.dup(1), "w", encoding="ascii") as answers:
        os.dup2(2, 1)

        def tell(**message: Any) -> None:
            answers.write(json.dumps(message) + "\n")
            answers.flush()

        try:
            watch = _Watch(0)
            hang, more = watch.hang()
            tell(done=answer_for(hang, more, tell))
            watch.done()
        except KeyboardInterrupt:
            return 130
        except BrokenPipeError:
            return 1
        except Exception as error:
            print(f"{type(error).__name__}: {error}"[:500], file=sys.stderr)
            return 70
    return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    # Reader threads of the capture may still be inside a call; nothing is left to be written.
    os._exit(status)
