"""The log of a namespace: index objects and snapshots, their formats and names, and the state merged from them."""
