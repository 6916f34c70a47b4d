"""A language server with inline completions (`lakh lsp`): an editor's LSP client on one side, a completion service
(`lakh serve`, or a gateway) on the other. Independent of torch.

    protocol.py     JSON-RPC messages over a pair of streams
    documents.py    the editor's open files, and positions in them
    context.py      what is sent: prefix, suffix, and neighbouring files
    suggestion.py   what is shown: repeated text removed, brackets closed
    server.py       requests, debouncing, cancellation
"""
