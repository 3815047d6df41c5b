"""Calls side by side: in order, a few ahead, and none left running behind whoever has left."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import closing

import pytest

from ceiba.memory.storage.crew import Crew


@pytest.fixture(params=[1, 3])
def crew(request):
    made = Crew(request.param, "test")
    yield made
    made.close()


def test_results_come_in_order_and_an_exception_in_its_place(crew):
    assert list(crew.results(lambda n: n * n, range(20))) == [n * n for n in range(20)]
    assert list(crew.results(str, [])) == []
    found = []
    results = crew.results(lambda n: 6 // n, [1, 2, 0, 3])
    with pytest.raises(ZeroDivisionError):
        found.extend(results)
    assert found == [6, 3]
    assert list(crew.results(str, [7])) == ["7"]  # it goes on


def test_three_at_a_time_and_no_more_ahead():
    crew, together, begun = Crew(3, "test"), threading.Barrier(3), []

    def call(n: int) -> int:
        begun.append(n)
        together.wait(20)  # needs three
        return n

    results = crew.results(call, range(9))
    assert next(results) == 0
    assert sorted(begun) == [0, 1, 2]
    assert list(results) == list(range(1, 9))
    crew.close()


def test_who_leaves_waits_for_what_has_begun():
    crew, gate, ended = Crew(2, "test"), threading.Event(), []

    def call(n: int) -> int:
        if n:
            gate.wait(20)
        ended.append(n)
        return n

    with closing(crew.results(call, range(100))) as results:
        assert next(results) == 0
        gate.set()
    assert ended in ([0], [0, 1])  # the second had begun, or was called off
    before = len(ended)
    assert list(crew.results(lambda n: n, [5, 6])) == [5, 6]
    assert len(ended) == before
    crew.close()


def test_a_call_that_hangs_does_not_keep_the_process():
    program = (
        "import threading\n"
        "from ceiba.memory.storage.crew import Crew\n"
        "crew = Crew(2, 'test')\n"
        "def ask():\n    list(crew.results(lambda n: threading.Event().wait(), range(3)))\n"
        "threading.Thread(target=ask, daemon=True).start()\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
