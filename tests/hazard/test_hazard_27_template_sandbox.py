"""HAZARDS 27: templates come from strangers. They cannot leave the sandbox, run without end, take all memory, or be
given variables that replace ours; and the next rendering works."""

from __future__ import annotations

import time

import pytest

from ceiba.core.errors import BadRequest, ConfigError
from ceiba.text.template import RESERVED, ChatTemplate
from ceiba.text.template_pool import TemplatePool, TemplateTimeout

GO = [{"role": "user", "content": "go"}]
FINE = [{"role": "user", "content": "fine"}]
WHEN = "{% if messages[0].content == 'go' %}"

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ ('%s' | format).__func__.__globals__ }}",
    "{{ raise_exception.__globals__['sys'] }}",
    "{% include '/etc/passwd' %}",
    "{% for i in range(10 ** 12) %}{% endfor %}",
]
ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% set n = 'x' * messages | length %}{{ (n * 999999999) * 99 }}",
    "{{ (7 + messages | length) ** (999999999 + messages | length) }}",
    "{% macro f(x) %}{% for i in range(9) %}{{ f(x) }}{% endfor %}{% endmacro %}{{ f(1) }}",
]


@pytest.mark.parametrize("escape", ESCAPES)
def test_nothing_leaves_the_sandbox(escape: str) -> None:
    template = ChatTemplate(WHEN + escape + "{% else %}ok{% endif %}")
    try:
        with pytest.raises(BadRequest):
            template.render(GO)
        assert template.render(FINE) == "ok"
    finally:
        template.close()


@pytest.mark.parametrize("endless", ENDLESS)
def test_time_and_memory_end(endless: str) -> None:
    pool = TemplatePool(1)
    try:
        number = pool.load(WHEN + endless + "{% else %}ok{% endif %}")
        began = time.monotonic()
        with pytest.raises(BadRequest) as caught:
            pool.render(number, {"messages": GO}, 10**6, seconds=1.0)
        assert time.monotonic() - began < 10
        assert isinstance(caught.value, TemplateTimeout) or caught.value.status == 400
        assert pool.render(number, {"messages": FINE}, 10**6) == "ok"
    finally:
        pool.close()


def test_a_template_that_never_ends_is_refused_at_the_start() -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError, match="did not finish"):
        ChatTemplate(ENDLESS[0])
    assert time.monotonic() - began < 10


def test_a_long_result_is_refused() -> None:
    pool = TemplatePool(1)
    try:
        number = pool.load("{% for i in range(99999) %}xxxxxxxxxx{% endfor %}")
        with pytest.raises(BadRequest, match="longer than 1000 characters"):
            pool.render(number, {}, 1000)
    finally:
        pool.close()


def test_request_variables_replace_none_of_ours() -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages | length }}{{ tools }}{{ x }}", {"bos_token": "<s>"})
    try:
        assert template.render(GO, x="mine") == "<s>1Nonemine"
        given_by_call = {"messages", "tools", "add_generation_prompt", "continue_final_message"}
        for name in [*(RESERVED - given_by_call), "bos_token"]:
            with pytest.raises(BadRequest, match=name):
                template.render(GO, **{name: "theirs"})
    finally:
        template.close()


def test_a_rendering_process_that_was_killed_while_idle_costs_no_request():
    pool = TemplatePool(1)
    try:
        number = pool.load("{{ x }}!")
        assert pool.render(number, {"x": "a"}, 100) == "a!"
        (worker,) = pool._idle
        worker.process.kill()
        worker.process.wait()
        assert pool.render(number, {"x": "b"}, 100) == "b!"
    finally:
        pool.close()
