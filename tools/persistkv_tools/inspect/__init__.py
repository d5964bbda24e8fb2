"""Commands that show what stores hold and how fast they are."""
