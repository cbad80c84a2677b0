"""Lets a debugger that is not an ancestor attach to this process: what Yama's ptrace_scope 1 refuses otherwise."""

from __future__ import annotations

import ctypes
import os

__all__ = ["allow", "allow_from_now_on"]

#: prctl(2): PR_SET_PTRACER ("Yama") with PR_SET_PTRACER_ANY. Any process of the same user may attach, as at ptrace_scope 0.
_SET_PTRACER = 0x59616D61
_ANY = ctypes.c_ulong(-1)


def allow() -> bool:
    """Allow it in this process. Returns whether the kernel took it (without Yama it answers EINVAL, and nothing is needed)."""
    try:
        return bool(ctypes.CDLL(None, use_errno=True).prctl(_SET_PTRACER, _ANY, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def allow_from_now_on() -> bool:
    """In this process and, because the permission is not inherited, in each child that it forks."""
    done = allow()
    os.register_at_fork(after_in_child=allow)
    return done
