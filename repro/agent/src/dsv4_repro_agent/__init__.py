"""The agent that vLLM loads into its own processes: flight recorder and, where asked, guard and rescue. Inert unless armed."""

from __future__ import annotations

__all__ = ["__version__", "register"]

__version__ = "0.1.0"


def register() -> None:
    """Entry point of ``vllm.general_plugins``. Called once or many times in each process of vLLM; never raises.

    Without ``DSV4_REPRO_AGENT=1`` (or a guard or rescue that was asked for) it returns at once and imports nothing.
    """
    from .settings import from_environment

    settings = from_environment()
    if not settings.asked:
        return
    from .plugin import start

    start(settings)
