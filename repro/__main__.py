"""``dsv4-repro`` and ``python -m dsv4_repro.repro``: the one place where errors become exit statuses.

``ReproError``: its message and its help on standard error, its status. Ctrl-C: 130. A wrong command line: 2. Anything else is a
defect of ours: 70, a short text, and the traceback in a file (on the screen with ``DSV4_REPRO_TRACEBACK=1``).
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import itertools
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from ..errors import OurFaultError, ReproError, UnavailableError, UsageError
from .exits import INTERRUPTED, OUR_FAULT, USAGE

__all__ = ["main"]

_TRACEBACK_VARIABLE = "DSV4_REPRO_TRACEBACK"
#: 128 + the number of SIGPIPE.
_SIGPIPE = 141
ERROR_SCHEMA = "dsv4-repro/error/1"


def _soften(stream: TextIO) -> None:
    """A stream that cannot encode a character prints its escape instead of failing (LANG=C, PYTHONIOENCODING=ascii)."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


def _say(text: str) -> None:
    from .console import printable

    for line in text.splitlines():
        sys.stderr.write(printable(line) + "\n")
    sys.stderr.flush()


def _error_document(kind: str, message: str, help_text: str, status: int) -> None:
    outcome = "inconclusive" if status == 5 else "error"
    document = {
        "schema": ERROR_SCHEMA,
        "outcome": outcome,
        "error": kind,
        "message": message,
        "help": help_text,
        "exit_status": status,
    }
    try:
        sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
        sys.stdout.flush()
    except OSError as error:  # nobody reads, or the disk is full: the sentence on standard error has to do
        _reader_gone()
        _say(f"dsv4-repro: the error document could not be written: {error.strerror}")


def _help_of(arguments: Sequence[str]) -> str:
    """The help of the verb that was asked for, in place of that of the whole program."""
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))
    verb = words[: 2 if words[:1] in (["run"], ["agent"]) else 1]
    return f"See: {' '.join(['dsv4-repro', *verb])} --help"


def _report_error(error: ReproError, arguments: Sequence[str], *, as_json: bool) -> int:
    message = str(error)
    # Whoever raised it deep below knew no better than the general help; here the verb is known.
    help_text = _help_of(arguments) if error.help_text == UsageError.help_text else error.help_text
    _say(f"dsv4-repro: {message}")
    if help_text:
        _say(f"  {help_text}")
    if isinstance(error, OurFaultError):
        _say(f"  Traceback: {_keep_traceback()}")
    if as_json:
        _error_document(type(error).__name__, message, help_text, error.exit_status)
    return error.exit_status


def _keep_traceback() -> str:
    """Write the current traceback into a private file; its path, or why there is none."""
    if os.environ.get(_TRACEBACK_VARIABLE) == "1":
        traceback.print_exc()
        return "above"
    try:
        fd, path = tempfile.mkstemp(prefix="dsv4-repro-traceback-", suffix=".txt")
        with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace") as stream:
            traceback.print_exc(file=stream)
    except OSError as error:
        return f"could not be written ({error.strerror}); set {_TRACEBACK_VARIABLE}=1 to see it"
    return path


def _unexpected(error: BaseException, *, as_json: bool) -> int:
    message = f"our own fault: {type(error).__name__}: {error}"
    where = _keep_traceback()
    _say(f"dsv4-repro: {message}")
    _say(f"  {OurFaultError.help_text}")
    _say(f"  Traceback: {where}")
    if as_json:
        _error_document(type(error).__name__, message, OurFaultError.help_text, OUR_FAULT)
    return OUR_FAULT


def _about_out(error: BaseException, arguments: Sequence[str]) -> ReproError | None:
    """The typed error where a verb could not write to the ``--out`` it was given (a file, a full or read-only disk): no defect."""
    words = [word for argument in arguments for word in (argument.split("=", 1) if argument.startswith("--out=") else [argument])]
    given = [Path(value).absolute() for word, value in itertools.pairwise(words) if word == "--out"]
    if not isinstance(error, OSError) or not isinstance(error.filename, str | os.PathLike):
        return None
    where = Path(os.fsdecode(error.filename)).absolute()
    if not any(where.is_relative_to(out) or out.is_relative_to(where) for out in given):
        return None
    from .atomic import disk_error

    return disk_error(error, where, "write")


