from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ceiba.core.errors import BadRequest, ConfigError
from ceiba.text.template import ChatTemplate, choose_template
from ceiba.text.template_builtin import BUILTIN
from ceiba.text.template_pool import TemplatePool

USER = {"role": "user", "content": "Hi <b> é"}
SIMPLE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[go]{% endif %}"
PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% else %}<{{ p.type }}>{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
CALLS = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "({{ c.function.name }} ARGUMENTS){% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def pool() -> Iterator[TemplatePool]:
    pool = TemplatePool(1)
    yield pool
    pool.close()


def make(pool: TemplatePool, source: str | dict[str, str], **more: Any) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, pool=pool, **more)


def test_plain_rendering_and_variables(pool: TemplatePool) -> None:
    template = make(pool, SIMPLE + "{{ bos_token }}{{ enable_thinking }}", defaults={"enable_thinking": True})
    assert template.render([USER]) == "[user]Hi <b> é[go]<s>True"
    assert template.render([USER], add_generation_prompt=False, enable_thinking=False) == "[user]Hi <b> é<s>False"


@pytest.mark.parametrize("name", ["bos_token", "raise_exception", "documents", "chat_template", "tokenize"])
def test_requests_never_set_what_is_ours(pool: TemplatePool, name: str) -> None:
    with pytest.raises(BadRequest, match=name) as caught:
        make(pool, SIMPLE).render([USER], **{name: "x"})
    assert caught.value.param == "chat_template_kwargs"


def test_the_extras_of_hugging_face_templates(pool: TemplatePool) -> None:
    source = (
        "{%- for m in messages -%}{%- if loop.index > 1 -%}{%- break -%}{%- endif -%}"
        "{%- generation -%}{{ m.content | tojson }}{%- endgeneration -%}{%- endfor -%}"
        "{{ {'b': 1, 'a': 'é<'} | tojson(indent=1) }}{{ strftime_now('%Y') | length }}"
    )
    assert make(pool, source).render([USER, USER]) == '"Hi <b> é"{\n "b": 1,\n "a": "é<"\n}4'


def test_a_refusal_carries_the_templates_words(pool: TemplatePool) -> None:
    source = SIMPLE + "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    with pytest.raises(BadRequest, match="refuses this conversation: no tools here"):
        make(pool, source).render([{"role": "tool", "content": "x"}])


def test_parts_go_as_parts_only_where_the_template_reads_them(pool: TemplatePool) -> None:
    message = {
        "role": "user",
        "content": [
            {"type": "text", "text": "one"},
            {"type": "image_url", "image_url": {"url": "data:,secret"}},
            {"type": "text", "text": "two"},
        ],
    }
    assert make(pool, PARTS).render([message]) == "[user]one<image>two"
    with pytest.raises(BadRequest, match=r"messages\[0\].content has a part of type 'image'"):
        make(pool, SIMPLE).render([message])
    texts = {"role": "user", "content": [message["content"][0], message["content"][2]]}
    assert make(pool, SIMPLE).render([texts], add_generation_prompt=False) == "[user]one\ntwo"


def test_a_template_of_parts_only_gets_strings_as_parts(pool: TemplatePool) -> None:
    source = "{% for m in messages %}{{ m.content[0].text }}{% endfor %}"
    assert make(pool, source).render([USER]) == USER["content"]


def test_developer_is_system_where_unknown(pool: TemplatePool) -> None:
    message = {"role": "developer", "content": "x"}
    assert make(pool, SIMPLE).render([message]) == "[system]x[go]"
    assert make(pool, SIMPLE + "{# developer #}").render([message]) == "[developer]x[go]"


@pytest.mark.parametrize("form", ["{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}"])
@pytest.mark.parametrize("sent", [{"x": [1, None]}, '{"x": [1, null]}'])
def test_arguments_come_in_the_form_the_template_reads(pool: TemplatePool, form: str, sent: object) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": sent}}
    template = make(pool, CALLS.replace("ARGUMENTS", form))
    assert template.render([USER, {"role": "assistant", "content": None, "tool_calls": [call]}]) == (
        USER["content"] + '(f {"x": [1, null]})'
    )


