"""The committed flag reference is the generated one, and what it says exists does exist."""

from __future__ import annotations

from pathlib import Path

from machine_facts import cpu, gpu

from ceiba.config import available, reference
from ceiba.config.flags import table
from ceiba.config.records import DeviceFacts

DOCS = Path(__file__).parents[3] / "docs" / "flags.md"


def test_the_committed_reference_is_up_to_date() -> None:
    assert DOCS.read_text(encoding="utf-8") == reference.markdown(), "run: ceiba flags --markdown > docs/flags.md"


def test_every_flag_is_in_the_reference() -> None:
    text = reference.markdown()
    assert all(f"`{name}`" in text for name in table())


def test_rows_are_narrowed_to_the_machine() -> None:
    def values(device: DeviceFacts) -> list[str]:
        (row,) = (line for line in reference.rows(device=device) if line["flag"] == "--attention-backend")
        return list(row["values"])

    assert values(cpu()) == ["cpu", "torch_native", "intel_amx"]
    assert values(gpu(80)) == ["torch_native", "triton"]


def test_filter() -> None:
    assert {row["flag"] for row in reference.rows("max-num-seqs")} == {"--max-running-requests"}
    assert reference.rows("tensor-parallel") == []
    assert "--tp-size" in {row["flag"] for row in reference.rows("tensor-parallel", refused=True)}


def test_the_list_of_what_exists_is_true() -> None:
    from ceiba.attention.select import ALIASES, BACKENDS
    from ceiba.cache.eviction import POLICIES as EVICTION
    from ceiba.scheduler.policy import POLICIES

    assert set(available.POLICIES) == set(POLICIES)
    assert set(available.EVICTION_POLICIES) == set(EVICTION)
    assert set(available.ATTENTION_BACKENDS) == set(BACKENDS)
    assert available.ATTENTION_ALIASES == ALIASES
