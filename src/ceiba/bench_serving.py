"""``python -m ceiba.bench_serving`` is ``ceiba bench serve``, for scripts that already type it."""

import sys

from ceiba.bench.serve import main

if __name__ == "__main__":
    sys.exit(main())
