"""``python -m persistkv_tools`` is ``persistkv``."""

from persistkv_tools.cli import main

main()
