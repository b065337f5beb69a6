"""`attrace` in a process of its own, over the stand-in api: python fake_cli.py ARGUMENTS."""

import signal

import fake_api

fake_api.install()
# A job in the background of a script is started deaf to Ctrl-C, and its children with it.
signal.signal(signal.SIGINT, signal.default_int_handler)

from attrace.apps.cli import main  # noqa: E402

main()
