"""What no training path needs: the memory of a run before it, and whether a critic pays."""
