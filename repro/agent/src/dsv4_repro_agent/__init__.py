"""The agent that vLLM loads into its own processes: flight recorder and, where asked, guard and rescue. Inert unless armed."""

from __future__ import annotations

__all__ = ["__version__", "register"]

__version__ = "0.1.0"

_allowed = False


def register() -> None:
    """Entry point of ``vllm.general_plugins``. Called once or many times in each process of vLLM; never raises.

    Without ``DSV4_REPRO_AGENT=1`` (or a guard or rescue that was asked for) it returns at once and imports nothing.
    ``DSV4_REPRO_PTRACE=1`` alone lets debuggers attach and does nothing else.
    """
    from .settings import from_environment

    global _allowed
    settings = from_environment()
    if settings.ptrace and not _allowed:
        from .ptrace import allow_from_now_on

        _allowed = True
        allow_from_now_on()
    if not settings.asked:
        return
    from .plugin import start

    start(settings)
