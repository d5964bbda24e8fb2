"""Unclean shutdowns and damage: the guard, the integrity check, and the quarantine."""
