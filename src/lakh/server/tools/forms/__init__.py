"""The forms in which models write calls of tools. The chat template shows which one a model was trained with."""

from __future__ import annotations

import re

from lakh.server.tools.forms.deepseek import DeepSeekForm
from lakh.server.tools.forms.hermes import HermesForm
from lakh.server.tools.forms.llama3 import Llama3Form
from lakh.server.tools.forms.mistral import MistralForm
from lakh.server.tools.forms.qwen3_coder import Qwen3CoderForm
from lakh.server.tools.forms.tool_form import ToolForm

__all__ = ["FORM_NAMES", "ToolForm", "find_tool_form"]

FORM_NAMES = "Hermes (Qwen2.5, Qwen3), Qwen3-Coder, Mistral, Llama 3, DeepSeek"
_LLAMA3 = re.compile(r'"name":.{1,200}"parameters":', re.DOTALL)


def find_tool_form(template: str) -> ToolForm | None:
    """The form of a chat template; None if it is none of these."""
    if "<｜tool▁calls▁begin｜>" in template:
        return DeepSeekForm(has_block="```json" in template)
    if "[TOOL_CALLS]" in template:
        return MistralForm(has_list="[ARGS]" not in template)
    if "<function=" in template and "<parameter=" in template:
        return Qwen3CoderForm()
    if "<tool_call>" in template and "<arg_key>" not in template:
        return HermesForm()
    return Llama3Form() if _LLAMA3.search(template) else None
