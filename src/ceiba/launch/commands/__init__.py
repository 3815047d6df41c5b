"""Commands that are small enough to live beside the dispatcher, one module each, all with ``main(argv) -> int``."""
