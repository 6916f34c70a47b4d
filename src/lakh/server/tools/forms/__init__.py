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

FORM_NAMES = "Hermes (Qwen2.5, Qwen3), Qwen3-Coder, Seed-OSS, Mistral, Llama 3, DeepSeek"
_ARGUMENTS = re.compile(r"""["']arguments""")
_OTHERS = ("<arg_key>", "<invoke name=", "<tool_calls>")  # of GLM, MiniMax and Apriel, which are not read


def find_tool_form(template: str) -> ToolForm | None:
    """The form of a chat template; None if it is none of these."""
    if "<｜tool▁calls▁begin｜>" in template:
        return DeepSeekForm(has_block="```json" in template)
    if "[TOOL_CALLS]" in template:
        return MistralForm(has_list="[ARGS]" not in template)
    if "<function=" in template and "<parameter=" in template:
        return Qwen3CoderForm("seed:tool_call" if "<seed:tool_call>" in template else "tool_call")
    is_other = any(text in template for text in _OTHERS)
    if "<tool_call>" in template and _ARGUMENTS.search(template) and not is_other:
        return HermesForm()
    return Llama3Form() if "ipython" in template and '"parameters":' in template else None
