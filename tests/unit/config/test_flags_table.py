"""The table of flags: every public name is known, and every row either works, is a hint, or is refused with words."""

from __future__ import annotations

import re

import pytest

from ceiba.config import available
from ceiba.config.flags import RANGES, Flags, flags_from_kwargs, lookup, make_flags, names, table
from ceiba.config.needs import NEEDS
from ceiba.core.errors import ConfigError

TYPES = {"bool", "int", "float", "str", "json", "list[str]", "list[int]", "list[float]"}

OLDER_SPELLINGS = {
    "--tensor-parallel-size": "--tp-size",
    "--tp": "--tp-size",
    "--pipeline-parallel-size": "--pp-size",
    "--data-parallel-size": "--dp-size",
    "--ep": "--ep-size",
    "--max-num-seqs": "--max-running-requests",
    "--max-num-batched-tokens": "--max-num-batched-tokens",
    "--gpu-memory-utilization": "--gpu-memory-utilization",
    "--enable-prefix-caching": "--enable-prefix-caching",
    "--api-server": "--api-server",
    "--multi-modal": "--multi-modal",
    "--metric-port": "--metric-port",
    "--worker-addresses": "--worker-addresses",
    "--model": "--model-path",
    "--enable-hicache": "--enable-hierarchical-cache",
}


def test_the_table_is_complete_and_well_formed() -> None:
    rows = table()
    assert len(rows) >= 541
    for flag in rows.values():
        assert re.fullmatch(r"--[a-z0-9][a-z0-9-]*", flag.name), flag
        assert flag.type in TYPES, flag
        assert flag.status in {"works", "hint", "refused"}, flag
        assert flag.text, flag
        if flag.status == "refused":
            assert flag.text in NEEDS, flag
        elif flag.status == "works":
            assert flag.text.endswith((".", ")")), flag
    spelled = [name for flag in rows.values() for name in (flag.name, *flag.aliases)]
    assert len(spelled) == len(set(spelled)), "one spelling names two flags"


def test_every_area_of_refusals_is_used() -> None:
    assert {flag.text for flag in table().values() if flag.status == "refused"} == set(NEEDS)


@pytest.mark.parametrize(("spelling", "name"), OLDER_SPELLINGS.items())
def test_older_spellings(spelling: str, name: str) -> None:
    assert names()[spelling].name == name


def test_what_the_first_release_serves_works() -> None:
    for name in [
        "--model-path",
        "--tokenizer-path",
        "--host",
        "--port",
        "--context-length",
        "--dtype",
        "--load-format",
        "--mem-fraction-static",
        "--max-running-requests",
        "--max-queued-requests",
        "--max-total-tokens",
        "--chunked-prefill-size",
        "--max-prefill-tokens",
        "--schedule-policy",
        "--schedule-conservativeness",
        "--page-size",
        "--disable-radix-cache",
        "--disable-overlap-schedule",
        "--stream-interval",
        "--api-key",
        "--admin-api-key",
        "--served-model-name",
        "--enable-metrics",
        "--log-requests",
        "--attention-backend",
        "--random-seed",
        "--decode-log-interval",
    ]:
        assert table()[name].status == "works", name


def test_available_values_and_ranges_name_real_flags() -> None:
    for name, values in available.VALUES.items():
        flag = table()[name]
        assert flag.status == "works", name
        assert values, name
        ours = {"cpu", "pytorch"}  # backends that are not among the older system's choices
        if flag.choices:
            assert set(values) <= set(flag.choices) | ours, name
    assert set(RANGES) <= set(table())


def test_defaults_pass_their_own_check() -> None:
    for flag in table().values():
        if flag.default is not None:
            assert flag.check(flag.default) is None, flag


@pytest.mark.parametrize(
    "name", [flag.name for flag in table().values() if flag.status == "refused" and flag.type == "bool"]
)
def test_every_refused_switch_says_why_and_what_instead(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_flags([(name, not table()[name].default)])
    assert name in caught.value.message
    assert "not available yet" in caught.value.message
    assert "Instead: " in caught.value.message


@pytest.mark.parametrize("name", [f.name for f in table().values() if f.status == "refused" and f.default is not None])
def test_a_refused_flag_at_its_default_is_fine(name: str) -> None:
    assert make_flags([(name, table()[name].default)]).values == {table()[name].dest: table()[name].default}


def test_unknown_names_get_the_closest() -> None:
    with pytest.raises(ConfigError, match="Did you mean --max-total-tokens"):
        lookup("--max-total-token")
    with pytest.raises(ConfigError, match="belongs to `ceiba gateway`"):
        lookup("--balance-abs-threshold")
    with pytest.raises(ConfigError, match="unknown flag"):
        lookup("--zzzzzz")


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        make_flags([("--tp", 2), ("--port", 0), ("--load-format", "pt")])
    lines = caught.value.message.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("--tp-size 2: not available yet")
    assert lines[1].startswith("--port 0: out of range")
    assert lines[2].startswith("--load-format pt: not available yet")


def test_hints_and_old_spellings_leave_a_line() -> None:
    flags = make_flags([("--enable-prefix-caching", True), ("--max-num-seqs", 4)])
    assert flags.get("max_running_requests") == 4
    assert any("--enable-prefix-caching: already on" in note for note in flags.notes)
    assert any("--max-num-seqs" in note and "--max-running-requests" in note for note in flags.notes)


def test_flags_fall_back_to_defaults_and_know_what_was_given() -> None:
    flags = make_flags([("--port", 30000)])
    assert flags.given("port")
    assert not flags.given("host")
    assert flags.get("host") == "127.0.0.1"
    assert flags.filled(random_seed=7, port=1).values == {"random_seed": 7, "port": 30000}
    with pytest.raises(KeyError):
        Flags().given("not_a_flag")


def test_keywords_of_python_follow_the_same_rules() -> None:
    assert flags_from_kwargs(max_total_tokens=64, tp=1, dtype=None).values == {"max_total_tokens": 64, "tp_size": 1}
    with pytest.raises(ConfigError, match="not available yet"):
        flags_from_kwargs(tp_size=2)
    with pytest.raises(ConfigError, match="expected int"):
        flags_from_kwargs(max_total_tokens="64")
    with pytest.raises(ConfigError, match="expected int"):
        flags_from_kwargs(max_total_tokens=True)
    with pytest.raises(ConfigError, match="unknown flag"):
        flags_from_kwargs(max_totl_tokens=64)
