"""The rescue: finds the known wait in the row states, releases it, and arms the guard for the next step.

The known wait, and nothing else: the step's event is overdue; four identical reads of the counters; a group whose counter is 1 (its
leader alone has arrived); the length of that group's row is negative as int32; and the host's max_seq_len is at most 32768, so that
its peers have left by the kernel's own rule. Anything else is said and left alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .sidestream import ARRIVAL_OFFSET, ROW_STATE_SIZE, Launch

__all__ = ["READS", "RELEASE_COUNT", "KnownWait", "find_wait", "zeroed_before_launch"]

READS = 4
RADIX_THRESHOLD = 32768
#: Satisfies every later wait of the launch in which it is written; the workspace is zeroed before the next one.
RELEASE_COUNT = 0x3FFFFFFF


@dataclass(frozen=True)
class KnownWait:
    """A leader that waits for a peer that has left. ``address``: of its arrival counter."""

    address: int
    group: int
    counter: int
    length: int
    launch: Launch


def find_wait(reads: Sequence[Sequence[int]], launch: Launch, lengths: Sequence[int]) -> tuple[KnownWait | None, str]:
    """The known wait in repeated reads of a launch's counters, or why there is none."""
    if len(reads) < READS:
        return None, f"{len(reads)} reads, {READS} needed"
    if any(tuple(one) != tuple(reads[0]) for one in reads):
        return None, "the counters move"
    if launch.max_seq_len > RADIX_THRESHOLD:
        return None, f"max_seq_len {launch.max_seq_len} is above {RADIX_THRESHOLD}: the peers stay"
    if launch.rows > len(reads[0]):
        return None, f"{launch.rows} rows in {len(reads[0])} groups: which row a group is at is not known"
    for group, counter in enumerate(reads[0]):
        if counter == 1 and group < len(lengths) and lengths[group] < 0:
            address = launch.workspace + group * ROW_STATE_SIZE + ARRIVAL_OFFSET
            return KnownWait(address, group, counter, lengths[group], launch), "the known wait"
    waiting = [group for group, counter in enumerate(reads[0]) if counter == 1]
    if waiting:
        return None, f"groups {waiting} have one arrival, but their rows have no negative length: not the known wait"
    return None, "no group has one arrival"


def zeroed_before_launch(version: str) -> tuple[bool, str]:
    """Whether the release's launcher zeroes the row states before each launch; without that a release would poison the next one.

    The only thing here that goes by version: the launcher is compiled and cannot be asked. Read in the source distributions of
    0.20.0 and 0.20.1 (not always zeroed) and 0.20.2 to 0.33.0 (always).
    """
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)$", version)
    if numbers is None:
        return False, f"vLLM {version or 'of unknown version'} is no release whose launcher was read"
    release = tuple(int(part) for part in numbers.groups())
    if release < (0, 20, 2):
        return False, f"vLLM {version} does not zero the row states before each launch"
    if release > (0, 33, 0):
        return False, f"vLLM {version}: its launcher was not read"
    return True, f"vLLM {version} zeroes the row states before each launch"
