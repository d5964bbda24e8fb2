"""Secondary tiers behind the primary one: their contract, the manager of all tiers, and the
persistent tier."""
