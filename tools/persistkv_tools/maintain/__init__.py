"""Commands that check and change stores."""
