"""From three documents to a plan: the ordered passes, and the formulas they share."""
