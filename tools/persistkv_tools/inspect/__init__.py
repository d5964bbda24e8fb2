"""Commands that show the content, the state and the speed of stores."""
