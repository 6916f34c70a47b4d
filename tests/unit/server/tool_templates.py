"""Chat templates of the forms in which models call tools, written for the tests, and answers in these forms."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["FORMS", "TOOLS", "ToolAnswers"]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Reads a file.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "line": {"type": "integer"}},
                "required": ["path"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "set_mode",
            "parameters": {
                "type": "object",
                "properties": {"mode": {"enum": ["fast", "slow"]}, "force": {"type": "boolean"}},
                "required": ["mode", "force"],
                "additionalProperties": False,
            },
        },
    },
]

HERMES = """
{%- if tools %}<|repo_name|>system
You may call these functions:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Write <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call><|endoftext|>
{% endif %}
{%- for message in messages %}<|repo_name|>{{ message.role }}
{%- if message.role == "tool" %}
<tool_response>{{ message.content }}</tool_response>
{%- else %}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}
{%- endif %}<|endoftext|>
{% endfor %}
{%- if add_generation_prompt %}<|repo_name|>assistant
{% endif %}"""

MISTRAL = """
{%- for message in messages %}
{%- if message.role == "user" %}
{%- if tools and loop.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST] {{ message.content }}[/INST]
{%- elif message.tool_calls is defined %}
[TOOL_CALLS][{% for call in message.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}{{ raise_exception("an id has nine letters") }}{% endif -%}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}
{%- if not loop.last %}, {% endif %}{% endfor %}]<|endoftext|>
{%- elif message.role == "tool" %}[TOOL_RESULTS]{{ message.content }}, {{ message.tool_call_id }}[/TOOL_RESULTS]
{%- else %} {{ message.content }}<|endoftext|>
{%- endif %}
{%- endfor %}"""

MISTRAL_ARGS = """
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
{%- if message.role == "user" %}[INST]{{ message.content }}[/INST]
{%- elif message.role == "tool" %}[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]
{%- else %}{{ message.content or "" }}
{%- for call in message.tool_calls or [] -%}
[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}
{%- endfor %}<|endoftext|>
{%- endif %}
{%- endfor %}"""

LLAMA3 = """
{%- for message in messages %}
{%- if loop.first and tools %}<|repo_name|>user
Answer with {"name": function name, "parameters": dictionary of arguments} for one of these:
{% for tool in tools %}{{ tool | tojson(indent=4) }}
{% endfor %}{{ message.content }}<|endoftext|>
{%- elif message.tool_calls %}<|repo_name|>assistant
{%- set call = message.tool_calls[0].function %}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|endoftext|>
{%- else %}<|repo_name|>{{ "ipython" if message.role == "tool" else message.role }}
{{ message.content | tojson if message.content is mapping else message.content }}<|endoftext|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|repo_name|>assistant
{% endif %}"""

QWEN3_CODER = """
{%- if tools %}<|repo_name|>system
{% for tool in tools %}
{%- set function = tool.function %}<function><name>{{ function.name }}</name>
{%- for key, schema in function.parameters.properties | items %}
<parameter>{{ key }}: {{ schema.type | default("any") }}</parameter>
{%- endfor %}</function>
{% endfor %}Write <tool_call>
<function=NAME>
<parameter=KEY>
value
</parameter>
</function>
</tool_call><|endoftext|>
{% endif %}
{%- for message in messages %}<|repo_name|>{{ "user" if message.role == "tool" else message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}
<tool_call>
<function={{ call.function.name }}>
{%- for key, value in call.function.arguments | items %}
<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{%- endfor %}
</function>
</tool_call>
{%- endfor %}<|endoftext|>
{% endfor %}
{%- if add_generation_prompt %}<|repo_name|>assistant
{% endif %}"""

GLM = """
{%- if tools %}<|repo_name|>system
{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}Write <tool_call>NAME
<arg_key>KEY</arg_key>
<arg_value>VALUE</arg_value>
</tool_call><|endoftext|>
{% endif %}
{%- for message in messages %}<|repo_name|>{{ "observation" if message.role == "tool" else message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ call.function.name }}
{% for key, value in call.function.arguments.items() %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson(ensure_ascii=False) }}</arg_value>
{% endfor %}</tool_call>
{%- endfor %}<|endoftext|>
{% endfor %}
{%- if add_generation_prompt %}<|repo_name|>assistant
{% endif %}"""

MINIMAX = """
{%- set begin, end = "<minimax:tool_call>", "</minimax:tool_call>" %}
{%- for message in messages %}<|repo_name|>{{ message.role }}
{% if loop.first and tools %}{{ tools | tojson(ensure_ascii=False) }}{% endif %}{{ message.content or "" }}
{%- if message.tool_calls %}
{{ begin }}
{% for call in message.tool_calls %}<invoke name="{{ call.function.name }}">
{% for key, value in call.function.arguments.items() %}<parameter name="{{ key }}">
{{- value if value is string else value | tojson(ensure_ascii=False) }}</parameter>
{% endfor %}</invoke>
{% endfor %}{{ end }}
{%- endif %}<|endoftext|>
{% endfor %}
{%- if add_generation_prompt %}<|repo_name|>assistant
{% endif %}"""

DEEPSEEK = """
{%- for message in messages %}
{%- if loop.first and tools %}{{ tools | tojson }}{% endif %}
{%- if message.role == "assistant" and message.content is none %}
{%- for call in message.tool_calls %}
{%- if loop.first %}<｜tool▁calls▁begin｜>{% endif -%}
<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ call.function.name }}
```json
{{ call.function.arguments | tojson }}
```<｜tool▁call▁end｜>
{%- endfor %}<｜tool▁calls▁end｜><|endoftext|>
{%- else %}<|repo_name|>{{ message.role }}: {{ message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|repo_name|>assistant{% endif %}"""

DEEPSEEK_31 = """
{%- for message in messages %}
{%- if loop.first and tools %}{{ tools | tojson }}{% endif %}
{%- if message.tool_calls is defined %}<｜tool▁calls▁begin｜>
{%- for call in message.tool_calls -%}
<｜tool▁call▁begin｜>{{ call.function.name }}<｜tool▁sep｜>{{ call.function.arguments | tojson }}<｜tool▁call▁end｜>
{%- endfor %}<｜tool▁calls▁end｜><|endoftext|>
{%- else %}<|repo_name|>{{ message.role }}: {{ message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|repo_name|>assistant{% endif %}"""


DSML = """
{%- set mark = "｜DSML｜" %}
{%- for message in messages %}
{%- if loop.first and tools %}Write <{{ mark }}function_calls>: {{ tools | tojson(ensure_ascii=False) }}{% endif %}
{%- if message.role == "tool" %}<result>{{ message.content }}</result>
{%- elif message.role == "user" %}<｜User｜>{{ message.content }}<｜Assistant｜></think>
{%- else %}{{ message.content or "" }}
{%- if message.tool_calls %}

<{{ mark }}function_calls>
{% for call in message.tool_calls -%}
<{{ mark }}invoke name="{{ call.function.name }}">
{% for key, value in call.function.arguments.items() -%}
{%- set text = value if value is string else value | tojson(ensure_ascii=False) -%}
<{{ mark }}parameter name="{{ key }}" string="{{ "true" if value is string else "false" }}">
{{- text }}</{{ mark }}parameter>
{% endfor %}</{{ mark }}invoke>
{% endfor %}</{{ mark }}function_calls>
{%- endif %}<|endoftext|>
{%- endif %}
{%- endfor %}"""

KIMI = """
{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for message in messages %}
{%- if message.role == "assistant" %}<|im_assistant|>{% elif message.role == "user" %}<|im_user|>
{%- else %}<|im_system|>{% endif %}{{ message.role }}<|im_middle|>
{%- if message.role == "tool" %}## Return of {{ message.tool_call_id }}
{% endif %}{{ message.content or "" }}
{%- if message.tool_calls %}<|tool_calls_section_begin|>
{%- for call in message.tool_calls -%}
<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>
{%- endfor %}<|tool_calls_section_end|>
{%- endif %}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""

HARMONY = """
{%- set last = namespace(name="") %}<|start|>system<|message|>Channels: analysis, commentary, final.
Reasoning: {{ reasoning_effort | default("medium") }}<|end|>
{%- if tools %}<|start|>developer<|message|># Tools

namespace functions {
{% for tool in tools %}
type {{ tool.function.name }} = (_: {{ tool.function.parameters | tojson }}) => any;
{% endfor %}}<|end|>
{%- endif %}
{%- for message in messages %}
{%- if message.role == "assistant" and message.tool_calls is defined %}
{%- if message.content and message.thinking %}{{ raise_exception("content and thinking") }}{% endif %}
{%- if message.content or message.thinking -%}
<|start|>assistant<|channel|>analysis<|message|>{{ message.content or message.thinking }}<|end|>
{%- endif %}
{%- set call = message.tool_calls[0].function %}
{%- set last.name = call.name -%}
<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|end|>
{%- elif message.role == "tool" -%}
<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ message.content | tojson }}<|end|>
{%- elif message.role == "assistant" -%}
<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- else -%}
<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""


class ToolAnswers(NamedTuple):
    template: str
    name: str
    """Of the form."""
    two_calls: str
    """A text and a call of each tool; only one of the first where the form has no second."""
    broken: tuple[str, ...]
    """Texts that are no calls."""
    special: tuple[str, ...] = ()
    """Special tokens of such models."""
    text_form: str = "{}"
    """How an answer writes a text."""
    before_call: str = "{}"
    """And one before a call."""
    bias: tuple[str, ...] = ()
    """Tokens that a random model has to prefer to come to an end."""


_READ, _SET = '{"path": "a/ä.py", "line": 3}', '{"mode": "fast", "force": true}'
_JSON_READ = f'{{"name": "read_file", "arguments": {_READ}}}'
_JSON_SET = f'{{"name": "set_mode", "arguments": {_SET}}}'
_XML_READ = (
    "<function=read_file>\n<parameter=path>\na/ä.py\n</parameter>\n<parameter=line>\n3\n</parameter>\n</function>"
)
_XML_SET = (
    "<function=set_mode>\n<parameter=mode>\nfast\n</parameter>\n<parameter=force>\ntrue\n</parameter>\n</function>"
)
_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEP, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

FORMS = {
    "hermes": ToolAnswers(
        HERMES,
        "hermes",
        f"I look.\n\n<tool_call>\n{_JSON_READ}\n</tool_call>\n<tool_call>{_JSON_SET}</tool_call>",
        (
            '<tool_call>\n{"name": "read_file", "arguments": {"path": "x"}',
            '<tool_call>\n{"name": "read_file", "arguments": {"path": }}\n</tool_call>',
            '<tool_call>\n{"name": "read_file", "arguments": [1]}\n</tool_call>',
            '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>',
            '<tool_call>{"arguments": {"a": NaN}, "name": "x"}</tool_call>',
            "The tag <tool_call> begins a call, </tool_call> ends it.",
            "<tool_call>",
            "<tool_",
            '{"name": "read_file", "arguments": {}}',
            '<tool_call>{"a": ' + "[" * 5000,
        ),
    ),
    "mistral": ToolAnswers(
        MISTRAL,
        "mistral",
        f"I look. [TOOL_CALLS] [{_JSON_READ}, {_JSON_SET}]",
        (
            '[TOOL_CALLS][{"name": "read_file", "arguments": {"path": "x"}}',
            '[TOOL_CALLS][{"name": "read_file"}, 3]',
            "[TOOL_CALLS]",
            "[TOOL_CALLS] [] is a list",
            "[TOOL_CA",
            "a list [1, 2] and [TOOL",
        ),
        ("[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[INST]", "[/INST]"),
    ),
    "mistral_args": ToolAnswers(
        MISTRAL_ARGS,
        "mistral",
        f"I look.[TOOL_CALLS]read_file[ARGS]{_READ}[TOOL_CALLS]set_mode[CALL_ID]a1b2c3d4e[ARGS]{_SET}",
        ("[TOOL_CALLS]read_file[ARGS]{", "[TOOL_CALLS]no call\nat all", "[TOOL_CALLS]read_file[ARGS]{1}"),
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[INST]", "[/INST]"),
    ),
    "llama3": ToolAnswers(
        LLAMA3,
        "llama3",
        f'\n<|python_tag|>{{"name": "read_file", "parameters": {_READ}}}',
        (
            '{"name": "no_such_tool", "parameters": {}}',
            '{"a": 1} is JSON',
            'Here: {"name": "read_file", "parameters": {}}',
            '{"name": "read_file", "parameters": {"path": "x"',
            "{",
            "<|python",
            "<|python_tag|>print(1)",
        ),
        ("<|python_tag|>",),
    ),
    "qwen3_coder": ToolAnswers(
        QWEN3_CODER,
        "qwen3_coder",
        f"I look.\n\n<tool_call>\n{_XML_READ}\n</tool_call>\n<tool_call>\n{_XML_SET}\n</tool_call>",
        (
            "<tool_call>\n<function=read_file>\n<parameter=path>\nx\n</parameter>\n",
            "<tool_call>\n<function=read_file>\nfree text\n</function>\n</tool_call>",
            "<tool_call> or <function> are tags",
            "<function",
        ),
    ),
    "glm": ToolAnswers(
        GLM,
        "glm",
        "I look.\n<tool_call>read_file\n<arg_key>path</arg_key>\n<arg_value>a/ä.py</arg_value>\n"
        "<arg_key>line</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
        "<tool_call>set_mode<arg_key>mode</arg_key><arg_value>fast</arg_value>"
        "<arg_key>force</arg_key><arg_value>true</arg_value></tool_call>",
        (
            "<tool_call>read_file\n<arg_key>path</arg_key>\n",
            "<tool_call>read_file\nfree text</tool_call>",
            "The tag <tool_call> begins a call.",
        ),
    ),
    "minimax": ToolAnswers(
        MINIMAX,
        "minimax",
        'I look.\n<minimax:tool_call>\n<invoke name="read_file">\n<parameter name="path">a/ä.py</parameter>\n'
        '<parameter name="line">3</parameter>\n</invoke>\n<invoke name="set_mode">'
        '<parameter name="mode">fast</parameter><parameter name="force">true</parameter></invoke>\n'
        "</minimax:tool_call>",
        (
            '<minimax:tool_call>\n<invoke name="read_file">\n<parameter name="path">x</parameter>\n',
            '<minimax:tool_call>\n<invoke name="read_file">free text</invoke>\n</minimax:tool_call>',
            "<minimax:tool_call> begins calls",
        ),
        ("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "deepseek": ToolAnswers(
        DEEPSEEK,
        "deepseek",
        f"I look.{_BEGIN}{_CALL}function{_SEP}read_file\n```json\n{_READ}\n```{_CALL_END}\n"
        f"{_CALL}function{_SEP}set_mode\n```json\n{_SET}\n```{_CALL_END}{_END}",
        (
            f"{_BEGIN}{_CALL}function{_SEP}read_file\n```json\n{{\n```{_CALL_END}{_END}",
            f"{_BEGIN}{_CALL}function{_SEP}read_file\n",
            f"{_BEGIN} begins calls",
        ),
        (_BEGIN, _END, _CALL, _SEP, _CALL_END),
    ),
    "deepseek_31": ToolAnswers(
        DEEPSEEK_31,
        "deepseek",
        f"I look.{_BEGIN}{_CALL}read_file{_SEP}{_READ}{_CALL_END}{_CALL}set_mode{_SEP}{_SET}{_CALL_END}{_END}",
        (f"{_BEGIN}{_CALL}read_file{_SEP}{{{_CALL_END}{_END}", f"{_BEGIN}{_CALL}read_file{_SEP}[]{_CALL_END}{_END}"),
        (_BEGIN, _END, _CALL, _SEP, _CALL_END),
    ),
    "dsml": ToolAnswers(
        DSML,
        "dsml",
        'I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="read_file">\n'
        '<｜DSML｜parameter name="path" string="true">a/ä.py</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="line" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="set_mode"><｜DSML｜parameter name="mode" string="true">fast</｜DSML｜parameter>'
        '<｜DSML｜parameter name="force" string="false">true</｜DSML｜parameter></｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        (
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="path" string="true">x',
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="read_file">x</｜DSML｜invoke>\n</｜DSML｜function_calls>',
            '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="path">x</｜DSML｜parameter>'
            "</｜DSML｜invoke></｜DSML｜function_calls>",
            "<｜DSML｜function_calls> begins calls",
        ),
        ("｜DSML｜", "<｜User｜>", "<｜Assistant｜>"),
    ),
    "kimi": ToolAnswers(
        KIMI,
        "kimi",
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.read_file:3<|tool_call_argument_begin|>"
        f"{_READ}<|tool_call_end|>\n<|tool_call_begin|>functions.set_mode:4 <|tool_call_argument_begin|> {_SET}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.read_file:0<|tool_call_argument_begin|>{",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.read_file:0<|tool_call_argument_begin|>[]"
            "<|tool_call_end|><|tool_calls_section_end|>",
            "<|tool_calls_section_begin|> begins calls",
            "<|tool_calls_section_begin|>",
        ),
        (
            *("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
            *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
    ),
    "harmony": ToolAnswers(
        HARMONY,
        "harmony",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.read_file "
        f"<|constrain|>json<|message|>{_READ}<|call|><|start|>assistant to=functions.set_mode<|channel|>commentary json"
        f"<|message|>{_SET}<|call|>",
        (
            "<|channel|>commentary to=functions.read_file <|constrain|>json<|message|>{",
            "<|channel|>commentary to=functions.read_file <|constrain|>json<|message|>{]<|call|>",
            "<|channel|>commentary to=functions.read_file <|constrain|>json<|message|>[1]<|call|>",
            "<|chan",
            "<|channel|>" + "x" * 600 + "<|message|>",
            "to=be or not",
            "to=functions.read_file {}",
        ),
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"),
        "<|channel|>final<|message|>{}",
        "<|channel|>commentary<|message|>{}<|end|><|start|>assistant",
        ("<|end|>",),
    ),
}
_DSML = FORMS["dsml"]
FORMS["dsml_v4"] = _DSML._replace(
    template=DSML.replace("function_calls", "tool_calls"),
    two_calls=_DSML.two_calls.replace("function_calls", "tool_calls"),
    broken=tuple(broken.replace("function_calls", "tool_calls") for broken in _DSML.broken),
    special=(),
)
