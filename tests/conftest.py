"""What every test may rely on, whatever started the test run."""

from __future__ import annotations

import signal

# A run started in the background of a script (``… &``, nohup) inherits an ignored SIGINT, and so would every child that a test
# interrupts on purpose. A handler, unlike "ignore", is not inherited: children start with the default.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
