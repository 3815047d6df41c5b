"""Chat templates by the common name of their format, for models that come without one (``--chat-template NAME``).

Owns these few Jinja sources, written after the formats' public descriptions. Must never know how they are rendered.
"""

from __future__ import annotations

from typing import Final

_CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

_LLAMA2 = """\
{%- set ns = namespace(system='') %}
{%- for message in messages %}
{%- if message['role'] == 'system' %}
{%- set ns.system = '<<SYS>>\\n' + message['content'] + '\\n<</SYS>>\\n\\n' %}
{%- elif message['role'] == 'user' %}
{{- bos_token + '[INST] ' + ns.system + message['content'] | trim + ' [/INST]' }}
{%- set ns.system = '' %}
{%- else %}
{{- ' ' + message['content'] | trim + ' ' + eos_token }}
{%- endif %}
{%- endfor %}"""

_LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

_MISTRAL = """\
{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- for message in messages %}
{%- if message['role'] == 'system' %}
{%- set ns.system = message['content'] + '\\n\\n' %}
{%- elif message['role'] == 'user' %}
{{- '[INST] ' + ns.system + message['content'] + ' [/INST]' }}
{%- set ns.system = '' %}
{%- else %}
{{- ' ' + message['content'] | trim + eos_token }}
{%- endif %}
{%- endfor %}"""

_GEMMA = """\
{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- for message in messages %}
{%- if message['role'] == 'system' %}
{%- set ns.system = message['content'] | trim + '\\n\\n' %}
{%- else %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\\n' + ns.system + message['content'] | trim + '<end_of_turn>\\n' }}
{%- set ns.system = '' %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<start_of_turn>model\\n' }}
{%- endif %}"""

_PHI3 = """\
{%- for message in messages %}
{{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>\\n' }}
{%- endif %}"""

_ZEPHYR = """\
{%- for message in messages %}
{{- '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>\\n' }}
{%- endif %}"""

_VICUNA = """\
{%- for message in messages %}
{%- if message['role'] == 'system' %}
{{- message['content'] + ' ' }}
{%- elif message['role'] == 'user' %}
{{- 'USER: ' + message['content'] + ' ' }}
{%- else %}
{{- 'ASSISTANT: ' + message['content'] + eos_token }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- 'ASSISTANT:' }}
{%- endif %}"""

_ALPACA = """\
{%- for message in messages %}
{%- if message['role'] == 'system' %}
{{- message['content'] + '\\n\\n' }}
{%- elif message['role'] == 'user' %}
{{- '### Instruction:\\n' + message['content'] + '\\n\\n' }}
{%- else %}
{{- '### Response:\\n' + message['content'] + eos_token + '\\n\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '### Response:\\n' }}
{%- endif %}"""

BUILTIN: Final[dict[str, str]] = {
    "alpaca": _ALPACA,
    "chatml": _CHATML,
    "gemma": _GEMMA,
    "llama-2": _LLAMA2,
    "llama-3": _LLAMA3,
    "mistral": _MISTRAL,
    "phi-3": _PHI3,
    "vicuna": _VICUNA,
    "zephyr": _ZEPHYR,
}
