"""The command `lakh`, also as `python -m lakh`; the launcher starts ranks this way.

Ctrl-C ends the process quietly (130 in a shell) while it imports and when it ends; in between, a command handles it.
"""

import signal


def main() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from lakh.cli import main as run

    run()


if __name__ == "__main__":
    main()
