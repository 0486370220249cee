"""Built-in chat templates as published by the models' authors; `plain` is specific to this package."""

from __future__ import annotations

_QWEN3_SYSTEM = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% if messages[0].role == 'system' %}"
    "{{ messages[0].content + '\n\n' }}{% endif %}"
    "{{ '# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function"
    " signatures within <tools></tools> XML tags:\n<tools>' }}"
    "{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}"
    "{{ '\n</tools>\n\nFor each function call, return a json object with function name and arguments within"
    ' <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call><|im_end|>\n' }}"
    "{% elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
    "{% endif %}"
)
_QWEN3_RESPONSE = (
    "{% set thought, said = m.reasoning_content or '', m.content %}"
    "{% if not m.reasoning_content is string and '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\n' }}{% generation %}"
    # Thoughts are omitted from responses before the user's last question.
    "{% if loop.index0 > last.question and (loop.last or thought) %}"
    "{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + said.lstrip('\n') }}{% else %}{{ said }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ '\n' if said or not loop.first else '' }}"
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endgeneration %}"
)
_QWEN3_MESSAGES = (
    "{% set last = namespace(question=messages | length - 1) %}{% for m in messages %}"
    "{% if m.role == 'user'"
    " and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}"
    "{% set last.question = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    f"{_QWEN3_RESPONSE}"
    "{% elif m.role == 'tool' %}{{ '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' else '' }}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{{ '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' else '' }}"
    "{% elif m.role == 'user' or not loop.first %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}"
    "{% endif %}{% endif %}"
)

TEMPLATES = {
    "plain": "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}",
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "alpaca": "{% for m in messages %}{% if m.role == 'user' %}{{ '### Instruction:\n' + m.content + '\n\n' }}"
    "{% elif m.role == 'assistant' %}{{ '### Response:\n' + m.content + eos_token }}"
    "{% else %}{{ m.content + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}",
    "llama3": "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    "qwen3": _QWEN3_SYSTEM + _QWEN3_MESSAGES,
}