def test_arguments_that_are_no_object_are_refused(pool: TemplatePool) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[1"}}
    with pytest.raises(BadRequest, match=r"messages\[1\].tool_calls\[0\].function.arguments"):
        make(pool, CALLS.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")).render(
            [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
        )


def test_the_tool_template_is_taken_with_tools(pool: TemplatePool) -> None:
    template = make(pool, {"default": "plain", "tool_use": "{{ tools[0].function.name }}"})
    assert template.render([USER]) == "plain"
    assert template.render([USER], [{"type": "function", "function": {"name": "f"}}]) == "f"


@pytest.mark.parametrize("end", ["", "  ", "\n"])
def test_the_last_message_is_continued(pool: TemplatePool, end: str) -> None:
    template = make(pool, "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}")
    messages = [USER, {"role": "assistant", "content": "Sure, " + end}]
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<user>Hi <b> é</user><assistant>Sure, " + end
    with pytest.raises(BadRequest, match="exclude each other"):
        template.render(messages, continue_final_message=True)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages is empty"),
        ([{"content": "x"}], "role is missing"),
        ([{"role": "user", "content": 7}], r"messages\[0\].content must be"),
        ([{"role": "user", "content": [{"type": "hologram"}]}], "hologram"),
        ([{"role": "user", "content": [{"type": "text"}]}], "text must be a string"),
    ],
)
def test_bad_messages_name_the_part(pool: TemplatePool, messages: list[Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        make(pool, SIMPLE).render(messages)


def test_a_template_that_does_not_compile_names_the_line(pool: TemplatePool) -> None:
    with pytest.raises(ConfigError, match="line 2"):
        make(pool, "a\n{% for %}")
    with pytest.raises(ConfigError, match="none called 'default'"):
        make(pool, {"rag": "x"})


# What the formats' authors publish as examples of one exchange.
FORMATS = {
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
    "<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n",
    "llama-2": "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nU [/INST] A </s><s>[INST] V [/INST]",
    "llama-3": "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>"
    "\n\nU<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
    "V<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "<s>[INST] S\n\nU [/INST] A</s>[INST] V [/INST]",
    "gemma": "<s><start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n"
    "<start_of_turn>user\nV<end_of_turn>\n<start_of_turn>model\n",
    "phi-3": "<|system|>\nS<|end|>\n<|user|>\nU<|end|>\n<|assistant|>\nA<|end|>\n<|user|>\nV<|end|>\n<|assistant|>\n",
    "zephyr": "<|system|>\nS</s>\n<|user|>\nU</s>\n<|assistant|>\nA</s>\n<|user|>\nV</s>\n<|assistant|>\n",
    "vicuna": "S USER: U ASSISTANT: A</s>USER: V ASSISTANT:",
    "alpaca": "S\n\n### Instruction:\nU\n\n### Response:\nA</s>\n\n### Instruction:\nV\n\n### Response:\n",
}


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_built_in_formats(pool: TemplatePool, name: str) -> None:
    turns = [("system", "S"), ("user", "U"), ("assistant", "A"), ("user", "V")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert make(pool, BUILTIN[name]).render(messages) == FORMATS[name]


def test_choosing(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("from a file", "utf-8")
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "from json"}), "utf-8")
    for option, expected in ((str(file), "from a file"), (str(config), "from json"), ("rag", "ragged"), (None, "own")):
        template = choose_template(option, {"default": "own", "rag": "ragged"})
        assert template is not None
        try:
            assert template.render([USER]) == expected
        finally:
            template.close()
    assert choose_template(None, {}) is None
    with pytest.raises(ConfigError, match="neither a file nor a template we know"):
        choose_template("no-such", {})
