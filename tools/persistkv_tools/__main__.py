"""``python -m persistkv_tools`` is ``persistkv``."""

from persistkv_tools.entry import main

main()
