"""The comparison that no paper has: every method on the same networks, data and seeds, and how near each is to LLA."""
