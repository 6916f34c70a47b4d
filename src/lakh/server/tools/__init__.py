"""Tool calls in a chat: the model asks the client to run a function, and gets its result in a later message.

tool_use.py      the tools of a request and how they may be used (`tools`, `tool_choice`, `parallel_tool_calls`)
messages.py      the messages of a request, with calls and their results
answer.py        chooses the parser of an answer
parser.py        finds the calls in the text of an answer as it arrives
channels.py      the same for answers in channels, and their reasoning
forms/           the forms in which models write calls, one file each, recognised by the chat template

Independent of torch and of the engine: the gateway reads and forwards tools too.
"""
