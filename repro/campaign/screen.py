"""The live screen of a hunt: trials a minute, hangs by identity, what each worker does, when it will end."""

from __future__ import annotations

from ..console import Screen
from .hunt import Progress

__all__ = ["LiveScreen", "duration", "progress_line", "progress_lines"]


def duration(seconds: float | None) -> str:
    """``1 h 05 min``, ``3 min 20 s``, ``12 s``; "not known" for None."""
    if seconds is None:
        return "not known"
    whole = int(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def progress_line(progress: Progress) -> str:
    """One line, for logs."""
    hangs = ", ".join(f"{name} x {count}" for name, count in list(progress.hangs.items())[:4]) or "no hang"
    lost = f", {progress.lost} workers lost" if progress.lost else ""
    return f"{progress.trials} trials, {progress.rate:.0f} a minute, {hangs}{lost}, ends in {duration(progress.left_s)}"


def progress_lines(progress: Progress) -> list[str]:
    """The whole picture, for a terminal."""
    return [
        f"{progress.trials} trials, {progress.rate:.0f} a minute; {duration(progress.elapsed_s)} gone, ends in "
        f"{duration(progress.left_s)}; {progress.lost} workers lost",
        *(f"  hang {name}: {count}" for name, count in list(progress.hangs.items())[:8]),
        *(f"  {line}" for line in progress.doing[:16]),
    ]


class LiveScreen:
    """On a terminal several lines that are redrawn; elsewhere a line every few seconds, by the verb's ``Screen``."""

    def __init__(self, screen: Screen, *, terminal: bool | None = None) -> None:
        import sys

        self._screen = screen
        self._live = None
        if sys.stderr.isatty() if terminal is None else terminal:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True, highlight=False, markup=False), refresh_per_second=4, transient=True)
            self._live.start()

    def __call__(self, progress: Progress) -> None:
        """Show it."""
        if self._live is None:
            self._screen.progress(progress_line(progress))
            return
        from rich.text import Text

        self._live.update(Text("\n".join(progress_lines(progress))))

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._live is not None:
            self._live.stop()
        self._screen.end_progress()
