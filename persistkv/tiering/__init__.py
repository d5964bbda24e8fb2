"""Secondary tiers behind the primary one: the contract they keep, the manager that joins them, the persistent tier."""
