"""How a child process is started, before anyone knows what it will be told: its command line and its two pipes.

Light to import, since ``ceiba serve`` starts the scheduler's process first of all: it imports torch while this one
opens the model's header, measures the machine and decides.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ceiba.core.errors import CeibaError

SCHEDULER = "scheduler"
DETOKENIZER = "detokenizer"
_BOOTSTRAP = (
    "import sys, importlib.util as u\n"
    "if u.find_spec('ceiba') is None: sys.path.append(sys.argv[1])\n"
    "from ceiba.launch.children import main\n"
    "main(sys.argv[2:])\n"
)


@dataclass(slots=True)
class Starting:
    """A process that runs already and has not got its first message."""

    process: subprocess.Popen[bytes]
    status_fd: int
    started: float

    def discard(self) -> None:
        """End it: there will be no first message."""
        self.process.kill()
        self.process.wait()
        os.close(self.status_fd)
        if self.process.stdin is not None:
            self.process.stdin.close()


def command(role: str) -> list[str]:
    """How to start ``role``; ``start`` appends the status descriptor. ``-P`` keeps the current directory, where
    anything may lie, out of the module path; the root is passed for a parent that found us through ``sys.path``."""
    root = str(Path(__file__).resolve().parents[2])
    return [sys.executable, "-P", "-c", _BOOTSTRAP, root, role]


def start(name: str, words: list[str]) -> Starting:
    """Run the command ``words`` with the status descriptor's number appended. Raises CeibaError.

    The calling thread must live as long as the process may: the kernel's parent-death signal goes by thread.
    """
    read_fd, write_fd = os.pipe()
    try:
        process = subprocess.Popen(
            [*words, str(write_fd)],
            stdin=subprocess.PIPE,
            pass_fds=(write_fd,),
            process_group=0,  # a Ctrl-C at the terminal is ours to handle, not theirs
        )
    except OSError as error:
        os.close(read_fd)
        raise CeibaError(f"could not start the {name} process: {error}") from error
    finally:
        os.close(write_fd)
    return Starting(process, read_fd, time.monotonic())
