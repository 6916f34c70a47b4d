"""The forms in which models write calls of tools. The chat template shows which one a model was trained with."""

from __future__ import annotations

import re

from lakh.server.tools.forms.deepseek import DeepSeekForm
from lakh.server.tools.forms.glm import GlmForm
from lakh.server.tools.forms.harmony import HarmonyForm
from lakh.server.tools.forms.hermes import HermesForm
from lakh.server.tools.forms.invoke import find_invoke_form
from lakh.server.tools.forms.kimi import KimiForm
from lakh.server.tools.forms.llama3 import Llama3Form
from lakh.server.tools.forms.mistral import MistralForm
from lakh.server.tools.forms.qwen3_coder import Qwen3CoderForm
from lakh.server.tools.forms.tool_form import ToolForm

__all__ = ["FORM_NAMES", "ToolForm", "find_tool_form"]

FORM_NAMES = (
    "Hermes (Qwen2.5, Qwen3), Qwen3-Coder, Seed-OSS, GLM, MiniMax-M2, Mistral, Llama 3, DeepSeek, Kimi K2, GPT-OSS"
)
_ARGUMENTS = re.compile(r"""["']arguments""")


def find_tool_form(template: str) -> ToolForm | None:
    """The form of a chat template; None if it is none of these."""
    if "<｜tool▁calls▁begin｜>" in template:
        return DeepSeekForm(has_block="```json" in template)
    if "<|channel|>" in template and "<|message|>" in template:
        return HarmonyForm()
    if "<|tool_calls_section_begin|>" in template or "tool_declare<|im_middle|>" in template:
        return KimiForm()
    invoke = find_invoke_form(template)
    if invoke is not None:
        return invoke
    if "[TOOL_CALLS]" in template:
        return MistralForm(has_list="[ARGS]" not in template)
    if "<function=" in template and "<parameter=" in template:
        return Qwen3CoderForm("seed:tool_call" if "<seed:tool_call>" in template else "tool_call")
    if "<arg_key>" in template and "<tool_call>" in template:
        return GlmForm()
    if "<invoke name=" in template:
        return None
    if "<tool_call>" in template and _ARGUMENTS.search(template) and "<tool_calls>" not in template:
        return HermesForm()
    return Llama3Form() if "ipython" in template and '"parameters":' in template else None
