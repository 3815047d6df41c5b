"""``python -m ceiba.launch_server --model-path M`` is ``ceiba serve M``, for scripts that already type it."""

import sys

from ceiba.launch.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["serve", *sys.argv[1:]]))