def _about_given(error: BaseException, arguments: Sequence[str]) -> ReproError | None:
    """The typed error where the system cannot even look for a path of the command line (its name is too long, links go round, a
    file stands where a folder should): no defect."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR):
        return None
    if not isinstance(error.filename, str | bytes | os.PathLike):
        return None
    where = Path(os.fsdecode(error.filename))
    given = [word.rpartition("=")[2] for word in arguments if word]
    if not any(where.absolute().is_relative_to(Path(word).absolute()) for word in given if word):
        return None
    return UsageError(f"{str(where)[:200]}: {error.strerror}")


def _interrupted(*, as_json: bool) -> int:
    # CPython remembers an interrupt that passed through an exec of a string (a dataclass that was being made) and then ends
    # "python -m" by the signal, whatever is returned here; the next such exec forgets it.
    exec("")
    message = "interrupted; what was written so far is kept"
    _say(f"dsv4-repro: {message}")
    if as_json:
        _error_document("KeyboardInterrupt", message, "", INTERRUPTED)
    return INTERRUPTED


def _reader_gone() -> int:
    """The reader of our output is gone (head, less): nobody is left to tell, and Python would complain again at exit. 141, as a
    shell reports SIGPIPE."""
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - it lives as long as the process
    return _SIGPIPE


def _output_lost(error: OSError) -> int | None:
    """The status where the disk behind standard output is full; None where that is not it. Files of ours carry their name."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or error.filename is not None:
        return None
    _reader_gone()
    _say(f"dsv4-repro: the output could not be written: {error.strerror}")
    return UnavailableError.exit_status


def _run(arguments: list[str]) -> int:
    from .cli import build

    status = build().main(args=arguments, prog_name="dsv4-repro", standalone_mode=False)
    return status if isinstance(status, int) else 0


def _end_in_order() -> None:
    """SIGTERM and SIGHUP (a job that is cancelled, a terminal that is closed) end a verb as Ctrl-C does: with what it started.

    One that is ignored (nohup) stays ignored; a verb may set its own.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's); returns the exit status, never raises."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in arguments
    if argv is None:
        _end_in_order()
        with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):  # standard error may be closed, or no file
            faulthandler.enable()  # a fault inside a driver's library leaves the Python stacks
    _soften(sys.stdout)
    _soften(sys.stderr)
    try:
        ended = _run(arguments)
        return _interrupted(as_json=as_json) if ended == INTERRUPTED else ended  # the library turns Ctrl-C into this status
    except KeyboardInterrupt:
        return _interrupted(as_json=as_json)
    except ReproError as error:
        return _report_error(error, arguments, as_json=as_json)
    except BrokenPipeError:
        return _reader_gone()
    except SystemExit as error:  # the command line library ends so when it meets a closed pipe
        if error.code == INTERRUPTED:
            return _interrupted(as_json=as_json)
        return _reader_gone() if error.code == 1 else error.code if isinstance(error.code, int) else OUR_FAULT
    except Exception as error:
        if isinstance(error, OSError) and (status := _output_lost(error)) is not None:
            return status
        show = getattr(error, "show", None)
        if callable(show) and hasattr(error, "exit_code"):  # a usage error of the command line library, vendored or not
            show()
            if as_json:
                _error_document("UsageError", str(getattr(error, "message", error)), "See: dsv4-repro --help", USAGE)
            return USAGE
        refused = _about_out(error, arguments) or _about_given(error, arguments)
        if refused is not None:
            return _report_error(refused, arguments, as_json=as_json)
        if type(error).__name__ == "Abort":  # what the command line library makes of Ctrl-C
            return _interrupted(as_json=as_json)
        return _unexpected(error, as_json=as_json)


if __name__ == "__main__":
    sys.exit(main())
