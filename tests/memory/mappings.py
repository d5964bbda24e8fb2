"""What the kernel tells of this process's mappings."""

from __future__ import annotations


def prefers_huge_pages(address: int) -> bool:
    """Return whether the kernel was asked for huge pages in the mapping of an address."""
    is_in_mapping = False
    with open("/proc/self/smaps") as file:
        for line in file:
            name, _, rest = line.partition(" ")
            if name.endswith(":"):
                if is_in_mapping and name == "VmFlags:":
                    return "hg" in rest.split()
                continue
            begin, _, end = name.partition("-")
            is_in_mapping = int(begin, 16) <= address < int(end, 16)
    raise AssertionError("nothing is mapped there")
