"""Memory: huge pages, prefaulting, rows, and the budget of a host process."""
