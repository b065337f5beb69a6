"""`attrace` in a process of its own, over the stand-in api: python fake_cli.py ARGUMENTS."""

import fake_api

fake_api.install()

from attrace.apps.cli import main  # noqa: E402

main()
