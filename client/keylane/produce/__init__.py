"""Publishing: checked, gathered into frames, sent in order, sent again in order."""
